"""The gradient of one group: collected from autograd, then summed over the ranks.

`Gradient` owns the memory and the states of the sum. How ranks sum is `GradReduction`; what a
program sees as `.grad` is `GradView`; norms are in grad_norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import ClassVar, Protocol

from torch import Tensor, nn

from ..base.device import without_torch_function
from ..base.memory import private_pages, return_pages
from ..comm.collectives import DONE, Pending
from ..planner.layout import Slot
from ..planner.spec import P, S, Spec
from ..tiers.tier import StagedTile, Tier
from .buffer import FlatBuffer, StateGuard, all_gather, has_pages_to_return
from .grad_norm import squares_now
from .grad_reduction import GradReduction
from .group import Group
from .sharded_gradient import Part


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


class KeptGradient(Protocol):
    """A gradient that an extension keeps beside the one of the step under way.

    Attributes:
        saved_as: The kind of its chunks in a checkpoint.
        buffer: Its memory, this rank's slice; None before the first use.
        absent: The indices of members without a gradient in it.
    """

    saved_as: ClassVar[str]
    buffer: FlatBuffer | None
    absent: set[int] | None

    @property
    def is_full(self) -> bool:
        """Return whether `buffer` has a gradient, which an update still needs."""

    def owned(self, slot: Slot) -> Tensor:
        """Return this rank's part of a member's gradient: a flat view, which a checkpoint fills."""


class Gradient:
    """The gradient of one trainable group: (numel,) while partial, a slice when reduced.

    Attributes:
        reduction: How the ranks sum it.
        kept: The gradients that extensions keep beside it, by name.
        buffer: The memory of the sum; None before the first one.
        absent: The indices of members whose `.grad` is None, which are not updated; None before the
            end of a backward.
        is_edited: The program has set values that may differ between ranks.
        is_shown: The members' `.grad` shows it (`GradView`).
        known_squares: The sum of squares of this rank's slice; None if it may have changed.
    """

    def __init__(self, group: Group, reduction: GradReduction) -> None:
        self.group = group
        self.reduction = reduction
        self.predivide = group.planned.predivide
        self.buffer: FlatBuffer | None = None
        # A checkpoint stores only a held gradient, so that no save reads this one
        self.guard = StateGuard()
        self._state = GradState.EMPTY
        self.is_shown = False
        self._clear()
        self.kept: Mapping[str, KeptGradient] = {}
        self._staged: StagedTile | None = None

    def _clear(self) -> None:
        """Forget what has come since the last step."""
        self.absent: set[int] | None = None
        self.is_edited = False
        self.known_squares: float | None = None
        self._partial: FlatBuffer | None = None  # this rank's summand while one is under way
        self._arrived: set[int] = set()  # indices of members that are in it
        self._reduction: Pending = DONE  # into `buffer`, maybe still under way
        # An earlier sum of the same step, to be added to the next one, and its state
        self._carried_sum: Tensor | None = None
        self._carried_state = GradState.EMPTY

    @property
    def state(self) -> GradState:
        return self._state

    def _enter(self, state: GradState) -> None:
        if (self._state, state) not in GRAD_MOVES:
            name = self.group.members[0].name
            raise AssertionError(
                f"the gradient of '{name}' cannot go from {self._state.value} to {state.value}"
            )
        self._state = state

    @property
    def is_empty(self) -> bool:
        """Return whether no gradient is collected, summed or kept."""
        return self._state is GradState.EMPTY and not any(
            kept.is_full for kept in self.kept.values()
        )

    def buffers(self) -> list[FlatBuffer]:
        """Return the memory of the sum and of the kept gradients, as far as it is allocated."""
        found = [self.buffer, *(kept.buffer for kept in self.kept.values())]
        return [buffer for buffer in found if buffer is not None]

    @property
    def is_whole(self) -> bool:
        """Return whether every rank holds the whole reduced gradient (stage 0)."""
        return self.group.plan.sums_to_all

    def clear_shown(self) -> None:
        """Set every `.grad` to None, whatever the program has assigned."""
        self.is_shown = False
        with without_torch_function():
            for member in self.group.members:
                member.param.grad = None

    def collect(self, param: nn.Parameter) -> None:
        """Move a finished `.grad` into the flat partial gradient, added to earlier ones. Local."""
        number = self.group.index[id(param)]
        with without_torch_function():
            grad = param.grad
            param.grad = None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        into = self._open().view(self.group.members[number].slot)
        if number in self._arrived:
            into.add_(grad)
        else:
            into.copy_(grad)
            self._arrived.add(number)

    def _open(self) -> FlatBuffer:
        """Return the partial gradient under way; make one if there is none."""
        if self._partial is not None:
            return self._partial
        self._flush_held()
        group = self.group
        assert group.plan.grad is not None
        if group.plan.grad.placement is P:
            buffer = self.ensure_buffer()
            # A late gradient: the running reduction writes into the memory that this one needs
            self._reduction.wait()
            group.comm_ctx.world.wait_until_read(buffer.memory)
            # A second backward nobody announced: keep the first one's sum aside
            if self._state in _SUMMED:
                self._carry(self._own(buffer))
            self._partial = buffer
        else:
            spec = group.planned.summands
            storage = group.comm_ctx.pool.take(group.layout.padded_numel, spec.dtype)
            self._partial = FlatBuffer(group.layout, spec, storage)
        if self._state is GradState.EMPTY:
            self._enter(GradState.COLLECTING)
        return self._partial

    def _flush_held(self) -> None:
        """Run the update that still needs the sum, before the sum's memory is used again."""
        if self._state is GradState.HELD and self.guard.pending is not None:
            self.guard.pending.flush_group(self.group)

    def _own(self, buffer: FlatBuffer) -> Tensor:
        return buffer.memory if self.is_whole else buffer.shard(self.group.comm_ctx.comm.rank)

    def reduce(self, what: str) -> Pending:
        """Start to sum the ranks' partial gradients, in fp32 in rank order; missing members and the
        padding count as zeros.

        Collective within the reduce lane: a rank that skipped the unit calls it too.
        """
        group = self.group
        assert group.plan.grad is not None
        self.known_squares = None
        partial = self._open()
        for number, member in enumerate(group.members):
            if number not in self._arrived:
                partial.memory[member.slot.start : member.slot.stop].zero_()
        for low, high in group.layout.gaps:
            partial.memory[low:high].zero_()
        if self.predivide != 1.0:
            partial.memory.div_(self.predivide)
        self._partial = None
        self._arrived = set()
        if group.plan.grad.placement is P:
            return self._reduce_in_place(partial, what)
        if not self.reduction.sums_all and self._state is GradState.REDUCED:
            # A backward that comes after the step's sum was completed
            self._carry(self.ensure_buffer().load())
        pending = self.reduction.reduce(
            partial, self.ensure_buffer(), what, add=self._state in _SUMMED
        )
        self._enter(GradState.REDUCING)
        return pending.then(lambda: self._finish_shard(partial))

    def _carry(self, own: Tensor) -> None:
        """Set an earlier sum of the same step aside, to be added to the next one."""
        self._carried_sum, self._carried_state = own.clone(), self._state
        self._enter(GradState.COLLECTING)

    def _summed(self) -> None:
        """Note that a reduction has ended."""
        self._enter(GradState.REDUCED if self.reduction.sums_all else GradState.PARTIAL)

    def _finish_shard(self, partial: FlatBuffer) -> None:
        """Release the summands of a finished sum; if it is offloaded, take its norm on the way."""
        self._summed()
        self.group.comm_ctx.pool.give(partial.memory)
        if self.buffer is not None:
            self._store_offloaded(self.buffer)

    def _store_offloaded(self, buffer: FlatBuffer) -> None:
        if buffer.is_offloaded:
            first = 0
            if not self.is_whole:
                first = self.group.layout.bounds(self.group.comm_ctx.comm.rank)[0]
            self.known_squares = squares_now(self.group, buffer.load(), first)
            buffer.storage.store(0, buffer.memory.numel())

    def ensure_buffer(self) -> FlatBuffer:
        """Return `buffer`, allocated on its first use."""
        if self.buffer is None:
            spec = self.group.plan.grad
            assert spec is not None
            group = self.group
            if spec.placement is S:
                self.buffer = self.new_slice(spec)
            else:
                self.buffer = FlatBuffer.allocate_for_comm(
                    group.layout, spec, group.comm_ctx, self._what, is_zeroed=False
                )
        return self.buffer

    def release(self) -> None:
        """Free the memory of the sum until the next backward, if nothing is in it and this rank
        alone uses it. Local.

        On a CPU it is kept: its pages would have to come again.
        """
        comm_ctx = self.group.comm_ctx
        buffer = self.buffer
        if buffer is None or buffer.spec.placement is not P or comm_ctx.pool.device.type == "cpu":
            return
        is_empty = self._state is GradState.EMPTY and self._partial is None
        if is_empty and self.reduction.is_local:
            self.buffer = None
            self._staged = None

    def new_slice(self, spec: Spec) -> FlatBuffer:
        """Return a buffer for this rank's slice of the sum."""
        layout = self.group.layout
        comm_ctx = self.group.comm_ctx
        if (
            spec.tier is not Tier.DEVICE
            or comm_ctx.pool.device.type != "cpu"
            or not layout.padded_numel
        ):
            found = FlatBuffer.allocate(layout, spec, comm_ctx, self._what)
            found.guard = self.guard
            return found
        memory = private_pages(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
        return FlatBuffer(layout, spec, memory, guard=self.guard).counted(comm_ctx, self._what)

    @property
    def _what(self) -> str:
        return f"gradients of {self.group.members[0].name}"

    def _reduce_in_place(self, partial: FlatBuffer, what: str) -> Pending:
        """Sum in the memory of the partial gradient (stages 0 and 1)."""
        own = self._own(partial)
        pending = self.reduction.reduce_in_place(
            partial, what, has_earlier_sum=self._carried_sum is not None
        )
        self._enter(GradState.REDUCING)

        def finish() -> None:
            self._summed()
            # Otherwise it is added to the complete sum
            if self._carried_sum is not None and self._carried_state is self._state:
                own.add_(self._carried_sum)
                self._carried_sum = None

        self._reduction = pending.then(finish)
        return self._reduction

    def complete_sum(self, what: str) -> Pending:
        """Start to complete the sum of one step, once for all its backwards. Collective.

        It does nothing if the sum is complete already.
        """
        buffer = self.buffer
        if buffer is None or self._state is not GradState.PARTIAL:
            return DONE
        self._enter(GradState.REDUCING)
        self.known_squares = None
        pending = self.reduction.complete(buffer, what)

        def finish() -> None:
            self._enter(GradState.REDUCED)
            if self._carried_sum is not None:
                self._own(buffer).add_(self._carried_sum)
                self._carried_sum = None
            self._store_offloaded(buffer)

        self._reduction = pending.then(finish)
        return self._reduction

    @property
    def is_partial_sum(self) -> bool:
        """Return whether only some ranks' gradients are summed: `complete_sum` adds the others."""
        return self._state is GradState.PARTIAL

    def has(self, number: int) -> bool:
        """Return whether a member has a reduced gradient."""
        return self.is_reduced and not (self.absent and number in self.absent)

    @property
    def is_reduced(self) -> bool:
        """Return whether there is a reduced gradient of the step under way."""
        return self._state in _SUMMED

    @property
    def is_held(self) -> bool:
        """Return whether an update of the last step still needs the sum."""
        return self._state is GradState.HELD

    @property
    def _has_sum(self) -> bool:
        return self._state in _SUMMED or self._state is GradState.HELD

    def reduced(self) -> Tensor | None:
        """Return a flat view of the reduced gradient of this rank's master; None before a
        backward.
        """
        return self._own(self.buffer) if self.buffer is not None and self._has_sum else None

    def own_summand(self, number: int) -> Tensor | None:
        """Return a flat view of what this rank has collected for a member; None if that is
        nothing.
        """
        if self._partial is None or number not in self._arrived:
            return None
        slot = self.group.members[number].slot
        return self._partial.memory[slot.start : slot.stop]

    def read(self, low: int, high: int) -> Tensor | None:
        """Return elements [low, high) of `reduced`, to be read only: offloaded ones are not written
        a second time.
        """
        if self.buffer is None or not self._has_sum:
            return None
        came = self._staged.view(low, high) if self._staged is not None else None
        if came is not None:
            return came
        if self.buffer.spec.placement is S:
            return self.buffer.read(low, high)
        return self._own(self.buffer)[low:high]

    def staged_tile(self) -> StagedTile | None:
        """Return what brings the sum from the training device to the host that updates; None if
        nothing must.
        """
        self._staged = staged_gradient(self.group, self.buffer, self._staged)
        return self._staged

    def hold(self) -> None:
        """Keep the sum for an update that is still to come; `end_hold` drops it. Local."""
        if self._state is GradState.EMPTY:
            # No member has a gradient, so that none is updated
            self.absent = set(range(len(self.group.members)))
        self._enter(GradState.HELD)

    def end_hold(self) -> None:
        """Drop the sum, after the update has used it. Local."""
        self._enter(GradState.EMPTY)
        self.discard()

    def discard(self) -> None:
        """Drop the gradient (zero_grad, a finished or skipped step) unless an update still needs
        it; its memory stays for the next. Local.

        On the CPU the pages of a shard are the system's until then.
        """
        self.clear_shown()
        if self._state is GradState.HELD:
            return
        if self._state is not GradState.EMPTY:
            self._enter(GradState.EMPTY)
        if self._partial is not None and self._partial is not self.buffer:
            self.group.comm_ctx.pool.give(self._partial.memory)
        self._clear()
        shard = self.buffer if self.buffer is not None and self.buffer.spec.placement is S else None
        if shard is not None and not shard.storage.on_device:
            self.guard.before_read()  # an update made ahead of its step goes with the gradient
            shard.storage.wait_for_copy()
            shard.storage.discard(0, shard.memory.numel())
        elif (
            shard is not None
            and not self.group.comm_ctx.pool.keeps_pages
            and has_pages_to_return(shard.memory)
        ):
            return_pages(shard.memory)

    def drop_buffers(self) -> None:
        """Free the memory of the sum and of the kept gradients, for others of another dtype; all
        must be empty.
        """
        assert self.is_empty, "a gradient's memory was dropped with it"
        self.buffer = None
        for kept in self.kept.values():
            kept.buffer = None

    def follow_wires(self) -> None:
        """Send what is collected in the sum's memory as the plan has it now.  Local."""
        planned = self.group.plan.grad
        if self.buffer is not None and planned is not None:
            self.buffer.spec = replace(
                self.buffer.spec, wire=planned.wire, wire_inside=planned.wire_inside
            )

    def replace_sum(
        self, buffer: FlatBuffer | None, absent: set[int] | None, *, is_full: bool
    ) -> None:
        """Let the gradient of another step be this one.

        Args:
            buffer: Its memory; None if its values are in this gradient's memory already.
            absent: Its members without a gradient.
            is_full: There is such a gradient; if not, this one is empty.
        """
        if buffer is not None:
            self.buffer = buffer
        self.absent = absent
        self.known_squares = None
        state = GradState.REDUCED if is_full else GradState.EMPTY
        if self._state is not state:
            self._enter(state)

    def multiply(self, factor: float) -> None:
        """Multiply this rank's own sums that are still to be reduced.  Local."""
        if self._partial is not None:
            self.known_squares = None
            for number in self._arrived:
                self._partial.view(self.group.members[number].slot).mul_(factor)

    def summand(self, number: int) -> Tensor:
        """Return what this rank has collected of a member's gradient and not yet reduced, flat;
        zeros if that is nothing. Local.

        Only for groups whose gradients are reduced once a step, between two backwards.
        """
        self._open()
        return self.part_of(number).values

    def part_of(self, number: int) -> Part:
        """Return a member's gradient on this rank, to be changed; zeros if there is none yet.

        Between the micro-batches of a step it is this rank's own sum if that is still to be
        reduced.
        """
        slot = self.group.members[number].slot
        if self._partial is not None and self._partial is self.buffer:
            values = self._partial.memory[slot.start : slot.stop]
            if number not in self._arrived:
                values.zero_()
                self._arrived.add(number)
            return Part(values, 0, is_whole=True)
        self._ensure_sum()
        values = self.own_part(slot)
        low = (
            0
            if self.is_whole
            else self.group.layout.owned(slot, self.group.comm_ctx.comm.rank)[0] - slot.start
        )
        return Part(values, low, self.is_whole)

    def _ensure_sum(self) -> None:
        """Make a reduced gradient, of zeros, if no backward has made one."""
        self._flush_held()
        if not self._has_sum:
            self._own(self.ensure_buffer()).zero_()
            self._enter(GradState.REDUCED)
            self.known_squares = None

    def changed(self, number: int) -> None:
        """Note that a member's part was written."""
        self.known_squares = None
        if self.buffer is not None and self.buffer.is_offloaded:
            slot = self.group.members[number].slot
            place, end = self.buffer.owned_range(slot, self.group.comm_ctx.comm.rank)
            self.buffer.storage.evict(place, end)

    def equalise(self, what: str) -> Pending:
        """Make the copies of a changed gradient equal that several ranks hold. Collective."""
        if self.reduction.sums_all and not self.is_whole:
            return DONE
        self._ensure_sum()
        buffer = self.ensure_buffer()
        self.reduction.copy_from_first(self._own(buffer), f"changed gradients of {what}")
        self.known_squares = None
        if not self.is_whole:
            return DONE
        return all_gather(buffer.memory, "reduce", self.group.comm_ctx, what)

    def own_part(self, slot: Slot) -> Tensor:
        """Return this rank's part of one member's reduced gradient: a flat view."""
        assert self.buffer is not None
        self.known_squares = None  # the caller may change it
        if self.is_whole:
            return self.buffer.memory[slot.start : slot.stop]
        return self.buffer.owned_view(slot, self.group.comm_ctx.comm.rank)


def staged_gradient(
    group: Group, buffer: FlatBuffer | None, known: StagedTile | None
) -> StagedTile | None:
    """Return the staged tile of this rank's slice of a gradient, if the training device has it and
    the host updates.

    known: of the last call; it is kept while the memory is the same.
    """
    if buffer is None or not buffer.storage.on_device or not group.plan.is_updated_on_host:
        return None
    memory = buffer.memory
    if buffer.spec.placement is not S and memory.numel() != group.layout.slice_numel:
        first, last = group.layout.bounds(group.comm_ctx.comm.rank)
        memory = memory[first:last]
    if known is not None and known.on_device.data_ptr() == memory.data_ptr():
        return known
    return group.comm_ctx.copy_engine.staged_tile(memory, is_read=True)
