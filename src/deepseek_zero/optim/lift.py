"""precision "auto": which unit leaves 16 bits, and when.

After a skipped step the units' borders are watched; a unit named `PATIENCE` times in a row, or once at the smallest
loss scale, computes in fp32 from then on.  All ranks lift the same unit at the same step.  Called by
optim/sharded.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ..base.log import log_once
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit
from ..sharding.watch import Watcher
from .clip import Verdict

PATIENCE = 3  # skipped steps in a row that name the same unit; a loss scale that is merely too high recovers sooner
NOBODY = 1 << 30


def lift(runtime: Runtime, unit: Unit) -> None:
    """Have a unit compute in fp32 from now on.  Collective; the unit must be at rest."""
    unit.lift()
    runtime.forward.any_lifted = True


class Lifter:
    """Counts what skipped steps point at; lifts units at step boundaries."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.changed = False  # whether the last step lifted a unit
        self._suspect: Unit | None = None
        self._count = 0

    def after(self, verdict: Verdict, skipped: bool, scaler: LossScaler | None) -> Unit | None:
        """Take the verdict of a step; returns the unit lifted, if any.  Collective when the step was skipped."""
        watcher, self.runtime.watcher = self.runtime.watcher, None
        self.changed = False
        if not skipped:
            self._suspect, self._count = None, 0
            return None
        self.runtime.watcher = Watcher()
        unit = self._named(verdict, watcher) if watcher is not None else None
        if unit is None or unit.is_lifted:
            return None
        self._count = self._count + 1 if unit is self._suspect else 1
        self._suspect = unit
        at_minimum = scaler is not None and scaler.dynamic and scaler.scale <= scaler.settings.min_loss_scale
        if self._count < PATIENCE and not at_minimum:
            return None
        lift(self.runtime, unit)
        self.changed = True
        self._suspect, self._count = None, 0
        log_once(
            f"precision auto: '{unit.name}' made a non-finite number of finite ones, step after step; it computes in "
            "fp32 from now on.  Its new plan:\n" + "\n".join(unit.explain()),
            logging.WARNING,
        )
        return unit

    @property
    def lifted(self) -> list[str]:
        """Names of the units that compute in fp32."""
        return [unit.name for unit in self.runtime.units if unit.is_lifted]

    def restore(self, names: Sequence[str]) -> None:
        """Lift what was lifted when a checkpoint was saved.  Collective; every unit must be at rest."""
        for unit in self.runtime.units:
            if unit.name in names and not unit.is_lifted:
                lift(self.runtime, unit)

    def _named(self, verdict: Verdict, watcher: Watcher) -> Unit | None:
        """The unit the trouble starts in, on whichever rank saw it first.  Collective."""
        runtime = self.runtime
        forward, backward = runtime.gatherer.schedule.forward.order, runtime.gatherer.schedule.backward.order
        sick = {
            runtime.unit_of(group).number
            for group, square in zip(runtime.trained_groups, verdict.by_group, strict=True)
            if not math.isfinite(square)
        }
        seen = [watcher.origin_in_forward(forward), watcher.origin_in_backward(backward, sick)]
        orders = [[*forward[1:], forward[0]], [*backward[1:], backward[0]]]  # the root is blamed last
        row = torch.tensor([orders[k].index(unit) if unit is not None else NOBODY for k, unit in enumerate(seen)])
        agreed = runtime.comm.rows(row, "where numbers stop being finite").amin(dim=0).tolist()
        for order, place in zip(orders, agreed, strict=True):
            if place != NOBODY:
                return runtime.units[order[int(place)]]
        return None
