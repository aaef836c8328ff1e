"""A group's master: the values its optimizer updates, wherever they lie.

They are a buffer of their own, the weight's storage (fp32 training), or the live bf16 weight and a buffer of
remainders (precision/split.py); nobody else needs to know which.  Places are counted in this rank's part: the whole
group where the master is replicated, its slice otherwise.  Called by group.py, access.py, optim and checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..precision.split import join, split
from .buffer import FlatBuffer
from .layout import Slot
from .placement import Placement, R

_WRITE_NUMEL = 1 << 20  # values that are copied at once before they are split


@dataclass(eq=False)
class Master:
    """buffer: values, or remainders where `weight` (this rank's part of the live weight) holds the upper halves.

    is_exposed: programs see that weight between steps and may change it.
    """

    buffer: FlatBuffer
    rank: int
    dtype: torch.dtype  # of the values
    weight: Tensor | None = None
    is_exposed: bool = True

    @property
    def placement(self) -> Placement:
        return self.buffer.spec.placement

    @property
    def is_split(self) -> bool:
        return self.weight is not None

    # -- where a parameter lies

    def held(self, slot: Slot) -> tuple[int, int, int]:
        """(start, stop, place): the elements of a parameter that are held here, and the place of the first one."""
        if self.placement is R:
            return 0, slot.numel, slot.start
        place, end = self.owned(slot)
        start = place + self.buffer.layout.bounds(self.rank)[0] - slot.start
        return start, start + end - place, place

    def owned(self, slot: Slot) -> tuple[int, int]:
        """[place, end) of the elements of a parameter that this rank owns; every element has one owner."""
        layout = self.buffer.layout
        start, stop = layout.owned(slot, self.rank)
        low = 0 if self.placement is R else layout.bounds(self.rank)[0]
        return start - low, max(start, stop) - low

    # -- values

    def view(self, place: int, end: int) -> Tensor | None:
        """The values where they lie; None where they lie in two halves."""
        return None if self.is_split else self.buffer.storage[place:end]

    def read(self, place: int, end: int, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """The values: a view where they lie together, a copy (in `out`) where they must be joined."""
        if self.weight is None:
            return self.buffer.storage[place:end]
        if out is None:
            out = torch.empty(end - place, dtype=self.dtype, device=self.weight.device)
        join(self.weight[place:end], self.buffer.storage[place:end], out, scratch, is_exposed=self.is_exposed)
        return out

    def write(self, place: int, end: int, values: Tensor) -> None:
        """Take new values; where the master is split, this rank's part of the weight has them too."""
        if self.weight is None:
            self.buffer.storage[place:end].copy_(values)
            return
        for start in range(place, end, _WRITE_NUMEL):
            part = values[start - place : start - place + _WRITE_NUMEL]
            self.absorb(start, start + part.numel(), part.to(self.dtype, copy=True))

    def absorb(self, place: int, end: int, values: Tensor) -> None:
        """`write` for values that are not needed any more, in the master's dtype."""
        if self.weight is None:
            self.buffer.storage[place:end].copy_(values)
        else:
            split(values, self.weight[place:end], self.buffer.storage[place:end])

    def adopt(self, changed: Tensor, weight: Tensor) -> None:
        """Where a mask says so, take the values of a new weight; the weight itself is the caller's to change."""
        storage = self.buffer.storage
        storage[changed] = weight[changed].to(storage.dtype) if self.weight is None else 0

    def values(self) -> FlatBuffer:
        """All values of this rank: the buffer itself, or a copy."""
        if not self.is_split:
            return self.buffer
        spec = replace(self.buffer.spec, dtype=self.dtype)
        return FlatBuffer(self.buffer.layout, spec, self.read(0, self.buffer.storage.numel()))
