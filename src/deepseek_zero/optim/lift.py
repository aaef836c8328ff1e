"""precision "auto": which unit leaves 16 bits, and when.

After a skipped step the units' borders are watched (nonfinite.py); a unit named `PATIENCE` times in a row, or once at
the smallest loss scale, computes in fp32 from then on.  All ranks lift the same unit at the same step.  Called by
optim/sharded.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..base.log import log_once
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit

PATIENCE = 3  # skipped steps in a row that name the same unit; a loss scale that is merely too high recovers sooner


def promote_unit(runtime: Runtime, unit: Unit) -> None:
    """Have a unit compute in fp32 from now on.  Collective; the unit must be at rest."""
    unit.promote_to_fp32()
    runtime.forward.any_promoted = True


class PrecisionFallback:
    """Counts what skipped steps point at; lifts units at step boundaries."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.changed = False  # whether the last step lifted a unit
        self._suspect: Unit | None = None
        self._count = 0

    def after_step(self, unit: Unit | None, skipped: bool, scaler: LossScaler | None) -> Unit | None:
        """Take what a step points at; returns the unit lifted, if any.  Collective when one is."""
        self.changed = False
        if not skipped:
            self._suspect, self._count = None, 0
            return None
        if unit is None or unit.is_promoted:
            return None
        self._count = self._count + 1 if unit is self._suspect else 1
        self._suspect = unit
        at_minimum = scaler is not None and scaler.dynamic and scaler.scale <= scaler.settings.min_loss_scale
        if self._count < PATIENCE and not at_minimum:
            return None
        promote_unit(self.runtime, unit)
        self.changed = True
        self._suspect, self._count = None, 0
        log_once(
            f"precision auto: '{unit.name}' made a non-finite number of finite ones, step after step; it computes in "
            "fp32 from now on.  Its new plan:\n" + "\n".join(unit.explain()),
            logging.WARNING,
        )
        return unit

    @property
    def promoted(self) -> list[str]:
        """Names of the units that compute in fp32."""
        return [unit.name for unit in self.runtime.units if unit.is_promoted]

    def restore(self, names: Sequence[str]) -> None:
        """Lift what was lifted when a checkpoint was saved.  Collective; every unit must be at rest."""
        for unit in self.runtime.units:
            if unit.name in names and not unit.is_promoted:
                promote_unit(self.runtime, unit)
