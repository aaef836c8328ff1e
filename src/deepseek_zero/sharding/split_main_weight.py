"""A main weight that is split into the bf16 weight and a buffer with the lower 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..precision.policy import join, split
from .buffer import FlatBuffer
from .main_weight import MasterWeight, staging_like


@dataclass(eq=False)
class SplitMasterWeight(MasterWeight):
    """A main weight of which `weight` has the upper 16 bits and `buffer` has the lower ones."""

    is_split: ClassVar[bool] = True

    @property
    def is_rounded(self) -> bool:
        return False

    @property
    def is_updated_in_place(self) -> bool:
        return False

    @property
    def _upper(self) -> FlatBuffer:
        assert self.weight is not None
        return self.weight

    def read(
        self, place: int, end: int, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        lower = self.buffer.at_update_device(place, end)
        upper = self._upper.at_update_device(place, end)
        return self._joined(upper, lower, out, scratch)

    def read_now(self, place: int, end: int) -> Tensor:
        return self._joined(self._upper.read_now(place, end), self.buffer.read_now(place, end))

    def _joined(
        self,
        upper: Tensor,
        lower: Tensor,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(lower.shape, dtype=self.dtype, device=lower.device)
        join(upper.to(lower.device), lower, out, scratch, is_exposed=self.is_exposed)
        return out

    def write_consuming(
        self, place: int, end: int, values: Tensor, chance: Tensor | None = None
    ) -> None:
        self.buffer.guard.before_write()
        own = [each.at_update_device(place, end) for each in (self._upper, self.buffer)]
        halves = [staging_like(each, values) for each in own]
        split(values, *halves)
        for half, each in zip(halves, own, strict=True):
            if half is not each:
                each.copy_(half)

    def copy_to_weight(self, place: int, end: int) -> None:
        """Do nothing, because the weight is half of the main weight."""
