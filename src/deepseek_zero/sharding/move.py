"""`move` brings a flat buffer from one placement to another, by `TRANSITIONS` (planner/spec.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..comm.pending import DONE, Pending
from ..planner.messages import messages_of
from ..planner.spec import TRANSITIONS, Movement, S
from ..precision.codecs import Cast
from .buffer import FlatBuffer
from .coded_message import gather_coded, summand_messages
from .comm_context import CommContext
from .fetch import fetch_into
from .message import Message


def move(
    source: FlatBuffer, target: FlatBuffer, comm_ctx: CommContext, what: str, *, add: bool = False
) -> Pending:
    """Copy or reduce `source` into `target`, whose placement, dtype and memory may differ.

    A pending update of the source runs first. An offloaded source is then fetched, and evicted
    after it was copied. Sums for an offloaded target are formed on the device and stored from
    there.

    Args:
        source: The buffer to move. Its spec gives the encoding of summands.
        target: The output; may share storage with `source` (a partial gradient reduced in place).
            Slices are sent exactly unless `target.coded_as` is set.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        what: The name of the unit, used in error messages.
        add: Whether to add sums to the values of `target`.

    Returns:
        A handle; neither buffer may be read or written before ``wait()`` returns. ``wait()`` raises
        `PeerError` if another rank failed, and `StorageError` if a disk failed.

    Note:
        Collective unless no data crosses ranks: every rank of the shard group must call it in the
        same order.
    """
    match TRANSITIONS[source.spec.placement, target.spec.placement]:
        case Movement.ALL_GATHER:
            if source.storage.on_device:
                return _all_gather(source.load(), target, comm_ctx, what)
            source.guard.before_read()
            gather = partial(_all_gather, target=target, comm_ctx=comm_ctx, what=what)
            return fetch_into(source.storage, target, comm_ctx, gather)
        case Movement.REDUCE_SCATTER | Movement.ALL_REDUCE if not source.layout.slice_numel:
            pass
        case Movement.REDUCE_SCATTER:
            return _ReduceScatter(source, target, comm_ctx, what, add=add).start()
        case Movement.ALL_REDUCE:
            own = target.slice_of(comm_ctx.comm.rank)
            total = FlatBuffer(target.layout, replace(target.spec, placement=S), own)
            reduction = _ReduceScatter(source, total, comm_ctx, what, add=add).start()
            return reduction.then(lambda: _all_gather(own, target, comm_ctx, what).wait())
        case Movement.LOCAL_SLICE:
            target.load().copy_(source.slice_of(comm_ctx.comm.rank))
        case Movement.NOTHING:
            target.load().copy_(source.load())
    return DONE


def _all_gather(own: Tensor, target: FlatBuffer, comm_ctx: CommContext, what: str) -> Pending:
    """Gather the slices of all ranks into the replicated `target`, in the gather lane."""
    comm = comm_ctx.comm
    if target.coded_as is not None and comm.size > 1:
        return gather_coded(own, target, target.coded_as, comm_ctx, what)
    into = target.slice_of(comm.rank)
    if into.data_ptr() != own.data_ptr():
        into.copy_(own)
    if comm.size == 1:
        return DONE
    return comm_ctx.route.all_gather(target.load(), "gather", comm_ctx, what)


class _ReduceScatter:
    """Reduce a partial gradient into this rank's slice, message by message.

    The bytes in flight do not depend on the size of the model (ZeRO-R's constant-size buffers).
    """

    def __init__(
        self,
        source: FlatBuffer,
        target: FlatBuffer,
        comm_ctx: CommContext,
        what: str,
        *,
        add: bool,
    ) -> None:
        """Prepare the messages; the arguments are those of `move`."""
        self.source = source
        self.target = target
        self.own = target.load()
        self.comm_ctx = comm_ctx
        self.what = what
        self.add = add
        wire = source.spec.wire or Cast(source.spec.dtype)
        # What a rank sends in the first hop, and what it receives in the last one
        self._sent = self._received = Message(wire, source.memory, comm_ctx.pool)
        if source.spec.wire is not None or comm_ctx.route.near > 1:
            # Summands are cast or coded into lent memory, piece by piece (coded_message.py).
            self._sent, self._received = summand_messages(source, wire, comm_ctx)
        layout = source.layout
        self._numel, self._depth = messages_of(
            layout.slice_numel, layout.ranks, comm_ctx.bucket_numel, wire.message_numel
        )
        self._in_flight: deque[Pending] = deque()
        self._next = 0  # the first element of each slice that is not sent yet

    def start(self) -> Pending:
        """Send the first messages; the handle sends the others and waits for the sums."""
        comm_ctx = self.comm_ctx
        slice_numel = self.source.layout.slice_numel
        if comm_ctx.comm.size == 1 and self.own.data_ptr() == self._sent.memory.data_ptr():
            return DONE
        self._buffers = deque(
            comm_ctx.route.buffers(comm_ctx, self._sent, self._received, self._numel, slice_numel)
            for _ in range(self._depth)
        )
        for _ in range(self._depth):
            self._send_next()
        return Pending(self._finish, _issue=self._send_all)

    def _send_next(self) -> None:
        """Send the next message, and receive and add up that part of this rank's slice."""
        low = self._next
        high = min(low + self._numel, self.source.layout.slice_numel)
        comm_ctx = self.comm_ctx
        pieces = self._pieces(low, high)
        # The elements of the target, or a buffer on the device that `send` copies to their storage
        landing = self.target.storage.landing(
            low, high, self._numel, comm_ctx.pool, comm_ctx.copy_engine, add=self.add
        )

        def add_up(received: Sequence[Tensor]) -> None:
            total = landing.values()
            self._received.sum(received, total, divisor=comm_ctx.divisor, add=self.add)
            if self.target.on_sum is not None:
                self.target.on_sum(total)
            landing.send()

        pending = DONE
        if comm_ctx.comm.size == 1:
            add_up(pieces)  # there is one summand
        else:
            pending = self._buffers[0].exchange(pieces, low, high, self.what, add_up)
            self._buffers.rotate(-1)
        self._in_flight.append(pending)
        self._next = high

    def _pieces(self, low: int, high: int) -> list[Tensor]:
        """Return the piece of the message for each rank, for elements [low, high) of its slice."""
        layout = self.source.layout
        starts = range(low, layout.padded_numel, layout.slice_numel)
        pieces = [self._sent.piece(start, start + high - low) for start in starts]
        if self._sent.is_lent:
            for rank, (start, piece) in enumerate(zip(starts, pieces, strict=True)):
                self._sent.write(self.source.slice_of(rank)[low:high], piece, start)
        return pieces

    def _send_all(self) -> None:
        while self._next < self.source.layout.slice_numel:
            self._in_flight[0].wait()  # which raises again on each call, so no message is skipped
            self._send_next()
            self._in_flight.popleft()

    def _finish(self) -> None:
        self._send_all()
        while self._in_flight:
            self._in_flight.popleft().wait()
        for each in self._buffers:
            each.give_back()
        self._sent.arrived()
