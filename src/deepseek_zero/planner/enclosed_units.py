"""Units that are nested in the module of another unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..base.errors import UsageError
from .units import UnitPlan


def enclosing(names: Sequence[str]) -> dict[int, int]:
    """Return, for each unit inside another one, the number of the innermost unit around it.

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
    """Yield the number of a unit and of all units around it, from the inside out.

    The root is not yielded.

    Args:
        unit: The number of the unit.
        around: For each nested unit, the number of the innermost unit around it, from `enclosing`.
    """
    yield unit
    while unit in around:
        unit = around[unit]
        yield unit


def backward_order(order: Sequence[int], around: Mapping[int, int]) -> list[int]:
    """Return the order of backward: last used first, but a unit before inner units.

    The output of an enclosing unit is computed after the outputs of the units inside it.

    Args:
        order: The units in the order of forward, the root first.
        around: For each nested unit, the number of the innermost unit around it, from `enclosing`.
    """
    root, *rest = order
    inside: dict[int, list[int]] = {unit: [] for unit in order}
    for unit in rest:
        inside[around.get(unit, root)].append(unit)
    found = []
    to_come = [root]
    while to_come:
        found.append(to_come.pop())
        to_come += inside[found[-1]]
    return found


def ends_of_use(order: Sequence[int], around: Mapping[int, int]) -> list[list[int]]:
    """Return the units last used at each position of a pass, inner ones first.

    An enclosing unit is in use until the last unit inside it is done.

    Args:
        order: The units in the order of the pass, the root first.
        around: For each nested unit, the number of the innermost unit around it, from `enclosing`.
    """
    last = {each: k for k, unit in enumerate(order[1:], 1) for each in outward(unit, around)}
    found = [
        [each for each in outward(unit, around) if last[each] == k]
        for k, unit in enumerate(order[1:], 1)
    ]
    return [[], *found]


def cut_units(units: Sequence[UnitPlan]) -> frozenset[int]:
    """Return the units that process the micro-batches of a batch one after the other.

    These are all units except the root and the parts (tiles) of large layers.

    Args:
        units: The planned units of the model, the root first.

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
    found = frozenset(
        number for number, unit in enumerate(units) if number and not unit.is_layer_tile
    )
    if not found:
        raise UsageError(
            "the model has no units that could process micro-batches one after the other.",
            "It has no repeated blocks, so all its weights belong to the root, which processes the "
            "whole batch.",
            f"list its blocks in `units`, or {fix}.",
        )
    return found
