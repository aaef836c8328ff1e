"""`move` brings a flat buffer from one placement to another.

It follows `TRANSITIONS` (planner/spec.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from ..base.memory import parts_in_lock_ranges
from ..comm.pending import DONE, Pending
from ..planner.messages import messages_of
from ..planner.spec import TRANSITIONS, Movement
from ..precision.codecs import Cast
from ..tiers.tier import Storage
from .buffer import FlatBuffer
from .coded_message import CodedMessage, summand_messages
from .comm_context import CommContext
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
            if not source.storage.on_device:
                source.guard.before_read()
                return _fetch_and_gather(source.storage, target, comm_ctx, what)
            return _all_gather(source.load(), target, comm_ctx, what)
        case Movement.REDUCE_SCATTER | Movement.ALL_REDUCE if not source.layout.slice_numel:
            pass
        case Movement.REDUCE_SCATTER:
            own = target.load()
            reduction = _ReduceScatter(source, own, target.storage, comm_ctx, what, add=add)
            reduction.on_sum = target.on_sum
            return reduction.start()
        case Movement.ALL_REDUCE:
            own = target.shard(comm_ctx.comm.rank)
            reduction = _ReduceScatter(source, own, Storage(own), comm_ctx, what, add=add)
            return reduction.start().then(lambda: _all_gather(own, target, comm_ctx, what).wait())
        case Movement.LOCAL_SLICE:
            target.load().copy_(source.shard(comm_ctx.comm.rank))
        case Movement.NOTHING:
            target.load().copy_(source.load())
    return DONE


def _fetch_and_gather(
    storage: Storage, target: FlatBuffer, comm_ctx: CommContext, what: str
) -> Pending:
    """Fetch this rank's slice, gather it in its turn, and evict it after the copy.

    `issue_queue` calls `start` after the fetch, and after the gathers that were added before.
    """
    numel = storage.memory.numel()

    def start() -> Pending:
        here = storage.read(0, numel)
        own = target.shard(comm_ctx.comm.rank)
        with comm_ctx.copy_engine.h2d(storage) as copy_event:  # copies to the device
            for part in parts_in_lock_ranges(here):
                own[part].copy_(here[part], non_blocking=True)
            pending = _all_gather(own, target, comm_ctx, what)

        def leave() -> None:
            copy_event.wait_stream()
            storage.evict(0, numel)

        if not copy_event.is_done():
            return pending.then(leave)
        leave()
        return pending

    return comm_ctx.issue_queue.add(storage.fetch(0, numel), start)


def _all_gather(own: Tensor, target: FlatBuffer, comm_ctx: CommContext, what: str) -> Pending:
    """Gather the slices of all ranks into the replicated `target`, in the gather lane."""
    comm = comm_ctx.comm
    slice_numel = target.layout.slice_numel
    if target.coded_as is not None and comm.size > 1:
        message = CodedMessage.of(target.memory, target.coded_as, comm_ctx.pool)
        message.encode(own, comm.rank * slice_numel)
        return gather_message(message, target, comm_ctx, what)
    into = target.shard(comm.rank)
    if into.data_ptr() != own.data_ptr():
        into.copy_(own)
    if comm.size == 1:
        return DONE
    return all_gather(target.load(), "gather", comm_ctx, what)


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
    pending = DONE if comm.size == 1 else all_gather(message.memory, "gather", comm_ctx, what)

    def decode() -> None:
        message.decode_slices([target.shard(rank) for rank in range(comm.size)])

    return pending.then(decode)


def all_gather(full: Tensor, lane: str, comm_ctx: CommContext, what: str) -> Pending:
    """Fill `full` with the slices of all ranks.

    Args:
        full: The output, shape ``(ranks * slice_numel,)``; this rank's slice must be in place.
        lane: The name of the ordered sequence of collectives to which this one belongs.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        what: The name of the unit, used in error messages.

    Returns:
        A handle; `full` may not be read or written before ``wait()`` returns.

    Note:
        Collective: every rank of the shard group must call it in the same order.
    """
    return comm_ctx.route.all_gather(full, lane, comm_ctx, what)


class _ReduceScatter:
    """Reduce a partial gradient into this rank's slice, message by message.

    The bytes in flight do not depend on the size of the model (ZeRO-R's constant-size buffers).
    """

    def __init__(
        self,
        source: FlatBuffer,
        own: Tensor,
        storage: Storage,
        comm_ctx: CommContext,
        what: str,
        *,
        add: bool,
    ) -> None:
        """Prepare the messages; `start` sends the first ones.

        Args:
            source: The partial gradient.
            own: The elements of this rank's sum.
            storage: The storage of `own`.
            comm_ctx: The communicator of the shard group, with buffer pool and settings.
            what: The name of the unit, used in error messages.
            add: Whether to add the sum to the values of `own`.
        """
        self.source = source
        self.own = own
        self.storage = storage
        self.comm_ctx = comm_ctx
        self.what = what
        self.add = add
        # Called with each part of the sum while it is on the training device.
        self.on_sum: Callable[[Tensor], object] | None = None
        wire = source.spec.wire or Cast(source.spec.dtype)
        near = comm_ctx.route.near
        # What a rank sends in the first hop, and what it receives in the last one
        self._sent = self._received = Message(wire, source.memory, comm_ctx.pool)
        if source.spec.wire is not None or near > 1:
            # Summands are cast or coded into lent memory, piece by piece (coded_message.py).
            self._sent, self._received = summand_messages(
                source.memory, wire, near, source.spec.wire_inside, source.errors, comm_ctx.pool
            )
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
        is_done = comm_ctx.comm.size == 1 and self.own.data_ptr() == self._sent.memory.data_ptr()
        if is_done or not slice_numel:
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
        # The elements of `own`, or a buffer on the device that `send` copies to their storage.
        landing = self.storage.landing(
            low, high, self._numel, comm_ctx.pool, comm_ctx.copy_engine, add=self.add
        )

        def add_up(received: Sequence[Tensor]) -> None:
            total = landing.values()
            self._received.sum(received, total, divisor=comm_ctx.divisor, add=self.add)
            if self.on_sum is not None:
                self.on_sum(total)
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
                self._sent.write(self.source.shard(rank)[low:high], piece, start)
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
