"""Sums of reduced gradients over replicas, which complete the sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .unit import Unit


def complete_sums(units: Sequence[Unit], after_sum: Callable[[Unit], None]) -> None:
    """Sum the reduced gradients of units over replicas, once per step.

    Args:
        units: The units, in the order of the schedule.
        after_sum: Waits for the sum of a unit, which may then be updated. The sum of the next unit
            is in flight by then.

    Note:
        Collective: every rank must call it with the same units.
    """
    before: Unit | None = None
    for unit in units:
        _start(unit)
        if before is not None:
            after_sum(before)
        before = unit
    if before is not None:
        after_sum(before)


def _start(unit: Unit) -> None:
    unit.start_reduces(lambda group: group.gradient.reduction.complete(unit.name))
