"""Buffers that an optimizer's step works in, as long as the fullest tile whatever the model's size, kept between steps.

There is one set for each device that shards are updated on: the training device's, and the host's for those whose
moments are offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tiers.budget import DeviceBudget


@dataclass
class Scratch:
    """grads: gradients cast, unscaled and clipped. masters: masters joined from their halves (precision/split.py).

    device: the training device, whose memory is counted in `budget`.
    """

    device: torch.device
    numel: int = 0
    budget: DeviceBudget = field(default_factory=DeviceBudget)
    kept: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def take(self, what: str, dtype: torch.dtype, home: torch.device, numel: int | None = None) -> Tensor:
        """Return the buffer of that name on the update's device, with arbitrary contents; allocated on first use."""
        found = self.kept.get((what, home))
        if found is None or found.dtype != dtype:
            numel = self.numel if numel is None else numel
            self._count(home, numel * dtype.itemsize, "what an optimizer's step works in")
            self._count(home, -found.nbytes if found is not None else 0, "")
            self.kept[what, home] = found = torch.empty(numel, dtype=dtype, device=home)
        return found

    def grow(self, numel: int) -> None:
        """Make room for tiles of so many elements; a buffer that is too small is allocated anew on its next use."""
        if numel <= self.numel:
            return
        self.numel = numel
        for key in [key for key in self.kept if key[0] not in ("nothing", "undo")]:
            self._count(key[1], -self.kept.pop(key).nbytes, "")

    def placeholder(self, shape: torch.Size, dtype: torch.dtype, home: torch.device) -> Tensor:
        """Return a tensor of that shape without values: NaN, of 4 bytes in all."""
        key = "nothing", home
        if key not in self.kept:
            self._count(home, dtype.itemsize, "what stands for values that are elsewhere")
            self.kept[key] = torch.full((), float("nan"), dtype=dtype, device=home)
        return self.kept[key].expand(shape)

    def is_placeholder(self, value: object) -> bool:
        """Return whether this is a placeholder for values that are stored elsewhere."""
        if not isinstance(value, Tensor):
            return False
        nothing = self.kept.get(("nothing", value.device))
        return nothing is not None and value.data_ptr() == nothing.data_ptr()

    def _count(self, home: torch.device, nbytes: int, what: str) -> None:
        if home == self.device:
            self.budget.reserve(nbytes, what)
