"""Flat buffers, and `move`, which brings a buffer from one placement to another.

A `FlatBuffer` has a layout, a spec and memory. `move` follows TRANSITIONS (planner/spec.py).
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
from ..planner.messages import message_rooms, messages_of
from ..planner.spec import TRANSITIONS, Movement, R, S, Spec
from ..precision.codecs import Cast, Codec, LeftOut
from ..tiers.tier import CopyEngine, Storage, Tier, Tiers, copy_engine_for
from .coded_message import CodedMessage, summand_messages
from .message import Message, Pool


class PendingUpdate(Protocol):
    """An update that runs after its step, or that ran before its step was over."""

    def flush_group(self, group: Any) -> None:
        """Bring the states of this `ParamGroup` to the values that its last step leaves.

        Other groups are updated only if that is necessary.
        """

    def flush(self) -> None:
        """Bring the states of every group to the values that the last step leaves.

        Raises:
            StorageError: A disk failed.
            UsageError: An earlier update failed.
        """


@dataclass(eq=False)
class StateGuard:
    """Guards the states of one group: every read and every write passes it first.

    Views for writing come from `FlatBuffer.write` and `FlatBuffer.writing`, `MasterWeight` and
    `Moments`, which all call `before_write`. Nothing else writes a state.

    Attributes:
        pending: An update that must run before a read. The optimizer that defers it sets and clears
            it.
        reader: Is called before a write. A save in the background copies the old values in it.
        writes: The number of writes; a state with an unchanged number was not written.
        refusal: Raises while states of the group are moved away by `engine.offload_states`.
    """

    # The values were moved away, so that every access raises (engine/state_offload.py)
    is_offloaded = False

    pending: PendingUpdate | None = None
    reader: Callable[[], None] | None = None
    writes: int = 0
    refusal: Callable[[], None] | None = None

    def refuse_offloaded(self) -> None:
        """Raise `UsageError` if a state of the group was moved away by `engine.offload_states`."""
        if self.refusal is not None:
            self.refusal()

    def before_read(self) -> None:
        """Flush the pending updates of all groups: a reader may hold views of several."""
        if self.pending is not None:
            self.pending.flush()

    def before_write(self) -> None:
        """Let a save in the background copy the old values, and count the write."""
        self.refuse_offloaded()
        self.writes += 1
        if self.reader is not None:
            self.reader()


class FlatBuffer:
    """One state of one parameter group on this rank.

    It is the whole buffer if the state is replicated or partial, and a slice if it is sharded.

    Attributes:
        layout: The places of the parameters.
        spec: Placement, dtype and memory of the state.
        memory: The flat elements in the spec's dtype, or what the storage keeps in their place.
            `load` and `elements` fetch them.
        storage: The place of the elements between uses.
        guard: Every access passes it first.
        coded_as: The codec of slices that are gathered into this buffer; None if they are sent
            exactly.
        errors: The error-feedback buffer of compressed summands; None if the error is dropped.
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

    def load(self) -> Tensor:
        """Return all elements of this rank, flat: to be read, or to be the target of `move`.

        Offloaded ones are fetched as by `elements`; whoever knows that they are not offloaded takes
        `memory`.
        """
        if self.storage.on_device and self.storage.has_elements:
            self.guard.before_read()
            return self.memory
        return self.elements(0, self.numel)

    @property
    def numel(self) -> int:
        """Return how many elements this rank holds."""
        return self.storage.numel

    def elements(self, low: int, high: int) -> Tensor:
        """Return a flat view of elements [low, high), fetched if they are offloaded.

        Pending updates run first. Local.

        Args:
            low: The first element.
            high: The end of the elements.

        Raises:
            StorageError: A disk failed.
        """
        self.guard.before_read()
        return self.storage.write(low, high)

    def write(self, low: int, high: int) -> Tensor:
        """Return a view of elements [low, high) to be written.

        A save in the background has copied the old values before. This works only if the storage
        has the elements themselves; otherwise use `writing`.

        Args:
            low: The first element.
            high: The end of the elements.
        """
        assert self.storage.has_elements, "what is written to a copy of elements is lost"
        self.guard.before_write()
        return self.elements(low, high)

    @contextmanager
    def writing(self, low: int, high: int) -> Iterator[Tensor]:
        """Open a block that writes elements [low, high), flat, in the tensor that it is given."""
        self.guard.before_write()
        self.guard.before_read()
        with self.storage.writing(low, high) as values:
            yield values

    def read(self, low: int, high: int) -> Tensor:
        """Return a view as `elements` does, to be read only: a disk need not store it again."""
        self.guard.before_read()
        return self.storage.read(low, high)

    def read_now(self, low: int, high: int) -> Tensor:
        """Return a read-only view of the current values, without running pending updates.

        Args:
            low: The first element.
            high: The end of the elements.
        """
        return self.storage.read_now(low, high)

    @classmethod
    def empty(cls, layout: FlatLayout, spec: Spec, device: torch.device) -> FlatBuffer:
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
        """Allocate a state in the memory that its plan names. Local.

        is_copied: in another memory than the training device's, that device copies it, from it or
        to it.
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
        """Allocate a buffer in the memory that other ranks can access best.

        Args:
            layout: The places of the parameters.
            spec: Placement, dtype and memory of the state.
            comm_ctx: The communication context.
            what: The name of the buffer for error messages.
            is_zeroed: Fill the buffer with zeros; otherwise its contents are arbitrary.
        """
        memory = comm_ctx.pool.comm.empty(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
        if is_zeroed:
            memory.zero_()
        return cls(layout, spec, memory).counted(comm_ctx, what)

    def counted(self, comm_ctx: CommContext, what: str) -> FlatBuffer:
        """Count this buffer against the training device's budget while it exists.

        Args:
            comm_ctx: The communication context.
            what: The name of the buffer for error messages.

        Returns:
            The buffer itself.
        """
        return comm_ctx.tiers.budget.reserve_for(self, self.memory.nbytes, what)

    def gathered_in(self, memory: Tensor, coded_as: Codec | None = None) -> FlatBuffer:
        """Return a buffer of all elements in this memory: the target of a gather.

        coded_as: what slices travel there as; None: exactly.
        """
        return FlatBuffer(self.layout, Spec(R, self.spec.dtype), memory, coded_as=coded_as)

    def shard(self, rank: int) -> Tensor:
        """Return a flat view of the elements that a rank owns."""
        if self.spec.placement is S:
            return self.load()
        numel = self.layout.slice_numel
        return self.load()[rank * numel : (rank + 1) * numel]

    def view(self, slot: Slot) -> Tensor:
        """Return a view of a parameter's elements in its own shape.

        The buffer must hold every element.
        """
        values = self.load()
        return values.as_strided(slot.shape, slot.strides, values.storage_offset() + slot.start)

    def local_range(self, slot: Slot, rank: int) -> tuple[int, int, int]:
        """Return the range of a parameter that this rank's buffer holds.

        Args:
            slot: The place of the parameter in the layout.
            rank: This rank.

        Returns:
            The tuple (start, stop, place). `place` is the position of the first element in the
                buffer.
        """
        if self.spec.placement is R:
            return 0, slot.numel, slot.start
        place, end = self.owned_range(slot, rank)
        start = self.layout.owned(slot, rank)[0] - slot.start
        return start, start + end - place, place

    def owned_view(self, slot: Slot, rank: int) -> Tensor:
        """Return a flat view of the part of a parameter that a rank owns."""
        return self.elements(*self.owned_range(slot, rank))

    def owned_range(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Return the range [place, end) of that part in this buffer."""
        start, stop = self.layout.owned(slot, rank)
        low = self.layout.bounds(rank)[0] if self.spec.placement is S else 0
        return start - low, max(start, stop) - low


@dataclass(frozen=True)
class CommContext:
    """The ranks and resources that `move` uses.

    They are the ranks among which states are sharded, the pool of scratch memory, the size of
    messages and the divisor of sums.

    `tiers` has the memories for offloaded states, and `issue_queue` orders gathers out of them.
    `copy_engine` copies between these memories and the device. `outer` has the ranks with the same
    slices, if there are others, because sums are exchanged with them too. `route` is how messages
    travel. `gather_kind` is the name under which the meter counts gathers.
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
        """Create the context of the ranks with one piece of a model on a mesh.

        Args:
            comm: The communicator of these ranks.
            pool: The pool of scratch memory.
            bucket_numel: Elements of a message.
            divisor: Divisor of the sum over all of these ranks.
            tiers: The memories for offloaded states.
        """
        plain = cls(
            comm.shard, pool, bucket_numel, divisor, tiers, copy_engine=copy_engine_for(pool.device)
        )
        return plain if comm.outer is None else plain.with_outer(comm.outer, divisor)

    def with_outer(self, comm: Comm, divisor: float) -> CommContext:
        """Return this context with ranks for the outer sum of each slice.

        Args:
            comm: The communicator of these ranks.
            divisor: Divisor of the inner and outer sum.
        """
        # Sums are divided once, where they are formed first, before they are rounded.
        inner, outer = (divisor, 1.0) if self.comm.size > 1 else (1.0, divisor)
        others = CommContext(comm, self.pool, self.bucket_numel, outer, self.tiers)
        return replace(self, divisor=inner, outer=others)


def move(
    source: FlatBuffer, target: FlatBuffer, comm_ctx: CommContext, what: str, *, add: bool = False
) -> Pending:
    """Move `source` to `target`'s placement, dtype and memory.

    An offloaded source is fetched first, after pending updates, and evicted when it has been
    copied. Sums for an offloaded target are formed on the device and copied to it. Source and
    target may share storage, as a partial gradient that is reduced in place does. Summands are sent
    as the source's spec says. Slices are sent exactly unless `target.coded_as` has a codec.

    Args:
        source: The source.
        target: The target.
        comm_ctx: The ranks and resources of the move.
        what: The name of the unit, for messages.
        add: Add the sum to the values of `target`.

    Returns:
        A handle. Neither buffer may be used before `wait()` returns. It raises `PeerError` if
            another
        rank failed, and `StorageError` if a disk failed.

    Note:
        Collective unless the move is local: every rank calls it, in the same order within its lane.
    """
    match TRANSITIONS[source.spec.placement, target.spec.placement]:
        case Movement.ALL_GATHER:
            if not source.storage.on_device:
                source.guard.before_read()
                return _fetch_and_gather(source.storage, target, comm_ctx, what)
            return _all_gather(source.load(), target, comm_ctx, what)
        case Movement.REDUCE_SCATTER:
            own = target.load()
            return _reduce_scatter(source, own, target.storage, comm_ctx, what, add=add)
        case Movement.ALL_REDUCE:
            own = target.shard(comm_ctx.comm.rank)
            pending = _reduce_scatter(source, own, Storage(own), comm_ctx, what, add=add)
            return pending.then(lambda: _all_gather(own, target, comm_ctx, what).wait())
        case Movement.LOCAL_SLICE:
            target.load().copy_(source.shard(comm_ctx.comm.rank))
        case Movement.NOTHING:
            target.load().copy_(source.load())
    return DONE


def _fetch_and_gather(
    storage: Storage, target: FlatBuffer, comm_ctx: CommContext, what: str
) -> Pending:
    """Fetch this rank's slice, gather it in its turn, and evict it after it was copied."""
    numel = storage.memory.numel()

    def start() -> Pending:
        here = storage.read(0, numel)
        own = target.shard(comm_ctx.comm.rank)
        with comm_ctx.copy_engine.h2d(storage) as copy_event:
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
    comm = comm_ctx.comm
    slice_numel = target.layout.slice_numel
    lane = "gather" if target.spec.placement is R else "reduce"
    if target.coded_as is not None and comm.size > 1:
        message = CodedMessage.of(target.memory, target.coded_as, comm_ctx.pool)
        message.encode(own, comm.rank * slice_numel)
        return gather_message(message, target, comm_ctx, what)
    into = target.shard(comm.rank)
    if into.data_ptr() != own.data_ptr():
        into.copy_(own)
    if comm.size == 1:
        return DONE
    return all_gather(target.load(), lane, comm_ctx, what)


def gather_message(
    message: CodedMessage, target: FlatBuffer, comm_ctx: CommContext, what: str
) -> Pending:
    """Gather a message with this rank's piece, and decode it into the target.

    Collective within the gather lane.
    """
    comm = comm_ctx.comm
    pending = DONE if comm.size == 1 else all_gather(message.memory, "gather", comm_ctx, what)

    def decode() -> None:
        message.decode_slices([target.shard(rank) for rank in range(comm.size)])

    return pending.then(decode)


def all_gather(full: Tensor, lane: str, comm_ctx: CommContext, what: str) -> Pending:
    """Fill `full` from every rank's slice. Collective within the lane."""
    return comm_ctx.route.all_gather(full, lane, comm_ctx, what)


def _reduce_scatter(
    source: FlatBuffer,
    own: Tensor,
    storage: Storage,
    comm_ctx: CommContext,
    what: str,
    *,
    add: bool,
) -> Pending:
    """Reduce message by message.

    The bytes in transfer then do not depend on the model's size (ZeRO-R's constant buffers).

    Args:
        source: The partial gradient.
        own: The elements of this rank's sum.
        storage: The storage of `own`.
        comm_ctx: The ranks that share slices.
        what: The name of the unit, for messages.
        add: Add the sum to the values of `own`.
    """
    comm = comm_ctx.comm
    layout = source.layout
    if not layout.slice_numel:
        return DONE
    wire = source.spec.wire or Cast(source.spec.dtype)
    route = comm_ctx.route
    pool = comm_ctx.pool
    # The messages that a rank sends first and receives last
    message = arriving = Message(wire, source.memory, pool)
    if source.spec.wire is not None or route.near > 1:
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
    rooms = [
        route.room(comm_ctx, message, arriving, step, layout.slice_numel) for _ in range(depth)
    ]

    def start(number: int) -> Pending:
        low, high = cuts[number]
        starts = range(low, layout.padded_numel, layout.slice_numel)
        pieces = [message.piece(start, start + high - low) for start in starts]
        if message.is_lent:
            for rank, (start, piece) in enumerate(zip(starts, pieces, strict=True)):
                message.write(source.shard(rank)[low:high], piece, start)
        landing = storage.landing(low, high, step, comm_ctx.pool, comm_ctx.copy_engine, add=add)

        def add_up(received: Sequence[Tensor]) -> None:
            arriving.sum(received, landing.values(), divisor=comm_ctx.divisor, add=add)
            landing.send()

        if comm.size == 1:
            add_up(pieces)  # the one summand goes where the sum is kept
            return DONE
        return rooms[number % depth].exchange(pieces, low, high, what, add_up)

    under_way = deque(start(number) for number in range(depth))
    others = deque(range(depth, len(cuts)))

    def issue() -> None:
        while others:
            under_way[0].wait()  # which raises again what it raised: a message is never left out
            under_way.append(start(others[0]))
            under_way.popleft()
            others.popleft()

    def finish() -> None:
        issue()
        while under_way:
            under_way.popleft().wait()
        for room in rooms:
            room.give_back()
        message.arrived()

    return Pending(finish, _issue=issue)


class MessageRoom:
    """Lent buffers that receive the parts of a message one after another.

    Each part is summed before the next one is received.
    """

    def __init__(self, comm_ctx: CommContext, sizes: Sequence[tuple[torch.dtype, int]]) -> None:
        """Borrow the buffers.

        Args:
            comm_ctx: The ranks that send and receive.
            sizes: Dtype and elements of each buffer.
        """
        self.comm_ctx = comm_ctx
        self.lent = [comm_ctx.pool.take(length, dtype) for dtype, length in sizes]

    def exchange(
        self, pieces: Sequence[Tensor], low: int, high: int, what: str, add_up: Use
    ) -> Pending:
        """Send pieces[r] to rank r, and call `add_up` with the pieces for this rank.

        The buffers can be used for the next part after the wait.

        Args:
            pieces: One for each rank.
            low: The first element of each slice that its piece has.
            high: The end of these elements.
            what: The name of the unit, for messages.
            add_up: Sums the received pieces.

        Note:
            Collective within the reduce lane.
        """
        comm = self.comm_ctx.comm
        room = self.lent[0] if self.lent else None
        boxes = boxes_in(room, comm, pieces[0].numel())
        return comm.exchange(pieces, boxes, "reduce", what, add_up)

    def give_back(self) -> None:
        for tensor in self.lent:
            self.comm_ctx.pool.give(tensor)


class Route:
    """How messages travel among the ranks that share slices: directly, by default.

    Extensions derive from this class. All ranks use the same class.

    Attributes:
        near: The ranks whose gradients are added up first; the sums travel on. 1: every gradient
            goes to the owner of its slice.
    """

    near = 1

    def hops(self, comm: Comm) -> tuple[Comm, Comm]:
        """Return the ranks of the first and of the last hop of a message."""
        return comm, comm

    def all_gather(self, full: Tensor, lane: str, comm_ctx: CommContext, what: str) -> Pending:
        """Fill `full` from every rank's slice. Collective within the lane."""
        return comm_ctx.comm.all_gather(full, lane, what, comm_ctx.gather_kind)

    def room(
        self,
        comm_ctx: CommContext,
        message: Message,
        arriving: Message,
        numel: int,
        slice_numel: int,
    ) -> MessageRoom:
        """Return the room for a part of a message.

        Args:
            comm_ctx: The ranks that share slices.
            message: What a rank sends in the first hop.
            arriving: What comes in the last hop.
            numel: The most elements that each rank sends to each.
            slice_numel: The elements of a slice.
        """
        comm = comm_ctx.comm
        wires = (message.wire, arriving.wire)
        sizes = message_rooms(
            numel,
            wires,
            comm.size,
            1,
            in_place=comm.reads_in_place,
            near_in_place=False,
            far_in_place=False,
        )
        return MessageRoom(comm_ctx, sizes)


def boxes_in(room: Tensor | None, comm: Comm, length: int) -> list[Tensor | None]:
    """Cut a buffer into the places of received pieces, by rank.

    Args:
        room: The buffer; None if pieces are read in place.
        comm: The ranks.
        length: The elements of a piece.

    Returns:
        A place for the piece of each rank; None for this rank and for pieces that are read in
        place.
    """
    if room is None or comm.size == 1:
        return [None] * comm.size
    boxes: list[Tensor | None] = [*torch.split(room[: (comm.size - 1) * length], length)]
    boxes.insert(comm.rank, None)
    return boxes
