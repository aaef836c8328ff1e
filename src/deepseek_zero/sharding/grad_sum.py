"""The sum of one group's gradients over the ranks: its memory and its state."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from torch import Tensor

from ..base.memory import private_pages, return_pages
from ..planner.layout import Slot
from ..planner.spec import S, Spec
from ..tiers.tier import StagedTile, Tier
from .buffer import FlatBuffer, StateGuard
from .group import Group
from .message import has_pages_to_return


class GradState(Enum):
    """The states of a group's gradient within one step.

    If the plan shards gradients, a summand that comes after a sum (of the next micro-batch, or a
    late one) leaves the state as it is: the sum stays, and the summand is added when it is reduced.
    If the plan does not shard them, the summand takes the sum's memory, and the earlier sum is set
    aside.
    """

    EMPTY = "empty"  # no gradient has come since the last step
    COLLECTING = "collecting"  # this rank collects its summand, and there is no sum
    REDUCING = "reducing"  # the sum is under way; the buffer belongs to the transport
    PARTIAL = "partially reduced"  # the sum of some ranks, to be completed once a step
    REDUCED = "reduced"  # the sum of all ranks
    HELD = "held"  # the step is over, and an update that is still to come needs the sum


GRAD_MOVES = {
    (GradState.EMPTY, GradState.COLLECTING),
    # zeros that a program changes, or the gradient of another step
    (GradState.EMPTY, GradState.REDUCED),
    (GradState.EMPTY, GradState.HELD),  # no member has a gradient
    (GradState.COLLECTING, GradState.REDUCING),
    (GradState.COLLECTING, GradState.REDUCED),  # such zeros, made beside the summand
    (GradState.COLLECTING, GradState.EMPTY),
    (GradState.REDUCING, GradState.PARTIAL),
    (GradState.REDUCING, GradState.REDUCED),
    (GradState.REDUCING, GradState.EMPTY),  # the sum failed
    (GradState.PARTIAL, GradState.COLLECTING),
    (GradState.PARTIAL, GradState.REDUCING),  # to complete the sum, or to add a summand
    (GradState.PARTIAL, GradState.EMPTY),
    (GradState.REDUCED, GradState.COLLECTING),
    (GradState.REDUCED, GradState.REDUCING),
    (GradState.REDUCED, GradState.HELD),
    (GradState.REDUCED, GradState.EMPTY),
    (GradState.HELD, GradState.EMPTY),
}
# States with a sum of the current step
_SUMMED = frozenset((GradState.REDUCING, GradState.PARTIAL, GradState.REDUCED))


class GradSum:
    """The sum of one group's gradients: this rank's slice, or the whole if the plan says so.

    Extensions that keep a gradient beyond its step derive from this class (`Gradient.kept`).

    Attributes:
        saved_as: The kind of its chunks in a checkpoint; empty if none stores it.
        buffer: The memory; None before the first sum.
        guard: Of the memory. A checkpoint stores only a held gradient, so that no save reads the
            sum of a step that is under way.
        absent: The indices of members whose `.grad` is None, which are not updated; None before the
            end of a backward.
        known_squares: The sum of squares of this rank's slice; None if it may have changed.
    """

    saved_as = ""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buffer: FlatBuffer | None = None
        self.guard = StateGuard()
        self.absent: set[int] | None = None
        self.known_squares: float | None = None
        self._state = GradState.EMPTY
        self._staged: StagedTile | None = None

    # -- states

    @property
    def state(self) -> GradState:
        return self._state

    def enter(self, state: GradState) -> None:
        """Go to another state."""
        if (self._state, state) not in GRAD_MOVES:
            name = self.group.members[0].name
            raise AssertionError(
                f"the gradient of '{name}' cannot go from {self._state.value} to {state.value}"
            )
        self._state = state

    def become(self, state: GradState) -> None:
        """Go to a state unless this is it already."""
        if self._state is not state:
            self.enter(state)

    @property
    def is_reduced(self) -> bool:
        """Return whether there is a sum of the step under way."""
        return self._state in _SUMMED

    @property
    def is_full(self) -> bool:
        """Return whether there is a sum, of the step under way or of an earlier one."""
        return self._state in _SUMMED or self._state is GradState.HELD

    def has(self, number: int) -> bool:
        """Return whether a member has a reduced gradient."""
        return self.is_reduced and not (self.absent and number in self.absent)

    # -- memory

    @property
    def spec(self) -> Spec:
        """Return the planned spec of the memory."""
        assert self.group.plan.grad is not None
        return self.group.plan.grad

    def ensure(self) -> FlatBuffer:
        """Return `buffer`, allocated on its first use."""
        if self.buffer is None:
            self.buffer = self._allocate(f"gradients of {self.group.members[0].name}")
        return self.buffer

    def _allocate(self, what: str) -> FlatBuffer:
        spec = self.spec
        layout = self.group.layout
        comm_ctx = self.group.comm_ctx
        if spec.placement is not S:
            return FlatBuffer.allocate_for_comm(layout, spec, comm_ctx, what, is_zeroed=False)
        is_on_cpu = spec.tier is Tier.DEVICE and comm_ctx.pool.device.type == "cpu"
        if is_on_cpu and layout.padded_numel:
            memory = private_pages(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
            return FlatBuffer(layout, spec, memory, guard=self.guard).counted(comm_ctx, what)
        found = FlatBuffer.allocate(layout, spec, comm_ctx, what)
        found.guard = self.guard
        return found

    def drop(self) -> None:
        """Free the memory."""
        self.buffer = None
        self._staged = None

    def discard_values(self) -> None:
        """Forget the values of a slice; its memory stays for the next. On the CPU its pages are the
        system's until then.
        """
        buffer = self.buffer
        if buffer is None or buffer.spec.placement is not S:
            return
        if not buffer.storage.on_device:
            self.guard.before_read()  # an update made ahead of its step goes with the gradient
            buffer.storage.wait_for_copy()
            buffer.storage.discard(0, buffer.memory.numel())
        elif not self.group.comm_ctx.pool.keeps_pages and has_pages_to_return(buffer.memory):
            return_pages(buffer.memory)

    def follow_wires(self) -> None:
        """Send what is collected in this memory as the plan says now. Local."""
        planned = self.group.plan.grad
        if self.buffer is not None and planned is not None:
            self.buffer.spec = replace(
                self.buffer.spec, wire=planned.wire, wire_inside=planned.wire_inside
            )

    # -- values

    def own(self) -> Tensor:
        """Return a flat view of the elements of this rank's main weight."""
        buffer = self.ensure()
        if self.group.plan.sums_to_all:
            return buffer.memory
        return buffer.shard(self.group.comm_ctx.comm.rank)

    def reduced(self) -> Tensor | None:
        """Return `own`; None if there is no sum."""
        return self.own() if self.buffer is not None and self.is_full else None

    def read(self, low: int, high: int) -> Tensor | None:
        """Return elements [low, high) of `reduced`, to be read only: offloaded ones are not written
        a second time.
        """
        if self.buffer is None or not self.is_full:
            return None
        came = self._staged.view(low, high) if self._staged is not None else None
        if came is not None:
            return came
        if self.buffer.spec.placement is S:
            return self.buffer.read(low, high)
        return self.own()[low:high]

    def own_part(self, slot: Slot) -> Tensor:
        """Return this rank's part of one member's gradient: a flat view."""
        assert self.buffer is not None
        self.known_squares = None  # the caller may change it
        if self.group.plan.sums_to_all:
            return self.buffer.memory[slot.start : slot.stop]
        return self.buffer.owned_view(slot, self.group.comm_ctx.comm.rank)

    def changed(self, number: int) -> None:
        """Note that a member's part was written."""
        self.known_squares = None
        if self.buffer is not None and self.buffer.storage.is_offloaded:
            slot = self.group.members[number].slot
            place, end = self.buffer.owned_range(slot, self.group.comm_ctx.comm.rank)
            self.buffer.storage.evict(place, end)

    def staged_tile(self) -> StagedTile | None:
        """Return what brings this rank's slice from the training device to the host that updates;
        None if nothing must.
        """
        buffer = self.buffer
        group = self.group
        if buffer is None or not buffer.storage.on_device or not group.plan.is_updated_on_host:
            self._staged = None
            return None
        memory = buffer.memory
        if buffer.spec.placement is not S and memory.numel() != group.layout.slice_numel:
            first, last = group.layout.bounds(group.comm_ctx.comm.rank)
            memory = memory[first:last]
        known = self._staged
        if known is None or known.on_device.data_ptr() != memory.data_ptr():
            self._staged = group.comm_ctx.copy_engine.staged_tile(memory, is_read=True)
        return self._staged
