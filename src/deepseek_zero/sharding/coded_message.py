"""Messages that encode a flat buffer with a codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..comm.collectives import ordered_sum
from ..comm.pending import DONE, Pending
from ..planner.by_host import hop_wires
from ..planner.layout import BLOCK
from ..precision.codecs import Blocks, Cast, Codec, LeftOut
from .buffer import FlatBuffer
from .comm_context import CommContext
from .message import Message
from .pool import Pool


@dataclass(frozen=True)
class CodedMessage(Message):
    """A flat buffer in the encoded form in which it is sent, in pooled memory.

    The slice of a rank is sent as one message, or several if it is cut.

    Attributes:
        errors: The error feedback: earlier quantization errors, which are added to the next
            elements; None without error feedback.
    """

    errors: LeftOut | None = None

    @classmethod
    def of(cls, values: Tensor, wire: Codec, pool: Pool) -> CodedMessage:
        """Create the message of a whole buffer, before any element is encoded.

        Args:
            values: The elements of the buffer, flat, including the padding.
            wire: The codec. A cast to the dtype of the elements sends them in place.
            pool: The pool from which the memory of the message is taken.
        """
        if wire == Cast(values.dtype):
            return cls(wire, values, pool)
        codes = pool.take(wire.length(values.numel()), wire.dtype)
        return cls(wire, codes, pool, is_lent=True)

    def encode(self, values: Tensor, low: int) -> None:
        """Encode elements into their part of the message.

        Args:
            values: The elements, flat.
            low: The index of the first element in the buffer.
        """
        self.write(values, self.piece(low, low + values.numel()), low)

    def write(self, values: Tensor, piece: Tensor, place: int) -> None:
        scratch = self.pool.take_scratch()
        if self.errors is None:
            self.wire.encode(values, piece, scratch)
        else:
            self.errors.encode(self.wire, values, piece, place, scratch)
        self.pool.give(scratch)

    def decode(self, low: int, out: Tensor) -> None:
        """Decode elements of the message.

        Args:
            low: The index of the first element in the buffer.
            out: The output, flat; its size is the number of elements.
        """
        scratch = self.pool.take_scratch()
        self.wire.decode(self.piece(low, low + out.numel()), 0, out.numel(), out, scratch)
        self.pool.give(scratch)

    def decode_slices(self, slices: Sequence[Tensor]) -> None:
        """Decode the whole message into the slices of the ranks, and return its memory to the pool.

        This rank's own slice is decoded too, so that all ranks compute with the same bits.

        Args:
            slices: The outputs, one for each rank, in rank order.
        """
        low = 0
        for values in slices:
            self.decode(low, values)
            low += values.numel()
        self.arrived()

    def add(self, low: int, out: Tensor) -> None:
        """Add elements of the message to `out`, in fp32, rounded once.

        Args:
            low: The index of the first element in the buffer.
            out: The tensor to add to, flat; its size is the number of elements.
        """
        scratch = self.pool.take_scratch()
        piece = self.piece(low, low + out.numel())
        half = scratch.numel() // 2
        for start in range(0, out.numel(), half):
            stop = min(start + half, out.numel())
            self.wire.decode(piece, start, stop, scratch[: stop - start], scratch[half:])
            # No variable may keep a view of lent memory.
            out[start:stop].copy_(scratch[: stop - start].add_(out[start:stop]))
        self.pool.give(scratch)

    def sum(self, received: Sequence[Tensor], into: Tensor, *, divisor: float, add: bool) -> None:
        wire = self.wire
        if not isinstance(wire, Blocks):
            super().sum(received, into, divisor=divisor, add=add)
            return
        scratch = self.pool.take_scratch()
        end = 2 * (int(scratch.numel() / (2 + wire.decode_scratch)) // BLOCK * BLOCK)

        def decode(piece: Tensor, start: int, stop: int, out: Tensor) -> None:
            wire.decode(piece, start, stop, out, scratch[end:])

        ordered_sum(received, into, scratch[:end], divisor=divisor, add=add, decode=decode)
        self.pool.give(scratch)


def summand_messages(
    source: FlatBuffer, wire: Codec, comm_ctx: CommContext
) -> tuple[CodedMessage, CodedMessage]:
    """Create the messages in which gradients are sent and in which their sums arrive.

    They are the same object unless gradients are summed within each host first.

    Args:
        source: The partial gradient of this rank.
        wire: The codec between ranks.
        comm_ctx: The communicator of the shard group, with buffer pool and route.

    Returns:
        The message that this rank sends first, and the one that it receives last.
    """
    near = comm_ctx.route.near
    first, last = hop_wires(wire, source.memory.dtype, near, source.spec.wire_inside)
    message = CodedMessage.of(source.memory, first, comm_ctx.pool)
    arriving = replace(message, wire=last, errors=source.errors)
    return (arriving, arriving) if near == 1 else (message, arriving)


def gather_coded(
    own: Tensor, target: FlatBuffer, codec: Codec, comm_ctx: CommContext, what: str
) -> Pending:
    """Encode this rank's slice, all-gather the slices of all ranks, and decode them.

    Args:
        own: This rank's slice, flat.
        target: The output, with all elements.
        codec: The codec in which the slices are sent.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        what: The name of the unit, used in error messages.

    Returns:
        A handle. The result may be read after its `wait()` has returned.

    Note:
        Collective: every rank of the shard group must call it in the same order.
    """
    message = CodedMessage.of(target.memory, codec, comm_ctx.pool)
    message.encode(own, comm_ctx.comm.rank * target.layout.slice_numel)
    return gather_message(message, target, comm_ctx, what)


def gather_message(
    message: CodedMessage, target: FlatBuffer, comm_ctx: CommContext, what: str
) -> Pending:
    """All-gather an encoded buffer of which this rank has its slice, and decode it.

    Args:
        message: The encoded buffer; only this rank's slice is written before.
        target: The output, with all elements.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        what: The name of the unit, used in error messages.

    Returns:
        A handle. The result may be read after its `wait()` has returned.

    Note:
        Collective: every rank of the shard group must call it in the same order.
    """
    comm = comm_ctx.comm
    pending = DONE
    if comm.size > 1:
        pending = comm_ctx.route.all_gather(message.memory, "gather", comm_ctx, what)

    def decode() -> None:
        message.decode_slices([target.slice_of(rank) for rank in range(comm.size)])

    return pending.then(decode)
