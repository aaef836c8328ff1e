"""The sum of one group's gradients over the ranks: its state, memory and norm.

Norms are sums of squares in float64, one for each group and slice, so that every stage and every
rank computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from ..base.device import CPU
from ..base.memory import offer_pages, private_pages
from ..kernels.squares import Squares, read_squares, squares_of_parts
from ..planner.spec import S, Spec
from ..tiers.tier import Tier
from .buffer import FlatBuffer, StateGuard
from .group import Group
from .param_ranges import updated_parts
from .pool import has_pages_to_return


class GradState(Enum):
    """The states of a parameter group's gradient within one step.

    A gradient may arrive after others have been reduced, for example from the next micro-batch. If
    gradients are sharded (ZeRO stages 2 and 3), the state does not change. Otherwise the gradient
    is collected in the buffer of the sum, whose values are copied to another buffer first.
    """

    EMPTY = "empty"  # no gradient has arrived since the last step
    COLLECTING = "collecting"  # this rank collects its summand; there is no sum
    REDUCING = "reducing"  # the reduction is in flight; the buffer belongs to the transport
    INCOMPLETE = "partially reduced"  # the sum over some ranks, completed once per step
    REDUCED = "reduced"  # the sum over all ranks
    HELD = "held"  # the step is over, but a later update needs the sum


GRAD_MOVES = {
    (GradState.EMPTY, GradState.COLLECTING),
    # Zeros that a program edits, or the gradient of another step.
    (GradState.EMPTY, GradState.REDUCED),
    (GradState.EMPTY, GradState.HELD),  # no member has a gradient
    (GradState.COLLECTING, GradState.REDUCING),
    (GradState.COLLECTING, GradState.REDUCED),  # zeros that a program edits, next to a summand
    (GradState.COLLECTING, GradState.EMPTY),
    (GradState.REDUCING, GradState.INCOMPLETE),
    (GradState.REDUCING, GradState.REDUCED),
    (GradState.REDUCING, GradState.EMPTY),  # the sum failed
    (GradState.INCOMPLETE, GradState.COLLECTING),
    (GradState.INCOMPLETE, GradState.REDUCING),  # to complete the sum, or to add a summand
    (GradState.INCOMPLETE, GradState.EMPTY),
    (GradState.REDUCED, GradState.COLLECTING),
    (GradState.REDUCED, GradState.REDUCING),
    (GradState.REDUCED, GradState.HELD),
    (GradState.REDUCED, GradState.EMPTY),
    (GradState.HELD, GradState.EMPTY),
}


class GradSum:
    """The reduced gradient of one parameter group.

    The buffer holds this rank's slice if gradients are sharded, otherwise all elements. Extensions
    that keep a gradient after its step derive from this class (`Gradient.kept`).

    Attributes:
        saved_as: The name under which a checkpoint stores the gradient; empty if it is not stored.
        group: The parameter group to which the gradient belongs.
        buffer: The buffer of the gradient; None before the first reduction.
        guard: Callbacks before each access to the buffer.
        absent: The indices of parameters whose `.grad` is None, which are not updated; None before
            the end of a backward.
        known_squares: The sum of squares of this rank's slice, which an accelerator may still
            compute; None if the slice may have changed.
    """

    saved_as = ""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buffer: FlatBuffer | None = None
        self.guard = StateGuard()
        self.absent: set[int] | None = None
        self.known_squares: Squares | None = None
        self._state = GradState.EMPTY

    # -- states

    @property
    def state(self) -> GradState:
        """Return the state of the gradient; `enter` changes it."""
        return self._state

    def enter(self, state: GradState) -> None:
        """Change the state.

        Raises:
            AssertionError: `GRAD_MOVES` does not contain the transition.
        """
        if (self._state, state) not in GRAD_MOVES:
            name = self.group.members[0].name
            raise AssertionError(
                f"the gradient of '{name}' cannot go from {self._state.value} to {state.value}"
            )
        self._state = state

    def become(self, state: GradState) -> None:
        """Change the state like `enter`; do nothing if the gradient is in this state already."""
        if self._state is not state:
            self.enter(state)

    @property
    def is_reduced(self) -> bool:
        """Return whether gradients of the current step have been reduced."""
        return self.is_full and self._state is not GradState.HELD

    @property
    def is_full(self) -> bool:
        """Return whether the buffer holds a reduced gradient, of the current or an earlier step."""
        return self._state not in (GradState.EMPTY, GradState.COLLECTING)

    # -- memory

    @property
    def spec(self) -> Spec:
        """Return the planned placement, dtype and memory of the buffer."""
        assert self.group.plan.grad is not None
        return self.group.plan.grad

    def ensure(self) -> FlatBuffer:
        """Return the buffer of the gradient; allocate it on first use."""
        if self.buffer is None:
            self.buffer = self._allocate()
        return self.buffer

    def _allocate(self) -> FlatBuffer:
        spec = self.spec
        layout = self.group.layout
        comm_ctx = self.group.comm_ctx
        what = f"gradients of {self.group.members[0].name}"
        if spec.placement is not S:
            return FlatBuffer.allocate_for_comm(layout, spec, comm_ctx, what, is_zeroed=False)
        is_on_cpu = spec.tier is Tier.DEVICE and comm_ctx.pool.device == CPU
        if is_on_cpu and layout.padded_numel:
            memory = private_pages(spec.numel(layout.padded_numel, layout.ranks), spec.dtype)
            buffer = FlatBuffer(layout, spec, memory).counted(comm_ctx, what)
        else:
            buffer = FlatBuffer.allocate(layout, spec, comm_ctx, what)
        buffer.guard = self.guard
        return buffer

    def drop(self) -> None:
        """Free the buffer of the gradient."""
        self.buffer = None

    def discard_values(self) -> None:
        """Discard the values of a sharded gradient, but keep its buffer for the next reduction."""
        buffer = self.buffer
        if buffer is None or buffer.spec.placement is not S:
            return
        if not buffer.storage.on_device:
            self.guard.before_read()  # also undoes an update that ran ahead of its step
            buffer.storage.wait_for_copy()
            buffer.storage.discard(0, buffer.memory.numel())
        elif has_pages_to_return(buffer.memory):
            offer_pages(buffer.memory)

    # -- values

    def own(self) -> Tensor:
        """Return a flat view of the elements that update this rank's main weight."""
        buffer = self.ensure()
        if self.group.plan.sums_to_all:
            return buffer.memory
        return buffer.slice_of(self.group.comm_ctx.comm.rank)

    def reduced(self) -> Tensor | None:
        """Return a flat view as `own`; None if no gradient has been reduced."""
        return self.own() if self.buffer is not None and self.is_full else None

    def read(self, low: int, high: int) -> Tensor | None:
        """Return elements [low, high) of this rank's slice of the reduced gradient, read-only.

        Returns:
            A flat tensor, fetched if offloaded; None if no gradient has been reduced.
        """
        if self.buffer is None or not self.is_full:
            return None
        staged = self.buffer.staged
        on_host = None if staged is None else staged.view(low, high)
        if on_host is not None:
            return on_host
        if self.buffer.spec.placement is S:
            return self.buffer.read(low, high)
        return self.own()[low:high]


# -- norms


def squares_of(sums: Sequence[GradSum]) -> list[list[float]]:
    """Return the sums of squares of several gradients, separately for the slice of each rank.

    Returns:
        For each gradient, one number per rank; 0.0 for slices that this rank does not hold.
    """
    numbers = read_squares([_squares_by_rank(each) for each in sums])
    for each, own in zip(sums, numbers, strict=True):
        if each.known_squares is not None:
            each.known_squares = own[each.group.comm_ctx.comm.rank]
    return numbers


def _squares_by_rank(total: GradSum) -> list[Squares]:
    comm = total.group.comm_ctx.comm
    squares: list[Squares] = [0.0] * comm.size
    if total.known_squares is None:  # otherwise a read of the values would run pending updates
        values = total.reduced()
        if values is None:
            return squares
        if total.group.plan.sums_to_all:
            numel = total.group.layout.slice_numel
            slices = enumerate(values.chunk(comm.size))
            return [_squares(total.group, part, rank * numel) for rank, part in slices]
        total.known_squares = own_squares(total)
    squares[comm.rank] = total.known_squares
    return squares


def own_squares(total: GradSum) -> Squares:
    """Return the sum of squares of this rank's slice of a gradient.

    The gradient must not change before `read_squares` has read the result.
    """
    group = total.group
    return _squares(group, total.own(), group.layout.bounds(group.comm_ctx.comm.rank)[0])


def _squares(group: Group, values: Tensor, first: int) -> Squares:
    """Return the sum of squares of a gradient, without elements that the optimizer does not update.

    The device that updates the group computes it, so every ZeRO stage gets the same bits.
    """
    assert group.master is not None
    device = group.master.update_device
    if values.device != device and device == CPU:
        values = group.comm_ctx.copy_engine.to_host(values)
    parts = [(values, first)]
    if group.not_updated:
        parts = updated_parts(group, values, first)
    return squares_of_parts(parts, device, group.comm_ctx.comm.threads)
