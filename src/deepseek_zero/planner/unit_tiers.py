"""Assign a memory to the weights and states of each unit, fastest memory first.

States that are moved most often are placed first: a sharded weight is read three times a step and
written once, a moment is read and written once. Among those, the states of the first units are
placed first, because backward computes their gradients last and the next forward needs their
weights first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..base.errors import OutOfMemoryError
from ..base.quantities import format_bytes
from ..tiers.tier import Tier
from .memory import STATES, group_bytes
from .plan_settings import PlanSettings, UnitTiers
from .units import UnitPlan, trained_groups

WEIGHTS = STATES[:1]
OTHERS = STATES[1:]


@dataclass(frozen=True)
class PlacementSettings:
    """The settings from which memories are chosen for states, if the configuration allows it.

    Attributes:
        device: The bytes of the device for one rank; None for the free bytes, divided by the ranks
            of a host.
        host: The bytes of host memory for one rank; None for the free bytes.
        disk: The bytes of the disk for one rank; None for the free bytes.
        ratio: The fraction of the states that `offload_optimizer` moves.
        undo_bytes: The size in bytes of the log that undoes updates made in backward.
        chooses_weights: Whether to choose the memory of sharded weights.
        chooses_states: Whether to choose the memory of moments, gradients and main weights.
        path: The directory on the disk.
    """

    chooses_weights: bool = False
    chooses_states: bool = False
    device: int | None = None
    host: int | None = None
    disk: int | None = None
    path: Path | None = None
    ratio: float = 1.0
    undo_bytes: int = 0


@dataclass(frozen=True)
class TierChoices:
    """The memories allowed for weights and states, fastest first.

    With one entry there is no choice.

    Attributes:
        weights: The memories allowed for sharded weights.
        states: The memories allowed for moments, gradients and main weights.
    """

    weights: tuple[Tier, ...]
    states: tuple[Tier, ...]

    @classmethod
    def of(
        cls, settings: PlanSettings, placement: PlacementSettings, device: torch.device
    ) -> TierChoices:
        """Return the memories that a configuration allows for weights and states.

        On a CPU, host memory is the memory of the device, so it is a choice only if it has a
        budget.

        Args:
            settings: The ZeRO stage, dtypes, sizes and memories of the run.
            placement: The configured budgets, and whether weights and states may be placed freely.
            device: The device on which the ranks train.
        """
        tiers = [Tier.DEVICE]
        tiers += [Tier.HOST] if placement.host is not None or device.type != "cpu" else []
        tiers += [Tier.NVME] if placement.path is not None else []
        states = (
            tuple(tiers)
            if placement.chooses_states and settings.stage > 0
            else (settings.state_tier,)
        )
        weights = (
            tuple(tiers)
            if placement.chooses_weights and settings.stage == 3
            else (settings.weight_tier,)
        )
        return cls(weights, states)

    @property
    def are_open(self) -> bool:
        """Whether a memory has to be chosen for weights or states."""
        return len(self.weights) > 1 or len(self.states) > 1


def assign_tiers(
    units: Mapping[Tier, Sequence[UnitPlan]],
    choices: TierChoices,
    budgets: Mapping[Tier, int],
    moments: int,
) -> tuple[UnitTiers, ...]:
    """Assign a memory to the weights and states of every unit.

    Args:
        units: For each memory, the units planned as if that memory held all their states.
        choices: The memories that are allowed for weights and for states.
        budgets: The bytes of each memory for one rank.
        moments: The number of moments for each element.

    Returns:
        The memory of the weights and of the states of each unit.

    Raises:
        OutOfMemoryError: The units do not fit.
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
        rest = [f"{format_bytes(left[tier])} are left on {tier.value}" for tier in tiers]
        raise OutOfMemoryError(
            f"{' and '.join(states)} of unit '{units[tiers[0]][number].name}' need "
            f"{format_bytes(needed)} and fit nowhere: {', '.join(rest)}.",
            'device "auto" uses memory_budget, or else the free memory; nothing has been '
            "allocated.",
            "raise memory_budget, set an nvme_path, or use more ranks.",
        )

    weights = [put(number, WEIGHTS, choices.weights) for number in range(count)]
    states = [put(number, OTHERS, choices.states) for number in range(count)]
    names = [unit.name for unit in next(iter(units.values()))]
    return tuple(UnitTiers(*each) for each in zip(names, weights, states, strict=True))


def split_by_ratio(units: Sequence[UnitPlan], weights: Tier, ratio: float) -> tuple[UnitTiers, ...]:
    """Assign memories to units so that a given fraction of all elements is offloaded.

    This is DeepSpeed's Twin-Flow.

    Args:
        units: The units of the plan.
        weights: The memory of the weights.
        ratio: The fraction of elements whose states are offloaded.

    Returns:
        The memory of the weights and of the states of each unit.
    """
    keep = (1.0 - ratio) * sum(group.padded_numel for group in trained_groups(units))
    kept = 0
    found = []
    for unit in units:
        kept += sum(group.padded_numel for group in unit.trained)
        if kept <= keep:
            found.append(UnitTiers(unit.name, weights, Tier.DEVICE))
    return tuple(found)


def describe_tiers(units: Sequence[UnitTiers]) -> str:
    """Return one line of text with the number of units in each memory."""
    parts = []
    for tier in Tier:
        weights = sum(unit.weights is tier for unit in units)
        states = sum(unit.states is tier for unit in units)
        if weights or states:
            parts.append(f"{tier.value}: weights of {weights} units, states of {states}")
    return "; ".join(parts)
