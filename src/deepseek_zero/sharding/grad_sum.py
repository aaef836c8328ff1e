"""The sum of one group's gradients over the ranks: its state, memory and norm.

Norms are sums of squares in float64, one for each group and slice, so that every stage and every
rank computes the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from ..base.device import CPU, double_norms
from ..base.memory import offer_pages, private_pages
from ..kernels.sums import sum_of_squares as squares_on_cpu
from ..planner.spec import S, Spec
from ..tiers.tier import StagedTile, Tier
from .buffer import FlatBuffer, StateGuard
from .group import Group
from .message import has_pages_to_return
from .param_ranges import updated_ranges


class GradState(Enum):
    """The states of a parameter group's gradient within one step.

    A rank's own gradient may arrive after gradients have been reduced, for example from the next
    micro-batch. If the plan shards gradients (ZeRO stages 2 and 3), the state does not change, and
    the new gradient is added when it is reduced. Otherwise it is collected in the buffer of the
    reduced gradient, whose values are copied to another buffer first.
    """

    EMPTY = "empty"  # no gradient has arrived since the last step
    COLLECTING = "collecting"  # this rank collects its summand; there is no sum
    REDUCING = "reducing"  # the reduction is in flight; the buffer belongs to the transport
    PARTIAL = "partially reduced"  # the sum over some ranks, completed once per step
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
_TILE_NUMEL = 1 << 24  # elements; for norms on an accelerator


class GradSum:
    """The reduced gradient of one parameter group.

    The buffer holds this rank's slice if gradients are sharded, otherwise all elements. Extensions
    that keep a gradient after its step derive from this class (`Gradient.kept`).

    Attributes:
        saved_as: The name under which a checkpoint stores the gradient; empty if it is not stored.
        group: The parameter group to which the gradient belongs.
        buffer: The buffer of the gradient; None before the first reduction.
        guard: Callbacks before each access to the buffer. Checkpoints store only gradients that are
            kept after their step, so a save never reads the gradient of the current step.
        absent: The indices of parameters whose `.grad` is None, which are not updated; None before
            the end of a backward.
        known_squares: The sum of squares of this rank's slice, which an accelerator may still
            compute; None if the slice may have changed.
        staged: Copies ranges of this rank's slice from the training device to the host, which
            updates them; None if no range is copied.
    """

    saved_as = ""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buffer: FlatBuffer | None = None
        self.guard = StateGuard()
        self.absent: set[int] | None = None
        self.known_squares: Squares | None = None
        self._state = GradState.EMPTY
        self.staged: StagedTile | None = None

    # -- states

    @property
    def state(self) -> GradState:
        """Return the state of the gradient; `enter` changes it."""
        return self._state

    def enter(self, state: GradState) -> None:
        """Change the state.

        Args:
            state: The new state, which must be allowed after the current one.

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
        self.staged = None

    def discard_values(self) -> None:
        """Discard the values of a sharded gradient, but keep its buffer for the next reduction.

        On a CPU the system may reclaim the pages of the buffer before the next reduction.
        """
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
        return buffer.shard(self.group.comm_ctx.comm.rank)

    def reduced(self) -> Tensor | None:
        """Return the reduced gradient of the elements that update this rank's main weight.

        Returns:
            A flat view; None if no gradient has been reduced.
        """
        return self.own() if self.buffer is not None and self.is_full else None

    def read(self, low: int, high: int) -> Tensor | None:
        """Return a range of this rank's slice of the reduced gradient, for reading only.

        An offloaded gradient is fetched. The result must not be written, because changes would not
        be stored again.

        Args:
            low: The first element of the range, counted from the start of this rank's slice.
            high: The end of the range, counted in the same way.

        Returns:
            A flat tensor of ``high - low`` elements; None if no gradient has been reduced.
        """
        if self.buffer is None or not self.is_full:
            return None
        on_host = self.staged.view(low, high) if self.staged is not None else None
        if on_host is not None:
            return on_host
        if self.buffer.spec.placement is S:
            return self.buffer.read(low, high)
        return self.own()[low:high]


# -- norms

# A sum of squares, or parts of the gradient on an accelerator and norms of other parts: 1- and
# 0-dimensional tensors, from which `read_squares` computes the sum.
Squares = float | list[Tensor]


def norms_of(values: Tensor) -> list[Tensor]:
    """Queue the norms of the parts of a flat tensor on the accelerator.

    Work that is queued later may overwrite the tensor.
    """
    return double_norms(_tiles_of(values)) if values.numel() else []


def _tiles_of(values: Tensor) -> list[Tensor]:
    return list(values.split(_TILE_NUMEL)) if values.numel() else []


def squares_of(sums: Sequence[GradSum]) -> list[list[float]]:
    """Return the sums of squares of several gradients, separately for the slice of each rank.

    Args:
        sums: The reduced gradients of parameter groups.

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

    The device that updates the group computes it, so every ZeRO stage gets the same bits. `first`
    is the index of the first element in the flat buffer of the group.
    """
    assert group.master is not None
    device = group.master.update_device
    if values.device != device and device == CPU:
        values = group.comm_ctx.copy_engine.to_host(values)
    parts = [(values, first)]
    if group.not_updated:
        last = first + values.numel()
        ranges = [(max(start, first), min(stop, last)) for start, stop in updated_ranges(group)]
        parts = [(values[low - first : high - first], low) for low, high in ranges if low < high]
    if device.type == "cpu":
        threads = group.comm_ctx.comm.threads
        return sum((squares_on_cpu(part, place, threads) for part, place in parts), 0.0)
    return [tile for part, _ in parts for tile in _tiles_of(part)]


def read_squares(found: Sequence[Sequence[Squares]]) -> list[list[float]]:
    """Return sums of squares as numbers; wait for an accelerator at most once.

    The norms are computed in float64, in a single pass over memory.

    Args:
        found: For each gradient, sums of squares.
    """
    queued = [each for squares in found for each in squares if isinstance(each, list)]
    parts = [part for each in queued for part in each]
    tiles = [part for part in parts if part.dim()]
    computed = iter(double_norms(tiles) if tiles else ())
    norms = [next(computed) if part.dim() else part for part in parts]
    read = iter(torch.stack(norms).tolist() if norms else ())

    def number_of(squares: Squares) -> float:
        if not isinstance(squares, list):
            return squares
        return sum((norm * norm for norm in itertools.islice(read, len(squares))), 0.0)

    return [[number_of(each) for each in squares] for squares in found]
