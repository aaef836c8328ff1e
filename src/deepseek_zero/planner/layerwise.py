"""Which units take the micro-batches of a batch in turn (vertical micro-batches)."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import UsageError
from .enclosed_units import enclosing
from .units import UnitPlan


def cut_units(units: Sequence[UnitPlan]) -> frozenset[int]:
    """Return the units that take micro-batches in turn: all but the root, and tiles, which need no
    cutting.

    Raises `UsageError` if one stands inside another, or if there is none.
    """
    fix = "leave vertical_micro_batches out (gradient_accumulation_steps accumulates too)"
    for inner, outer in enclosing([unit.name for unit in units]).items():
        raise UsageError(
            f"unit '{units[inner].name}' stands inside unit '{units[outer].name}'.",
            "In vertical order it would be loaded again for every micro-batch of the outer one.",
            f"name units that do not contain each other (`units`), or {fix}.",
        )
    found = frozenset(number for number, unit in enumerate(units) if number and not unit.is_tile)
    if not found:
        raise UsageError(
            "the model has no units to take its micro-batches in turn.",
            "Nothing repeats in it, so all its weights belong to the root, which runs over the "
            "whole batch.",
            f"name its blocks in `units`, or {fix}.",
        )
    return found
