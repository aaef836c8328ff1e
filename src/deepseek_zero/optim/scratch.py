"""Buffers for the update of a tile, such as a main weight that is joined from its two halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tiers.budget import DeviceBudget


@dataclass
class Scratch:
    """Buffers that all tiles share during updates.

    The buffer "grads" holds gradients that are cast, unscaled and clipped. The buffer "masters"
    holds main weights that are joined from their two halves (precision/policy.py).

    Attributes:
        budgets: The memory budget of each device that runs updates.
        numel: Elements of the largest tile, by device.
        kept: Allocated buffers by name and device.
    """

    budgets: Mapping[torch.device, DeviceBudget]
    numel: dict[torch.device, int] = field(default_factory=dict)
    kept: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def take(
        self, what: str, dtype: torch.dtype, home: torch.device, numel: int | None = None
    ) -> Tensor:
        """Return an uninitialized, named buffer; allocate it on first use.

        Args:
            what: The name of the buffer; calls with the same name get the same memory.
            dtype: Data type. A buffer of another type is replaced.
            home: Device that runs the update.
            numel: Number of elements; by default those of the largest tile.

        Returns:
            The flat buffer, whose values are undefined.

        Raises:
            OutOfMemoryError: The budget of the training device does not allow the allocation.
        """
        found = self.kept.get((what, home))
        if found is None or found.dtype != dtype:
            numel = self.numel[home] if numel is None else numel
            self.budgets[home].reserve(numel * dtype.itemsize, "buffers of an optimizer's step")
            if found is not None:
                self.budgets[home].release(found.nbytes)
            self.kept[what, home] = found = torch.empty(numel, dtype=dtype, device=home)
        return found

    def placeholder(self, shape: torch.Size, dtype: torch.dtype, home: torch.device) -> Tensor:
        """Return a placeholder for values that are stored elsewhere: one NaN, expanded to a shape.

        Args:
            shape: Shape of the tensor.
            dtype: Data type of the NaN if it is not allocated yet.
            home: Device of the tensor.
        """
        key = "nothing", home
        if key not in self.kept:
            self.budgets[home].reserve(dtype.itemsize, "a placeholder for values in other memories")
            self.kept[key] = torch.full((), float("nan"), dtype=dtype, device=home)
        return self.kept[key].expand(shape)
