"""A group's master: the values its optimizer updates, wherever they lie.

They are a buffer of their own, the weight's storage (fp32 training), or the live bf16 weight and a buffer of
remainders (precision/split.py); nobody else needs to know which.  Places are counted in this rank's part: the whole
group where the master is replicated, its slice otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..base.device import CPU
from ..planner.layout import Slot
from ..planner.spec import Placement, R
from ..precision.compact import round_to_bf16
from ..precision.policy import cast_master
from ..precision.split import join, split
from ..tiers.copy_engine import CopyEngine, StagedTile
from ..tiers.tier import Extent
from .buffer import FlatBuffer

_WRITE_NUMEL = 1 << 20  # values that are copied at once before they are split


@dataclass(eq=False)
class MasterWeight:
    """buffer: values, or remainders where the master `is_split` and `weight` holds the upper halves.

    weight: this rank's part of the live weight, None where the master is that weight.  is_exposed: programs see it
    between steps and may change it.
    """

    buffer: FlatBuffer
    rank: int
    dtype: torch.dtype  # of the values
    weight: FlatBuffer | None = None
    is_split: bool = False
    is_exposed: bool = True
    update_device: torch.device = CPU  # where it is updated
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    staged: StagedTile | None = field(init=False, default=None)  # of what the host updates and the device has

    def __post_init__(self) -> None:
        if self.update_device == CPU:
            self.staged = self.copy_engine.staged_tile(
                self._on_device.memory, is_read=self.weight is None or self.is_split
            )

    @property
    def _on_device(self) -> FlatBuffer:
        """What computing needs: the weight."""
        return self.buffer if self.weight is None else self.weight

    @property
    def is_rounded(self) -> bool:
        """Return whether the weight is all there is, in fewer bits than the values have."""
        return not self.is_split and self.buffer.spec.dtype != self.dtype

    @property
    def is_copied_for_update(self) -> bool:
        """Return whether the values do not lie together at home between steps."""
        return not self.is_updated_in_place or self.buffer.is_offloaded

    @property
    def is_updated_in_place(self) -> bool:
        """Return whether an optimizer works on the values themselves, not on a copy."""
        return not self.is_split and not self.is_rounded and self.buffer.memory.device == self.update_device

    @property
    def placement(self) -> Placement:
        return self.buffer.spec.placement

    # -- where a parameter lies

    def local_range(self, slot: Slot) -> tuple[int, int, int]:
        """(start, stop, place): the elements of a parameter that are held here, and the place of the first one."""
        if self.placement is R:
            return 0, slot.numel, slot.start
        place, end = self.owned_range(slot)
        start = place + self.buffer.layout.bounds(self.rank)[0] - slot.start
        return start, start + end - place, place

    def owned_range(self, slot: Slot) -> tuple[int, int]:
        """[place, end) of the elements of a parameter that this rank owns; every element has one owner."""
        layout = self.buffer.layout
        start, stop = layout.owned(slot, self.rank)
        low = 0 if self.placement is R else layout.bounds(self.rank)[0]
        return start - low, max(start, stop) - low

    # -- values

    def in_place_view(self, place: int, end: int) -> Tensor | None:
        """The values where they lie, to be written; None where they lie in two halves, or are updated elsewhere."""
        return self.buffer.write(place, end) if self.is_updated_in_place else None

    def read(self, place: int, end: int, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """The values: a view where they lie together, a copy (in `out`) where they must be joined."""
        lower = self._at_update_device(self.buffer, place, end)
        if not self.is_split or self.weight is None:
            return lower.to(self.dtype) if out is None else out.copy_(lower)
        if out is None:
            out = torch.empty(end - place, dtype=self.dtype, device=lower.device)
        upper = self._at_update_device(self.weight, place, end).to(lower.device)
        join(upper, lower, out, scratch, is_exposed=self.is_exposed)
        return out

    def read_now(self, place: int, end: int) -> Tensor:
        """The values as they are now, whatever update waits, to be read only: a view or a copy."""
        lower = self.buffer.read_now(place, end)
        if not self.is_split or self.weight is None:
            return lower.to(self.dtype)
        out = torch.empty(end - place, dtype=self.dtype, device=lower.device)
        join(self.weight.read_now(place, end).to(lower.device), lower, out, is_exposed=self.is_exposed)
        return out

    def write(self, place: int, end: int, values: Tensor) -> None:
        """Take new values; this rank's part of the weight has them too."""
        if not self.is_split:
            cast_master(values, self.buffer.write(place, end))
            self.copy_to_weight(place, end)
            return
        for start in range(place, end, _WRITE_NUMEL):
            part = values[start - place : start - place + _WRITE_NUMEL]
            self.write_consuming(start, start + part.numel(), part.to(self.dtype, copy=True))

    def write_consuming(self, place: int, end: int, values: Tensor, chance: Tensor | None = None) -> None:
        """`write` for values that are not needed any more, in the master's dtype.  chance: where it `is_rounded`."""
        self.buffer.guard.before_write()
        lower = self._at_update_device(self.buffer, place, end)
        if chance is not None:
            round_to_bf16(values, lower, chance)
            return
        if not self.is_split or self.weight is None:
            cast_master(values, lower)
            return
        upper = self._at_update_device(self.weight, place, end)
        near = staging_like(upper, lower)
        split(values.to(lower.device), near, lower)
        if near is not upper:
            upper.copy_(near)

    def copy_to_weight(self, place: int, end: int) -> None:
        """Let this rank's part of the weight have the values; it has them where it is the master, or half of it."""
        if self.weight is not None and not self.is_split:
            self.buffer.guard.before_write()
            values, upper = self.buffer.elements(place, end), self._at_update_device(self.weight, place, end)
            near = staging_like(upper, values)
            cast_master(values, near)
            if near is not upper:
                upper.copy_(near)

    def _at_update_device(self, buffer: FlatBuffer, place: int, end: int) -> Tensor:
        """These elements: where they came to if an update had them come, else where they rest."""
        came = self.staged.view(place, end) if self.staged is not None and buffer is self._on_device else None
        return buffer.elements(place, end) if came is None else came

    def extents(self) -> list[Extent]:
        """What of the values rests in other memories."""
        found = [self.buffer.extent, self.weight.extent if self.weight is not None else None]
        return [extent for extent in found if extent is not None]

    def take_changed(self, changed: Tensor, weight: Tensor) -> None:
        """Where a mask says so, take the values of a new weight; the weight itself is the caller's to change."""
        storage = self.buffer.write(0, self.buffer.memory.numel())
        places = changed.to(storage.device)
        storage[places] = 0 if self.is_split else weight[changed].to(storage)

    def values(self) -> FlatBuffer:
        """All values of this rank: the buffer itself, or a copy."""
        if not self.is_split and not self.is_rounded:
            return self.buffer
        spec = replace(self.buffer.spec, dtype=self.dtype)
        return FlatBuffer(self.buffer.layout, spec, self.read(0, self.buffer.storage.numel()))


def staging_like(upper: Tensor, lower: Tensor) -> Tensor:
    """Where a weight is written by what lies at `lower`: itself, or room on that device, so that it crosses once."""
    return upper if upper.device == lower.device else torch.empty_like(upper, device=lower.device)
