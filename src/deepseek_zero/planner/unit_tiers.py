"""Which unit's weights and states rest in which memory, where that is left open: fastest memory first.

What moves most per byte comes first: a sharded weight is read three times a step and written once, a moment once each.
Among the states those of the first units come first: their gradients are the last that backward makes, and theirs are
the weights that the next forward needs first.  Pure arithmetic over plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base.errors import OutOfMemoryError
from ..base.quantities import format_bytes
from ..tiers.tier import Tier
from .memory import STATES, UnitFacts, group_bytes
from .spec import UnitTiers

WEIGHTS, OTHERS = STATES[:1], STATES[1:]


@dataclass(frozen=True)
class TierChoices:
    """The memories that weights and states may rest in, fastest first; one that is fixed has no choice."""

    weights: tuple[Tier, ...]
    states: tuple[Tier, ...]


def assign_tiers(
    units: Mapping[Tier, Sequence[UnitFacts]], choices: TierChoices, budgets: Mapping[Tier, int], moments: int
) -> tuple[UnitTiers, ...]:
    """A place for every unit.  OutOfMemoryError where they do not fit.

    units: what the plan of each unit is where all of it rests in one memory.  budgets: bytes of one rank.  moments: per
    element.
    """
    left = dict(budgets)
    count = len(next(iter(units.values())))

    def put(number: int, states: tuple[str, ...], tiers: tuple[Tier, ...]) -> Tier:
        needed = 0
        for tier in tiers:
            groups = units[tier][number].groups
            needed = sum(sum(group_bytes(group, moments, states).values()) for group in groups)
            if needed <= left[tier]:
                left[tier] -= needed
                return tier
        raise OutOfMemoryError(
            f"{' and '.join(states)} of unit '{units[tiers[0]][number].name}' need {format_bytes(needed)} and fit "
            f"nowhere: {', '.join(f'{format_bytes(left[tier])} are left of {tier.value}' for tier in tiers)}.",
            'device "auto" places what memory_budget allows, else what is free; nothing has been allocated.',
            "allow more, name an nvme_path, or use more ranks.",
        )

    weights = [put(number, WEIGHTS, choices.weights) for number in range(count)]
    states = [put(number, OTHERS, choices.states) for number in range(count)]
    names = [unit.name for unit in next(iter(units.values()))]
    return tuple(UnitTiers(*each) for each in zip(names, weights, states, strict=True))


def split_by_ratio(units: Sequence[UnitFacts], weights: Tier, ratio: float) -> tuple[UnitTiers, ...]:
    """The units whose states stay on the device where only a share of all elements is offloaded (Twin-Flow)."""
    keep = (1.0 - ratio) * sum(group.padded_numel for unit in units for group in unit.trained)
    kept, found = 0, []
    for unit in units:
        kept += sum(group.padded_numel for group in unit.trained)
        if kept <= keep:
            found.append(UnitTiers(unit.name, weights, Tier.DEVICE))
    return tuple(found)


def describe_tiers(rests: Sequence[UnitTiers]) -> str:
    """One line: how many units rest where."""
    parts = []
    for tier in Tier:
        weights = sum(rest.weights is tier for rest in rests)
        states = sum(rest.states is tier for rest in rests)
        if weights or states:
            parts.append(f"{tier.value}: weights of {weights} units, states of {states}")
    return "; ".join(parts)
