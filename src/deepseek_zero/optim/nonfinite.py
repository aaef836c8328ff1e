"""Find and log the unit in which gradients stop being finite.

A non-finite step turns on checks of all unit outputs during the next step. If that step is not
finite either, the ranks agree on the first unit with a non-finite number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.log import log_once
from ..base.nested import map_tensors
from ..sharding.external_params import unit_of
from ..sharding.unit import Unit
from .rank_agreement import comm_of_units
from .shard_set import ShardSet
from .verdict import StepResult

NOT_FOUND = 1 << 30
LATER = "If the next step is like it, the unit where it begins is named."


class NonFiniteReport:
    """Logs steps with a non-finite gradient, and finds the unit in which the first one occurred."""

    def __init__(self, shards: ShardSet) -> None:
        """Start without a recorded step.

        Args:
            shards: The shards of the optimizer, with its policies and loss scaler.
        """
        self.runtime = shards.runtime
        # A dynamic loss scale overflows on purpose; the scaler logs these steps
        self.is_usual = shards.scaler is not None and shards.scaler.dynamic
        # Look for the unit even if overflows are usual
        watches = any(policy.watches_overflows for policy in shards.policies)
        self.watches = watches or not self.is_usual
        self.in_a_row = 0

    def after_step(self, result: StepResult) -> Unit | None:
        """Log a non-finite step, and find the unit in which the first non-finite value occurred.

        Args:
            result: The result of the step.

        Returns:
            The unit; None if it is unknown or the step was finite.

        Note:
            Collective from the second non-finite step in a row.
        """
        verdict = result.verdict
        if verdict.is_finite and not self.in_a_row:
            return None
        watcher = self.runtime.step.nonfinite
        self.runtime.step.nonfinite = None
        if verdict.is_finite:
            self.in_a_row = 0
            return None
        squares = verdict.by_group
        self.in_a_row += 1
        unit = None
        if isinstance(watcher, NonFiniteDetector):
            unit = self._unit_named(squares, watcher)
        if self.watches:
            self.runtime.step.nonfinite = NonFiniteDetector()
        # Log the 1st, 2nd, 4th, 8th ... such step
        if not self.is_usual and self.in_a_row & (self.in_a_row - 1) == 0:
            text = self._describe(squares, unit, skipped=result.overflow, step=result.number)
            log_once(text, logging.WARNING)
        return unit

    def _describe(
        self, squares: Sequence[float], unit: Unit | None, *, skipped: bool, step: int
    ) -> str:
        times = "" if self.in_a_row == 1 else f" for {self.in_a_row} steps in a row"
        done = (
            "so the step was skipped and no state has changed."
            if skipped
            else "and check_grad_overflow is false, so the weights were updated with it."
        )
        if unit is not None:
            what = "What belongs to no unit" if unit is self.runtime.root else f"Unit '{unit.name}'"
            where = f"{what} was the first to make such a number of finite ones."
        else:
            where = self._reached(squares)
        fix = (
            "look at the loss and the batch of this step; a smaller learning rate or "
            "gradient_clipping may help."
        )
        what = f"step {step}: the gradient is not finite (NaN or infinite){times}, {done}"
        return f"{what}  {where}".rstrip() + f"\n  What to do: {fix}"

    def _reached(self, squares: Sequence[float]) -> str:
        if len(self.runtime.units) == 1:
            return ""
        sick = self._nonfinite_units(squares)
        units = {unit.number for unit in self.runtime.units if unit.trained}
        if sick == units:
            return f"It is so in every unit, as after a loss that is not finite.  {LATER}"
        order = [number for number in self.runtime.schedule.backward.order if number in sick]
        first = self.runtime.units[order[1] if len(order) > 1 and order[0] == 0 else order[0]].name
        return (
            f"It is so in {len(sick)} of {len(units)} units; the first of them in backward is "
            f"'{first}'.  {LATER}"
        )

    def _nonfinite_units(self, squares: Sequence[float]) -> set[int]:
        """Return the numbers of the units whose gradients are not finite."""
        return {
            unit_of(group, self.runtime.units).number
            for group, square in zip(self.runtime.trained_groups, squares, strict=True)
            if not math.isfinite(square)
        }

    def _unit_named(self, squares: Sequence[float], watcher: NonFiniteDetector) -> Unit | None:
        """Return the unit in which the ranks first saw a non-finite number.

        Note:
            Collective: every rank must call it.
        """
        runtime = self.runtime
        forward = runtime.schedule.forward.order
        backward = runtime.schedule.backward.order
        seen = [
            watcher.origin_in_forward(forward),
            watcher.origin_in_backward(backward, self._nonfinite_units(squares)),
        ]
        # The root comes last, so that a block is reported if possible
        orders = [[*forward[1:], forward[0]], [*backward[1:], backward[0]]]
        row = torch.full((2,), NOT_FOUND, device="cpu")
        for k, unit in enumerate(seen):
            if unit is not None:
                row[k] = orders[k].index(unit)
        rows = comm_of_units(runtime).all_gather_rows(row, "where numbers stop being finite")
        for order, place in zip(orders, rows.amin(dim=0).tolist(), strict=True):
            if place != NOT_FOUND:
                return runtime.units[order[int(place)]]
        return None


class NonFiniteDetector:
    """Records which inputs, outputs and incoming gradients of each unit were not finite.

    From the records of one step it determines the unit in which the first non-finite value
    occurred.
    """

    def __init__(self) -> None:
        self._sick: dict[tuple[str, int], Tensor] = {}

    def record(self, what: str, unit: int, value: Any) -> None:
        """Check one value of a unit without a wait for the device.

        Args:
            what: The kind of value: "input", "output" or "grad".
            unit: The number of the unit.
            value: A tensor or a nested structure of tensors.
        """

        def look(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                sick = ~torch.isfinite(tensor.detach()).all()
                known = self._sick.get((what, unit))
                self._sick[what, unit] = sick if known is None else known | sick
            return tensor

        map_tensors(value, look)

    def has_nonfinite(self, what: str, unit: int) -> bool:
        """Return whether a recorded value was not finite. It waits for the device.

        Args:
            what: The kind of value: "input", "output" or "grad".
            unit: The number of the unit.
        """
        found = self._sick.get((what, unit))
        return found is not None and bool(found)

    def origin_in_forward(self, order: Sequence[int]) -> int | None:
        """Return the first unit that computed non-finite outputs from finite inputs.

        If a unit received non-finite inputs although all earlier outputs were finite, the root is
        returned: the values were computed outside of all other units.

        Args:
            order: The numbers of the units in forward order; the root comes first.

        Returns:
            The number of the unit; None if all recorded values were finite.
        """
        root, *blocks = order
        for unit in blocks:
            if self.has_nonfinite("input", unit):
                return root
            if self.has_nonfinite("output", unit):
                return unit
        return root if self.has_nonfinite("output", root) else None

    def origin_in_backward(self, order: Sequence[int], sick_gradients: set[int]) -> int | None:
        """Return the first unit that turned a finite gradient into non-finite ones.

        Args:
            order: The numbers of the units in backward order; the root comes first.
            sick_gradients: The units whose parameter gradients are not finite.

        Returns:
            The number of the unit; None if there is none.
        """
        root, *blocks = order
        for unit in blocks:
            if unit in sick_gradients and not self.has_nonfinite("grad", unit):
                return unit
        return root if root in sick_gradients else None
