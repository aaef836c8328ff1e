"""A reduced gradient that waits for the step after its own, while that step's gradient is collected: delayed updates.

Two buffers take turns (optim/delay.py says when): what this step has collected goes to wait, what waited comes to where
an update reads it.  Called by gradient.py's owner, optim and checkpoint through `gradient.waiting`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..planner.layout import Slot
from ..planner.spec import S
from ..tiers.tier import Extent
from .buffer import FlatBuffer

if TYPE_CHECKING:
    from .gradient import Gradient

_TILE_NUMEL = 1 << 20  # elements that change places at once where buffers cannot


class DelayedGradient:
    """The gradient of one group that waits.  buffer: this rank's slice of it, there from the first use on."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.buffer: FlatBuffer | None = None
        self.is_full = False  # `buffer` has one
        self.absent: set[int] | None = None  # as of the gradients under way (`ReductionState`)

    @property
    def extents(self) -> list[Extent]:
        """What of it rests in another memory."""
        return [self.buffer.extent] if self.buffer is not None and self.buffer.extent is not None else []

    def swap(self, *, keep: bool) -> None:
        """What waited becomes the reduced gradient; what that was waits now (`keep`) or is over."""
        gradient, comes = self.gradient, self.is_full
        if not (keep or comes):
            return
        gradient.group.barrier.before_write()
        theirs, mine = gradient.ensure_buffer(), self._ensure_buffer()
        if theirs.spec.placement is S:
            gradient.buffer, self.buffer = mine, theirs
        else:
            _change_places(theirs.shard(gradient.group.comm_ctx.comm.rank), mine.storage)
        gradient.state.reduced = comes
        gradient.state.absent, self.absent = self.absent, gradient.state.absent
        gradient.known_squares = None
        self.is_full = keep
        if not keep:
            self.discard()

    def read(self, low: int, high: int) -> Tensor | None:
        """Elements [low, high) of it, to be read; None where none waits."""
        return self.buffer.read(low, high) if self.is_full and self.buffer is not None else None

    def owned(self, slot: Slot) -> Tensor:
        """This rank's part of one member's, flat: a view, which a checkpoint fills."""
        self.gradient.group.barrier.before_write()
        return self._ensure_buffer().owned_view(slot, self.gradient.group.comm_ctx.comm.rank)

    def discard(self) -> None:
        """What waits never comes to an update."""
        self.gradient.group.barrier.before_write()
        self.is_full, self.absent = False, None
        for extent in self.extents:
            extent.discard(0, extent.memory.numel())

    def _ensure_buffer(self) -> FlatBuffer:
        if self.buffer is None:
            spec = self.gradient.group.plan.delayed_grad
            assert spec is not None
            self.buffer = self.gradient.new_slice(spec)
        return self.buffer


def _change_places(left: Tensor, right: Tensor) -> None:
    for mine, yours in zip(left.split(_TILE_NUMEL), right.split(_TILE_NUMEL), strict=True):
        held = mine.clone()
        mine.copy_(yours)
        yours.copy_(held)
