"""What an optimizer's step works in, kept from step to step: as long as the fullest tile, whatever the model's size.

Called by sharded.py; report/estimate.py predicts its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tiers.device import Allowance


@dataclass
class Scratch:
    """grads: gradients cast, unscaled and clipped.  masters: masters joined from their halves (precision/split.py)."""

    device: torch.device
    numel: int = 0
    allowance: Allowance = field(default_factory=Allowance)
    kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, what: str, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """The buffer of that name, with arbitrary contents; allocated on first use."""
        found = self.kept.get(what)
        if found is None or found.dtype != dtype:
            numel = self.numel if numel is None else numel
            self.allowance.take(numel * dtype.itemsize, "what an optimizer's step works in")
            self.allowance.give(found.nbytes if found is not None else 0)
            self.kept[what] = found = torch.empty(numel, dtype=dtype, device=self.device)
        return found

    def nothing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of that shape that holds no values: NaN, of 4 bytes in all."""
        if "nothing" not in self.kept:
            self.allowance.take(dtype.itemsize, "what stands for values that are elsewhere")
            self.kept["nothing"] = torch.full((), float("nan"), dtype=dtype, device=self.device)
        return self.kept["nothing"].expand(shape)
