"""Units that are nested in the module of another unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..base.errors import UsageError
from .units import UnitPlan


def enclosing(names: Sequence[str]) -> dict[int, int]:
    """Return, for each unit nested in another one, the number of the innermost enclosing unit.

    The root (0) is left out.

    Args:
        names: The full names of the modules of the units, in order.
    """
    numbers = {name: number for number, name in enumerate(names) if number}
    found = {}
    for name, number in numbers.items():
        outer = name.rpartition(".")[0]
        while outer and outer not in numbers:
            outer = outer.rpartition(".")[0]
        if outer:
            found[number] = numbers[outer]
    return found


def outward(unit: int, around: Mapping[int, int]) -> Iterator[int]:
    """Yield a unit and its enclosing units, from the inside out, without the root.

    Args:
        unit: The number of the unit.
        around: The enclosing unit of each nested unit (`enclosing`).
    """
    yield unit
    while unit in around:
        unit = around[unit]
        yield unit


def cut_units(units: Sequence[UnitPlan]) -> frozenset[int]:
    """Return the units that process the micro-batches of a batch one after the other.

    These are all units except the root and tiles. Tiles need no cut.

    Raises:
        UsageError: A unit is inside another, or there is none.
    """
    fix = "remove vertical_micro_batches (gradient_accumulation_steps also accumulates)"
    for inner, outer in enclosing([unit.name for unit in units]).items():
        raise UsageError(
            f"unit '{units[inner].name}' is inside unit '{units[outer].name}'.",
            "In vertical order it would be loaded again for every micro-batch of the outer one.",
            f"set `units` to modules that do not contain each other, or {fix}.",
        )
    found = frozenset(number for number, unit in enumerate(units) if number and not unit.is_tile)
    if not found:
        raise UsageError(
            "the model has no units that could process micro-batches one after the other.",
            "It has no repeated blocks, so all its weights belong to the root, which processes the "
            "whole batch.",
            f"list its blocks in `units`, or {fix}.",
        )
    return found
