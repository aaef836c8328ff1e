"""Finds the unit where a number first stops being finite; looked for only after a step was skipped,
at the borders of units.

Owns one step's observations; optim/nonfinite.py draws the conclusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.nested import map_tensors


class NonFiniteDetector:
    """Records whether each unit's inputs, outputs and incoming gradients were finite in the current
    step.
    """

    def __init__(self) -> None:
        self._sick: dict[tuple[str, int], Tensor] = {}

    def record(self, what: str, unit: int, value: Any) -> None:
        """Note one value ("input", "output", "grad") of a unit; does not wait for the device."""

        def look(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                sick = ~torch.isfinite(tensor.detach()).all()
                known = self._sick.get((what, unit))
                self._sick[what, unit] = sick if known is None else known | sick
            return tensor

        map_tensors(value, look)

    def has_nonfinite(self, what: str, unit: int) -> bool:
        found = self._sick.get((what, unit))
        return found is not None and bool(found)

    def origin_in_forward(self, order: Sequence[int]) -> int | None:
        """The first unit, in forward order, that made something non-finite of finite inputs; the
        root for what blocks were given.
        """
        root, *blocks = order
        for unit in blocks:
            if self.has_nonfinite("input", unit):
                return root
            if self.has_nonfinite("output", unit):
                return unit
        return root if self.has_nonfinite("output", root) else None

    def origin_in_backward(self, order: Sequence[int], sick_gradients: set[int]) -> int | None:
        """The first unit, in backward order, whose parameters got non-finite gradients from a
        finite incoming one.
        """
        root, *blocks = order
        for unit in blocks:
            if unit in sick_gradients and not self.has_nonfinite("grad", unit):
                return unit
        return root if root in sick_gradients else None
