"""What an optimizer's step works in, kept from step to step: as long as the fullest tile, whatever the model's size.

Called by sharded.py; report/estimate.py predicts its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Scratch:
    """grads: gradients cast, unscaled and clipped.  masters: masters joined from their halves (precision/split.py)."""

    device: torch.device
    numel: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, what: str, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """The buffer of that name, with arbitrary contents; allocated on first use."""
        found = self.kept.get(what)
        if found is None or found.dtype != dtype:
            found = torch.empty(self.numel if numel is None else numel, dtype=dtype, device=self.device)
            self.kept[what] = found
        return found

    def nothing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of that shape that holds no values: NaN, of 4 bytes in all."""
        if "nothing" not in self.kept:
            self.kept["nothing"] = torch.full((), float("nan"), dtype=dtype, device=self.device)
        return self.kept["nothing"].expand(shape)
