"""The sum of one group's gradients over the ranks: its state, memory and norm.

Norms are sums of squares in float64, one for each group and slice, so that every stage and every
rank computes the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.device import CPU, double_norms
from ..base.memory import offer_pages, private_pages
from ..kernels.sums import sum_of_squares as squares_on_cpu
from ..planner.layout import Slot
from ..planner.spec import S, Spec
from ..tiers.tier import StagedTile, Tier
from .buffer import FlatBuffer, StateGuard
from .message import has_pages_to_return
from .param_ranges import owned_range, owned_view, updated_ranges

if TYPE_CHECKING:
    from .param_group import ParamGroup


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
# The states that have a sum of the current step.
_SUMMED = frozenset((GradState.REDUCING, GradState.PARTIAL, GradState.REDUCED))


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
    """

    saved_as = ""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.buffer: FlatBuffer | None = None
        self.guard = StateGuard()
        self.absent: set[int] | None = None
        self.known_squares: float | QueuedSquares | None = None
        self._state = GradState.EMPTY
        self._staged: StagedTile | None = None

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
        """Change the state like `enter`; do nothing if the gradient is in this state already.

        Args:
            state: The new state.
        """
        if self._state is not state:
            self.enter(state)

    @property
    def is_reduced(self) -> bool:
        """Return whether gradients of the current step have been reduced."""
        return self._state in _SUMMED

    @property
    def is_full(self) -> bool:
        """Return whether the buffer holds a reduced gradient, of the current or an earlier step."""
        return self._state in _SUMMED or self._state is GradState.HELD

    def has(self, number: int) -> bool:
        """Return whether a parameter has a reduced gradient."""
        return self.is_reduced and not (self.absent and number in self.absent)

    # -- memory

    @property
    def spec(self) -> Spec:
        """Return the planned placement, dtype and memory of the buffer."""
        assert self.group.plan.grad is not None
        return self.group.plan.grad

    def ensure(self) -> FlatBuffer:
        """Return the buffer of the gradient; allocate it on first use."""
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
        """Free the buffer of the gradient."""
        self.buffer = None
        self._staged = None

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

    def follow_wires(self) -> None:
        """Use the codecs of the current plan in all following reductions."""
        planned = self.group.plan.grad
        if self.buffer is not None and planned is not None:
            self.buffer.spec = replace(
                self.buffer.spec, wire=planned.wire, wire_inside=planned.wire_inside
            )

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
        came = self._staged.view(low, high) if self._staged is not None else None
        if came is not None:
            return came
        if self.buffer.spec.placement is S:
            return self.buffer.read(low, high)
        return self.own()[low:high]

    def own_part(self, slot: Slot) -> Tensor:
        """Return a flat, writable view of this rank's part of one parameter's gradient.

        Args:
            slot: The position of the parameter in the flat buffer.
        """
        assert self.buffer is not None
        self.known_squares = None  # the caller may change it
        if self.group.plan.sums_to_all:
            return self.buffer.memory[slot.start : slot.stop]
        return owned_view(self.buffer, slot, self.group.comm_ctx.comm.rank)

    def changed(self, number: int) -> None:
        """Record that one parameter's gradient was written, and store it again if it is offloaded.

        Args:
            number: The index of the parameter in the group.
        """
        self.known_squares = None
        if self.buffer is not None and self.buffer.storage.is_offloaded:
            slot = self.group.members[number].slot
            place, end = owned_range(self.buffer, slot, self.group.comm_ctx.comm.rank)
            self.buffer.storage.evict(place, end)

    def staged_tile(self) -> StagedTile | None:
        """Return the object that copies ranges of this rank's slice to the host for the update.

        Returns:
            None if the gradient is not on the training device, or is not updated on the host.
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


# -- norms


class QueuedSquares:
    """A sum of squares that an accelerator computes asynchronously.

    Attributes:
        norms: The norms of parts of the gradient, 0-dimensional float64 tensors on the accelerator.
        tiles: Parts of the gradient whose norms have not been computed yet; `read_squares` does.
    """

    def __init__(self, parts: Sequence[Tensor] = ()) -> None:
        self.norms: list[Tensor] = []
        self.tiles = [tile for part in parts if part.numel() for tile in part.split(_TILE_NUMEL)]

    def add(self, values: Tensor) -> None:
        """Queue the sum of squares of a flat tensor on the accelerator.

        Args:
            values: The tensor. Work that is queued later may overwrite it.
        """
        if values.numel():
            self.norms += double_norms(list(values.split(_TILE_NUMEL)))


def squares_now(group: ParamGroup, values: Tensor, first: int) -> float:
    """Return the sum of squares of a part of a group's gradient.

    Args:
        group: The parameter group whose gradient is measured.
        values: The elements of the gradient, flat.
        first: The index of the first element in the flat buffer of the group.
    """
    (found,) = read_squares([slice_squares(group, values, first)])
    return found


def slice_squares(group: ParamGroup, values: Tensor, first: int) -> float | QueuedSquares:
    """Return the sum of squares of a gradient, without elements that the optimizer does not update.

    The device that updates the group computes it, so every ZeRO stage gets the same bits.

    Args:
        group: The parameter group whose gradient is measured.
        values: The elements, flat; they must not change before the sum is read.
        first: The index of the first element in the flat buffer of the group.

    Returns:
        The sum; on an accelerator an object from which `read_squares` reads it later.
    """
    assert group.master is not None
    device = group.master.update_device
    if values.device != device and device == CPU:
        values = group.comm_ctx.copy_engine.to_host(values)
    parts = [(values, first)]
    if group.not_updated:
        parts = []
        last = first + values.numel()
        for start, stop in updated_ranges(group):
            low = max(start, first)
            high = min(stop, last)
            if low < high:
                parts.append((values[low - first : high - first], low))
    if device.type == "cpu":
        threads = group.comm_ctx.comm.threads
        return sum((squares_on_cpu(part, place, threads) for part, place in parts), 0.0)
    return QueuedSquares([part for part, _ in parts])


def read_squares(found: Sequence[float | QueuedSquares]) -> list[float]:
    """Return sums of squares as numbers; wait for an accelerator at most once.

    Args:
        found: Results of `slice_squares`.

    Returns:
        One number for each element of `found`. The norms of all ranges are computed in float64, in
        a single pass over memory.
    """
    queued = [each for each in found if isinstance(each, QueuedSquares)]
    tiles = [tile for each in queued for tile in each.tiles]
    norms = iter(double_norms(tiles) if tiles else ())
    for each in queued:
        each.norms += itertools.islice(norms, len(each.tiles))
        each.tiles = []
    together = [norm for each in queued for norm in each.norms]
    read = iter(torch.stack(together).tolist() if together else ())
    numbers = list[float]()
    for squares in found:
        if isinstance(squares, QueuedSquares):
            own = itertools.islice(read, len(squares.norms))
            numbers.append(sum((norm * norm for norm in own), 0.0))
        else:
            numbers.append(squares)
    return numbers


def squares_of(sums: Sequence[GradSum]) -> list[list[float]]:
    """Return the sums of squares of several gradients, separately for the slice of each rank.

    Args:
        sums: The reduced gradients of parameter groups.

    Returns:
        For each gradient, one number per rank; 0.0 for slices that this rank does not hold.
    """
    found = [_all_squares(each) for each in sums]
    read = iter(read_squares([squares for of_group in found for squares in of_group]))
    numbers = [list(itertools.islice(read, len(of_group))) for of_group in found]
    for each, own in zip(sums, numbers, strict=True):
        if each.known_squares is not None:
            each.known_squares = own[each.group.comm_ctx.comm.rank]
    return numbers


def _all_squares(gradient: GradSum) -> list[float | QueuedSquares]:
    """Return the sum of squares of each slice, in rank order."""
    group = gradient.group
    comm = group.comm_ctx.comm
    squares: list[float | QueuedSquares] = [0.0] * comm.size
    if gradient.known_squares is not None:  # a read of the values would run pending updates
        squares[comm.rank] = gradient.known_squares
        return squares
    values = gradient.reduced()
    if values is None:
        return squares
    if group.plan.sums_to_all:
        for rank, part in enumerate(values.chunk(comm.size)):
            squares[rank] = slice_squares(group, part, rank * group.layout.slice_numel)
        return squares
    first = group.layout.bounds(comm.rank)[0]
    gradient.known_squares = slice_squares(group, values, first)
    squares[comm.rank] = gradient.known_squares
    return squares
