"""Flat buffers, and `move`, which brings a buffer from one placement to another.

`move` follows `TRANSITIONS` (planner/spec.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.memory import parts_in_lock_ranges
from ..comm.collectives import Comm
from ..comm.pending import DONE, OrderedIssueQueue, Pending
from ..comm.transports.base import Use
from ..planner.layout import FlatLayout, Slot
from ..planner.messages import message_buffer_sizes, messages_of
from ..planner.spec import TRANSITIONS, Movement, R, S, Spec
from ..precision.codecs import Cast, Codec, LeftOut
from ..tiers.tier import CopyEngine, Storage, Tier, Tiers, copy_engine_for
from .coded_message import CodedMessage, summand_messages
from .message import Message, Pool


class PendingUpdate(Protocol):
    """An update that runs after its step, or that ran before the end of its step."""

    def flush_group(self, group: Any) -> None:
        """Bring the states of this `ParamGroup` to their values after the last step.

        Other groups are updated only if necessary.
        """

    def flush(self) -> None:
        """Bring the states of every group to their values after the last step.

        Raises:
            StorageError: A disk failed.
            UsageError: An earlier update failed.
        """


@dataclass(eq=False)
class StateGuard:
    """Guard of the states of one group, called before every read and every write.

    After `engine.offload_states`, a state that was moved away has an `OffloadedGuard`, which raises
    at every access. The guard of its group then has a `refusal`, which raises at every write.

    Views for writing come from `FlatBuffer.write`, `FlatBuffer.writing`, `MasterWeight` and
    `Moments`, which all call `before_write`. No other code writes a state.

    Attributes:
        is_offloaded: Whether this is an `OffloadedGuard` (engine/state_offload.py).
        pending: An update that must run before a read. The optimizer that defers the update sets
            and clears it.
        reader: Called before a write; a background save copies the old values in it.
        writes: The number of writes. If it is unchanged, the states were not written.
        refusal: Raises while `engine.offload_states` has moved states of the group away.
    """

    is_offloaded = False

    pending: PendingUpdate | None = None
    reader: Callable[[], None] | None = None
    writes: int = 0
    refusal: Callable[[], None] | None = None

    def refuse_offloaded(self) -> None:
        """Raise `UsageError` if `engine.offload_states` has moved a state away."""
        if self.refusal is not None:
            self.refusal()

    def before_read(self) -> None:
        """Flush the pending updates of all groups.

        All groups are flushed because a reader may hold views of several.
        """
        if self.pending is not None:
            self.pending.flush()

    def before_write(self) -> None:
        """Let a background save copy the old values, and count the write."""
        self.refuse_offloaded()
        self.writes += 1
        if self.reader is not None:
            self.reader()


class FlatBuffer:
    """One state of one parameter group on this rank.

    The buffer has all elements if the state is replicated or partial, and one slice if it is
    sharded.

    Attributes:
        layout: The places of the parameters in the buffer.
        spec: The placement, dtype and memory of the state.
        memory: The elements, flat, in the spec's dtype; or the storage's substitute for them if
            they are offloaded or encoded. `load` and `elements` fetch them.
        storage: The memory in which the elements are kept between uses.
        guard: Called before every access.
        coded_as: The codec of slices that are gathered into this buffer; None if they are sent
            exactly.
        errors: The error feedback of summands that are sent as codes: the differences between the
            elements and their codes, which are added to the next summands. None if they are lost.
        on_sum: Called with each part of a sum that is formed for this buffer, flat, while the part
            is on the training device.
    """

    def __init__(
        self,
        layout: FlatLayout,
        spec: Spec,
        memory: Tensor,
        storage: Storage | None = None,
        *,
        guard: StateGuard | None = None,
        coded_as: Codec | None = None,
    ) -> None:
        self.layout = layout
        self.spec = spec
        self.memory = memory
        self.storage = Storage(memory) if storage is None else storage
        self.guard = StateGuard() if guard is None else guard
        self.coded_as = coded_as
        self.errors: LeftOut | None = None
        self.on_sum: Callable[[Tensor], object] | None = None

    def load(self) -> Tensor:
        """Return all elements of this rank, flat, to be read or as the target of `move`.

        Offloaded elements are fetched as in `elements`. Callers that know that the buffer is not
        offloaded use `memory`.
        """
        if self.storage.on_device and self.storage.has_elements:
            self.guard.before_read()
            return self.memory
        return self.elements(0, self.numel)

    @property
    def numel(self) -> int:
        """Return the number of elements on this rank."""
        return self.storage.numel

    def elements(self, low: int, high: int) -> Tensor:
        """Return a flat view of elements [low, high), fetched if offloaded. Local.

        Pending updates run first.

        Args:
            low: The index of the first element in this buffer.
            high: The end of the elements.

        Raises:
            StorageError: A disk failed.
        """
        self.guard.before_read()
        return self.storage.write(low, high)

    def write(self, low: int, high: int) -> Tensor:
        """Return a flat view of elements [low, high) to be written.

        A background save has copied the old values before this returns. The storage must hold the
        elements themselves; use `writing` for other storages.

        Args:
            low: The index of the first element in this buffer.
            high: The end of the elements.
        """
        assert self.storage.has_elements, "what is written to a copy of elements is lost"
        self.guard.before_write()
        return self.elements(low, high)

    @contextmanager
    def writing(self, low: int, high: int) -> Iterator[Tensor]:
        """Return a context manager that yields a flat tensor to overwrite [low, high).

        Args:
            low: The index of the first element in this buffer.
            high: The end of the elements.
        """
        self.guard.before_write()
        self.guard.before_read()
        with self.storage.writing(low, high) as values:
            yield values

    def read(self, low: int, high: int) -> Tensor:
        """Return a read-only view as `elements` does; a disk need not store it again.

        Args:
            low: The index of the first element in this buffer.
            high: The end of the elements.
        """
        self.guard.before_read()
        return self.storage.read(low, high)

    def read_now(self, low: int, high: int) -> Tensor:
        """Return a read-only view of the current values; a pending update does not run.

        Args:
            low: The index of the first element in this buffer.
            high: The end of the elements.
        """
        return self.storage.read_now(low, high)

    @classmethod
    def empty(cls, layout: FlatLayout, spec: Spec, device: torch.device) -> FlatBuffer:
        """Return a buffer of zeros on a device.

        Args:
            layout: The layout of the group.
            spec: The placement and dtype of the state.
            device: The device of the memory.
        """
        numel = spec.numel(layout.padded_numel, layout.ranks)
        return cls(layout, spec, torch.zeros(numel, dtype=spec.dtype, device=device))

    @classmethod
    def allocate(
        cls,
        layout: FlatLayout,
        spec: Spec,
        comm_ctx: CommContext,
        what: str,
        *,
        is_copied: bool = True,
    ) -> FlatBuffer:
        """Allocate a state in the memory that its spec names. Local.

        Args:
            layout: The layout of the group.
            spec: The placement, dtype and memory of the state.
            comm_ctx: The context that has the pool and the tiers.
            what: The name of the state, for messages.
            is_copied: The training device copies the state from or to its memory, if that is
                another one.
        """
        if spec.tier is Tier.DEVICE:
            return cls.empty(layout, spec, comm_ctx.pool.device).counted(comm_ctx, what)
        numel = spec.numel(layout.padded_numel, layout.ranks)
        storage = comm_ctx.tiers.reserve(spec.tier, numel, spec.dtype, what, is_copied=is_copied)
        return cls(layout, spec, storage.memory, storage)

    @classmethod
    def allocate_for_comm(
        cls,
        layout: FlatLayout,
        spec: Spec,
        comm_ctx: CommContext,
        what: str,
        *,
        is_zeroed: bool = True,
    ) -> FlatBuffer:
        """Allocate a buffer in the memory that other ranks access fastest.

        Args:
            layout: The layout of the group.
            spec: The placement and dtype of the state.
            comm_ctx: The context whose communicator allocates the memory.
            what: The name of the state, for messages.
            is_zeroed: Fill the buffer with zeros; otherwise it is uninitialized.
        """
        memory = comm_ctx.pool.comm.empty(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
        if is_zeroed:
            memory.zero_()
        return cls(layout, spec, memory).counted(comm_ctx, what)

    def counted(self, comm_ctx: CommContext, what: str) -> FlatBuffer:
        """Count this buffer against the device budget while it lives, and return it.

        Args:
            comm_ctx: The context that has the budget.
            what: The name of the state, for messages.
        """
        return comm_ctx.tiers.budget.reserve_for(self, self.memory.nbytes, what)

    def gathered_in(self, memory: Tensor, coded_as: Codec | None = None) -> FlatBuffer:
        """Return a buffer of all elements in `memory`, as the target of a gather.

        Args:
            memory: The memory, shape ``(padded_numel,)``.
            coded_as: The codec in which slices are sent; None to send them exactly.
        """
        return FlatBuffer(self.layout, Spec(R, self.spec.dtype), memory, coded_as=coded_as)

    def shard(self, rank: int) -> Tensor:
        """Return a flat view of the slice of a rank."""
        if self.spec.placement is S:
            return self.load()
        numel = self.layout.slice_numel
        return self.load()[rank * numel : (rank + 1) * numel]

    def view(self, slot: Slot) -> Tensor:
        """Return a view of a parameter in its own shape.

        The buffer must have all elements.
        """
        values = self.load()
        return values.as_strided(slot.shape, slot.strides, values.storage_offset() + slot.start)

    def local_range(self, slot: Slot, rank: int) -> tuple[int, int, int]:
        """Return the range of a parameter that this rank's buffer has, and its place.

        Args:
            slot: The place of the parameter in the layout.
            rank: This rank among those that share slices.

        Returns:
            ``(start, stop, place)``: elements [start, stop) of the parameter, and the index of the
            first one in the buffer.
        """
        if self.spec.placement is R:
            return 0, slot.numel, slot.start
        place, end = self.owned_range(slot, rank)
        start = self.layout.owned(slot, rank)[0] - slot.start
        return start, start + end - place, place

    def owned_view(self, slot: Slot, rank: int) -> Tensor:
        """Return a flat view of the part of a parameter that a rank owns.

        Args:
            slot: The place of the parameter in the layout.
            rank: The rank.
        """
        return self.elements(*self.owned_range(slot, rank))

    def owned_range(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Return the range [place, end) of `owned_view` in this buffer.

        Args:
            slot: The place of the parameter in the layout.
            rank: The rank.
        """
        start, stop = self.layout.owned(slot, rank)
        low = self.layout.bounds(rank)[0] if self.spec.placement is S else 0
        return start - low, max(start, stop) - low


@dataclass(frozen=True)
class CommContext:
    """The communicator, memory and settings that a move uses.

    Attributes:
        comm: The ranks that share the slices of the states.
        pool: The pool of scratch buffers.
        bucket_numel: The largest message, in elements.
        divisor: The number that sums are divided by.
        tiers: The memories for offloaded states.
        issue_queue: The gathers that wait for their fetch from `tiers`. It issues them in the order
            in which they were added, which is the same on every rank.
        copy_engine: Copies between `tiers` and the device, on streams of its own. The device waits
            for a copy by its event (`wait_stream`). On a CPU there is nothing to copy.
        outer: The context of the ranks that hold the same slices, over which sums are added up as
            well; None if there are no others.
        route: How messages are sent.
        gather_kind: The name under which the meter counts gathers.
    """

    comm: Comm
    pool: Pool
    bucket_numel: int = 1 << 62
    divisor: float = 1.0
    tiers: Tiers = field(default_factory=Tiers)
    issue_queue: OrderedIssueQueue = field(default_factory=OrderedIssueQueue)
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    outer: CommContext | None = None
    route: Route = field(default_factory=lambda: Route())
    gather_kind: str = "all_gather"

    @property
    def world(self) -> Comm:
        """Return the communicator of all ranks, which allocates buffers for communication."""
        return self.pool.comm

    @classmethod
    def over(
        cls, comm: Comm, pool: Pool, bucket_numel: int, divisor: float, tiers: Tiers
    ) -> CommContext:
        """Return the context of the ranks of one stage and tensor-parallel part.

        Args:
            comm: The communicator, laid out on a mesh.
            pool: The pool of scratch buffers.
            bucket_numel: The largest message, in elements.
            divisor: The divisor of the gradient sum over these ranks.
            tiers: The memories for offloaded states.
        """
        plain = cls(
            comm.shard, pool, bucket_numel, divisor, tiers, copy_engine=copy_engine_for(pool.device)
        )
        return plain if comm.outer is None else plain.with_outer(comm.outer, divisor)

    def with_outer(self, comm: Comm, divisor: float) -> CommContext:
        """Return this context with an outer sum of each slice over other ranks.

        Args:
            comm: The ranks of the outer sum.
            divisor: The divisor of the inner and outer sum together.
        """
        # The division happens once, in the first sum and before rounding.
        inner, outer = (divisor, 1.0) if self.comm.size > 1 else (1.0, divisor)
        others = CommContext(comm, self.pool, self.bucket_numel, outer, self.tiers)
        return replace(self, divisor=inner, outer=others)


def move(
    source: FlatBuffer, target: FlatBuffer, comm_ctx: CommContext, what: str, *, add: bool = False
) -> Pending:
    """Bring `source` to the placement, dtype and memory of `target`.

    A pending update of the source runs first. An offloaded source is then fetched, and evicted
    after it was copied. Sums for an offloaded target are formed on the device and stored from
    there.

    Args:
        source: The buffer to move. Its spec gives the encoding of summands.
        target: The output; may share storage with `source` (a partial gradient reduced in place).
            Slices are sent exactly unless `target.coded_as` is set.
        comm_ctx: The ranks that share slices.
        what: The name of the unit, for messages.
        add: Add sums to the values of `target`.

    Returns:
        A handle; neither buffer may be read or written before ``wait()`` returns. ``wait()`` raises
        `PeerError` if another rank failed, and `StorageError` if a disk failed.

    Note:
        Collective unless the movement is local. Every rank must call it, in the same order within
        its lane.
    """
    match TRANSITIONS[source.spec.placement, target.spec.placement]:
        case Movement.ALL_GATHER:
            if not source.storage.on_device:
                source.guard.before_read()
                return _fetch_and_gather(source.storage, target, comm_ctx, what)
            return _all_gather(source.load(), target, comm_ctx, what)
        case Movement.REDUCE_SCATTER:
            own = target.load()
            storage = target.storage
            return _reduce_scatter(source, own, storage, comm_ctx, what, target.on_sum, add=add)
        case Movement.ALL_REDUCE:
            own = target.shard(comm_ctx.comm.rank)
            pending = _reduce_scatter(source, own, Storage(own), comm_ctx, what, None, add=add)
            return pending.then(lambda: _all_gather(own, target, comm_ctx, what).wait())
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
    """Gather a message that has this rank's piece, and decode it into the target.

    Args:
        message: The codes of the whole buffer; only this rank's piece is written.
        target: The output, with all elements.
        comm_ctx: The ranks that share slices.
        what: The name of the unit, for messages.

    Note:
        Collective within the gather lane.
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
        lane: The name of the lane.
        comm_ctx: The ranks that share slices.
        what: The name of the unit, for messages.

    Returns:
        A handle; `full` may not be read or written before ``wait()`` returns.

    Note:
        Collective within the lane.
    """
    return comm_ctx.route.all_gather(full, lane, comm_ctx, what)


def _reduce_scatter(
    source: FlatBuffer,
    own: Tensor,
    storage: Storage,
    comm_ctx: CommContext,
    what: str,
    on_sum: Callable[[Tensor], object] | None,
    *,
    add: bool,
) -> Pending:
    """Reduce message by message into this rank's slice.

    The bytes in flight do not depend on the size of the model (ZeRO-R's constant-size buffers).

    Args:
        source: The partial gradient.
        own: The elements of this rank's sum.
        storage: The storage of `own`.
        comm_ctx: The ranks that share slices.
        what: The name of the unit, for messages.
        on_sum: Called with each part of the sum while it is on the training device.
        add: Add the sum to the values of `own`.
    """
    comm = comm_ctx.comm
    layout = source.layout
    if not layout.slice_numel:
        return DONE
    wire = source.spec.wire or Cast(source.spec.dtype)
    route = comm_ctx.route
    pool = comm_ctx.pool
    # The message of the first hop, and that of the last hop (`arriving`).
    message = arriving = Message(wire, source.memory, pool)
    if source.spec.wire is not None or route.near > 1:
        # Summands are cast or coded into lent memory, piece by piece (coded_message.py).
        message, arriving = summand_messages(
            source.memory, wire, route.near, source.spec.wire_inside, source.errors, pool
        )
    if comm.size == 1 and own.data_ptr() == message.memory.data_ptr():
        return DONE
    step, depth = messages_of(
        layout.slice_numel, layout.ranks, comm_ctx.bucket_numel, wire.message_numel
    )
    cuts = [
        (low, min(low + step, layout.slice_numel)) for low in range(0, layout.slice_numel, step)
    ]
    buffers = [
        route.message_buffers(comm_ctx, message, arriving, step, layout.slice_numel)
        for _ in range(depth)
    ]

    def start(number: int) -> Pending:
        low, high = cuts[number]
        starts = range(low, layout.padded_numel, layout.slice_numel)
        pieces = [message.piece(start, start + high - low) for start in starts]
        if message.is_lent:
            for rank, (start, piece) in enumerate(zip(starts, pieces, strict=True)):
                message.write(source.shard(rank)[low:high], piece, start)
        # The elements of `own`, or a buffer on the device that `send` copies to their storage.
        landing = storage.landing(low, high, step, comm_ctx.pool, comm_ctx.copy_engine, add=add)

        def add_up(received: Sequence[Tensor]) -> None:
            total = landing.values()
            arriving.sum(received, total, divisor=comm_ctx.divisor, add=add)
            if on_sum is not None:
                on_sum(total)
            landing.send()

        if comm.size == 1:
            add_up(pieces)  # there is one summand
            return DONE
        return buffers[number % depth].exchange(pieces, low, high, what, add_up)

    under_way = deque(start(number) for number in range(depth))
    remaining = deque(range(depth, len(cuts)))

    def issue() -> None:
        while remaining:
            under_way[0].wait()  # which raises again on each call, so no message is skipped
            under_way.append(start(remaining[0]))
            under_way.popleft()
            remaining.popleft()

    def finish() -> None:
        issue()
        while under_way:
            under_way.popleft().wait()
        for each in buffers:
            each.give_back()
        message.arrived()

    return Pending(finish, _issue=issue)


class MessageBuffers:
    """Pooled buffers that receive the parts of a message one at a time, to be summed."""

    def __init__(self, comm_ctx: CommContext, sizes: Sequence[tuple[torch.dtype, int]]) -> None:
        """Take the buffers from the pool.

        Args:
            comm_ctx: The ranks that send and receive.
            sizes: The dtype and the number of elements of each buffer.
        """
        self.comm_ctx = comm_ctx
        self.lent = [comm_ctx.pool.take(length, dtype) for dtype, length in sizes]

    def exchange(
        self, pieces: Sequence[Tensor], low: int, high: int, what: str, add_up: Use
    ) -> Pending:
        """Send ``pieces[r]`` to rank r, and pass the pieces for this rank to `add_up`.

        The buffers are free for the next part after ``wait()`` returns.

        Args:
            pieces: One piece for each rank.
            low: The first element of each slice that its piece covers.
            high: The end of these elements.
            what: The name of the unit, for messages.
            add_up: Sums the received pieces.

        Note:
            Collective within the reduce lane.
        """
        comm = self.comm_ctx.comm
        inbox = self.lent[0] if self.lent else None
        boxes = boxes_in(inbox, comm, pieces[0].numel())
        return comm.exchange(pieces, boxes, "reduce", what, add_up)

    def give_back(self) -> None:
        """Return the buffers to the pool."""
        for tensor in self.lent:
            self.comm_ctx.pool.give(tensor)


class Route:
    """How messages travel among the ranks that share slices; directly by default.

    Extensions derive from this class. All ranks use the same class.

    Attributes:
        near: The number of nearby ranks whose gradients are summed first; only the sums are sent
            on. With 1, every gradient goes to the owner of its slice.
    """

    near = 1

    def hops(self, comm: Comm) -> tuple[Comm, Comm]:
        """Return the ranks of the first and of the last hop of a message."""
        return comm, comm

    def all_gather(self, full: Tensor, lane: str, comm_ctx: CommContext, what: str) -> Pending:
        """Fill `full` with the slices of all ranks; see `all_gather`.

        Args:
            full: The output, with this rank's slice in place.
            lane: The name of the lane.
            comm_ctx: The ranks that share slices.
            what: The name of the unit, for messages.

        Note:
            Collective within the lane.
        """
        return comm_ctx.comm.all_gather(full, lane, what, comm_ctx.gather_kind)

    def message_buffers(
        self,
        comm_ctx: CommContext,
        message: Message,
        arriving: Message,
        numel: int,
        slice_numel: int,
    ) -> MessageBuffers:
        """Return the receive buffers for a part of a message.

        Args:
            comm_ctx: The ranks that share slices.
            message: What a rank sends in the first hop.
            arriving: What a rank receives in the last hop.
            numel: The largest number of elements that a rank sends to another one.
            slice_numel: The number of elements of a slice.
        """
        comm = comm_ctx.comm
        wires = (message.wire, arriving.wire)
        sizes = message_buffer_sizes(
            numel,
            wires,
            comm.size,
            1,
            in_place=comm.reads_in_place,
            near_in_place=False,
            far_in_place=False,
        )
        return MessageBuffers(comm_ctx, sizes)


def boxes_in(inbox: Tensor | None, comm: Comm, length: int) -> list[Tensor | None]:
    """Split a receive buffer into the places of received pieces, by rank.

    Args:
        inbox: The buffer; None if pieces are read in place.
        comm: The ranks.
        length: The number of elements of a piece.

    Returns:
        A place for the piece of each rank; None for this rank and for pieces that are read in
        place.
    """
    if inbox is None or comm.size == 1:
        return [None] * comm.size
    boxes: list[Tensor | None] = [*torch.split(inbox[: (comm.size - 1) * length], length)]
    boxes.insert(comm.rank, None)
    return boxes
