"""What a plan will hold, in bytes, from the plan alone; report/measure.py finds what is held.

    bytes = sum over groups and states of numel(placement) x itemsize, plus what the pool lends (pool_estimate.py)

`resident_bytes` counts small tensors too: one element per group for the placeholder that parameters at rest expand (in
"weight"), and the optimizer's step counters (in "moments").  Nothing is allocated: a model on the meta device will do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.device import CPU
from ..base.memory import PAGE
from ..precision.compact import BLOCK, storage_dtype
from ..precision.split import scratch_numel
from ..tiers.tier import Tier
from .auto_wrap_policy import choose_units, full_precision_names, group_params, persistent_names
from .layout import LAYOUTS, FlatLayout, Slot
from .spec import PlanSettings, R, S, ShardPlan, Spec, plan_for

STATES = ("weight", "grad", "master", "moments")
COUNTER_BYTES = 4  # torch keeps steps in fp32 scalars


@dataclass(frozen=True)
class GroupFacts:
    """One group as the estimator sees it.  slots: where its parameters lie; may be left out where only sizes matter."""

    plan: ShardPlan
    padded_numel: int
    ranks: int
    slots: tuple[Slot, ...] = ()

    @classmethod
    def of(cls, plan: ShardPlan, layout: FlatLayout) -> GroupFacts:
        return cls(plan, layout.padded_numel, layout.ranks, layout.slots)

    @property
    def layout(self) -> FlatLayout:
        return FlatLayout(self.slots, self.padded_numel // self.ranks, self.ranks)

    def travel_dtype(self, settings: PlanSettings) -> torch.dtype:
        """What gradients of this group are sent in."""
        assert self.plan.grad is not None
        own = self.plan.weight.dtype if self.plan.grad.placement is S else self.plan.grad.dtype
        return settings.policy.reduce or own

    def piece_sizes(self, rank: int, tile_numel: int) -> list[int]:
        """Elements of each stretch of master that an optimizer of all its parameters works on: slots joined, in
        tiles.
        """
        whole, layout = self.plan.master is not None and self.plan.master.placement is R, self.layout
        runs = [(slot.start, slot.stop) if whole else layout.owned(slot, rank) for slot in self.slots]
        low = min((start for start, stop in runs if start < stop), default=0)
        high = max((stop for start, stop in runs if start < stop), default=0)
        return [end - start for start, end in layout.cuts(low, high, tile_numel)]


@dataclass(frozen=True)
class UnitFacts:
    """One unit as the estimator sees it."""

    name: str
    groups: tuple[GroupFacts, ...]

    @property
    def sharded(self) -> list[GroupFacts]:
        return [group for group in self.groups if group.plan.weight.placement is S]

    @property
    def trained(self) -> list[GroupFacts]:
        return [group for group in self.groups if group.plan.grad is not None]

    @property
    def gathered_numel(self) -> int:
        """Elements that a gather brings here; what the schedule is a function of."""
        return sum(group.padded_numel for group in self.sharded)


def units_of_model(
    model: nn.Module, settings: PlanSettings, ranks: int, granularity: str = "element"
) -> list[UnitFacts]:
    """The units and layouts that wrapping this model on so many ranks would make, from names, shapes and dtypes."""
    choices = choose_units(model, settings)
    persistent = persistent_names(choices, settings)
    full_precision = full_precision_names(model) if settings.policy.compute is not None else frozenset()
    units = []
    for choice in choices:
        groups = []
        for key, names in group_params(choice, persistent, full_precision).items():
            mine = settings.for_unit(choice.name or "root", full_precision=key.full_precision)
            plan = plan_for(mine, key.dtype, trainable=key.trainable, persistent=key.persistent, ranks=ranks)
            cut = granularity if plan.master is not None and plan.master.placement is not R else "element"
            shapes = [tuple(choice.params[name].shape) for name in names]
            groups.append(GroupFacts.of(plan, LAYOUTS[cut](names, shapes, ranks)))
        units.append(UnitFacts(choice.name or "root", tuple(groups)))
    return units


# -- states


def spec_bytes(spec: Spec | None, padded_numel: int, ranks: int) -> int:
    """Bytes one rank holds of one state."""
    return 0 if spec is None else spec.numel(padded_numel, ranks) * spec.dtype.itemsize


def group_bytes(facts: GroupFacts, moments_per_element: int, states: Sequence[str] = STATES) -> dict[str, int]:
    """Bytes one rank holds of one group, by state; a master that is the weight's own storage counts once, as weight.

    What rests in another memory counts there ("host", "nvme"), in whole pages.
    """
    plan, found = facts.plan, dict.fromkeys(STATES, 0)
    moments = plan.moments and replace(plan.moments, dtype=storage_dtype(plan.moments_format, plan.moments.dtype))
    rows = (
        ("weight", plan.weight, 1),
        ("grad", plan.grad, 1),
        ("grad", plan.delayed_grad, 1),
        ("master", None if plan.master_is_weight else plan.master, 1),
        ("moments", moments, moments_per_element),
    )
    for state, spec, count in rows:
        if state not in states:
            continue
        nbytes = spec_bytes(spec, facts.padded_numel, facts.ranks)
        if spec is None or spec.tier is Tier.DEVICE:
            found[state] += nbytes * count
        else:
            found[spec.tier.value] = found.get(spec.tier.value, 0) + -(-nbytes // PAGE) * PAGE * count
    return found


def total_bytes(groups: Sequence[GroupFacts], moments_per_element: int = 2) -> dict[str, int]:
    """Bytes one rank holds of all groups, by state: the plan multiplied out, small tensors left aside."""
    total = dict.fromkeys(STATES, 0)
    for facts in groups:
        for state, count in group_bytes(facts, moments_per_element).items():
            total[state] = total.get(state, 0) + count
    return total


@dataclass(frozen=True)
class Moments:
    """What an optimizer keeps for a piece of n elements: per_element * n fp32 values and some scalars.

    options: hyper-parameters that add values per element where they are set.
    """

    per_element: int
    counters: int = 0
    options: Mapping[str, int] = field(default_factory=dict)

    def count(self, group: Mapping[str, Any]) -> int:
        """Values per element under one parameter group's hyper-parameters."""
        return self.per_element + sum(count for option, count in self.options.items() if group.get(option))

    def bytes_of(self, numel: int, group: Mapping[str, Any]) -> int:
        """Bytes for one piece under one parameter group's hyper-parameters."""
        return numel * self.count(group) * torch.float32.itemsize + self.counters * COUNTER_BYTES


_ADAM = Moments(2, 1, {"amsgrad": 1})
MOMENTS: dict[str, Moments] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": Moments(2, 2),  # step and the product of its momentum schedule
    "RAdam": Moments(2, 1),
    "Adamax": Moments(2, 1),
    "Adadelta": Moments(2, 1),
    "Adagrad": Moments(1, 1),
    "RMSprop": Moments(1, 1, {"momentum": 1, "centered": 1}),
    "Rprop": Moments(2, 1),
    "ASGD": Moments(1, 3),
    "SGD": Moments(0, 0, {"momentum": 1}),
    "Lion": Moments(1),
    "Lamb": Moments(2, 1),
}
MUON = {True: Moments(1), False: Moments(2, 1)}  # by its groups' `use_muon`


def moments_for(optimizer: str, group: Mapping[str, Any]) -> Moments:
    """The row of an optimizer class; a class we do not know is taken for an Adam."""
    return MUON[bool(group.get("use_muon"))] if optimizer == "Muon" else MOMENTS.get(optimizer, _ADAM)


@dataclass(frozen=True)
class StepFacts:
    """An optimizer as the estimator sees it: for each parameter group its hyper-parameters and the sizes of its pieces.

    bundles: elements of what is updated together whatever else fits, in the order of units: in the step, and after it.

    casts_grads: gradients are cast, unscaled or clipped into a buffer of one tile before the optimizer reads them.
    joins_masters: so are split masters, with the help of a smaller buffer.  widens_masters: so are masters that are
    no more than a bf16 weight.  blocks: elements of pieces with 8-bit moments.
    resting: the groups whose moments rest elsewhere and of which this rank has pieces; those count 0 elements in
    `groups`.  undoes: pieces of each unit that may be updated ahead of its step, whose bytes before it are kept within
    `undo_budget`.
    """

    optimizer: str
    groups: Sequence[tuple[Mapping[str, Any], Sequence[int]]]
    bundles: Sequence[Sequence[int]]
    tile_numel: int
    casts_grads: bool
    joins_masters: bool = False
    home: torch.device = CPU
    external: Sequence[tuple[GroupFacts, Mapping[str, Any]]] = ()
    widens_masters: bool = False
    blocks: Sequence[tuple[Mapping[str, Any], int]] = ()
    undoes: Sequence[Sequence[tuple[ShardPlan, Mapping[str, Any], int]]] = ()
    undo_budget: int = 0

    @property
    def moments_bytes(self) -> int:
        """On the device: counters, and powers of 8-bit blocks, alone where the elements rest elsewhere."""
        row = partial(moments_for, self.optimizer)
        own = [row(options).bytes_of(numel, options) for options, sizes in self.groups for numel in sizes]
        powers = [row(options).count(options) * -(-numel // BLOCK) for options, numel in self.blocks]
        return sum(own) + sum(powers)

    @property
    def undo_bytes(self) -> int:
        """What updates ahead of their step are undone by: of the first units, as many as fit the budget."""
        total = 0
        for pieces in self.undoes:
            nbytes = sum(self._written_bytes(*piece) for piece in pieces)
            total += nbytes if total + nbytes <= self.undo_budget else 0
        return total

    def _written_bytes(self, plan: ShardPlan, options: Mapping[str, Any], numel: int) -> int:
        """What the update of one piece writes: weight, master and moments."""
        assert plan.master is not None and plan.moments is not None
        count = moments_for(self.optimizer, options).count(options)
        own = 0 if plan.master_is_weight else plan.master.dtype.itemsize
        moments = storage_dtype(plan.moments_format, plan.moments.dtype).itemsize * count
        powers = count * -(-numel // BLOCK) if plan.moments_format == "8bit" else 0
        return numel * (plan.weight.dtype.itemsize + own + moments) + powers

    def external_bytes(self) -> Counter[str]:
        """Moments in other memories, by tier: whole slices, in whole pages."""
        found = Counter[str]()
        for facts, options in self.external:
            found.update(group_bytes(facts, moments_for(self.optimizer, options).count(options), STATES[3:]))
        return found

    @property
    def scratch_bytes(self) -> int:
        """Buffers of the fullest tile, where a tile is as many pieces as fit, at least one."""
        fullest = 0
        for run in self.bundles:
            filled = 0
            for numel in run:
                filled = numel if filled + numel > self.tile_numel else filled + numel
                fullest = max(fullest, filled)
        narrow = [(facts, options) for facts, options in self.external if facts.plan.moments_format != "fp32"]
        widened = max((moments_for(self.optimizer, options).count(options) for _, options in narrow), default=0)
        elements = fullest * (self.casts_grads + (self.joins_masters or self.widens_masters) + widened)
        if self.joins_masters:
            elements += scratch_numel(self.home, fullest)
        tiers = {facts.plan.moments.tier for facts, _ in self.external if facts.plan.moments is not None}
        if self.joins_masters or self.widens_masters or narrow or Tier.NVME in tiers:
            elements += 1  # the NaN that stands for what is not here
        return elements * torch.float32.itemsize


def step_of_units(units: Sequence[UnitFacts], rank: int, optimizer: str, tile_numel: int, **options: Any) -> StepFacts:
    """An optimizer with one group of all trainable parameters, at granularity "element"."""
    pieces = [
        (group.plan, numel) for unit in units for group in unit.trained for numel in group.piece_sizes(rank, tile_numel)
    ]
    resting = [group for unit in units for group in unit.trained if group.plan.moments_external]
    resting = [group for group in resting if group.piece_sizes(rank, tile_numel)]
    return StepFacts(
        optimizer,
        [(options, [0 if plan.moments_external else numel for plan, numel in pieces])],
        [[numel for plan, numel in pieces if plan.can_defer_update is later] for later in (False, True)],
        tile_numel,
        casts_grads=any(grad_is_cast(plan) for plan, _ in pieces),
        joins_masters=any(plan.master_is_split for plan, _ in pieces),
        external=[(group, options) for group in resting],
        widens_masters=any(plan.master_is_rounded for plan, _ in pieces),
        blocks=[(options, numel) for plan, numel in pieces if plan.moments_format == "8bit"],
    )


def grad_is_cast(plan: ShardPlan) -> bool:
    """Whether a gradient must be cast before the optimizer can read it."""
    return plan.grad is not None and plan.moments is not None and plan.grad.dtype != plan.moments.dtype


def resident_bytes(units: Sequence[UnitFacts], step: StepFacts | None = None) -> dict[str, int]:
    """Bytes one rank holds between steps, by state, to the byte; what the schedule lends is pool_estimate.py's.

    An optimizer works on parameters, not on the padding between them, and keeps counters: its moments are summed by
    piece.
    """
    groups = [group for unit in units for group in unit.groups]
    total = total_bytes(groups, moments_per_element=0)
    total["weight"] += sum(group.plan.weight.dtype.itemsize for group in groups)  # the placeholders
    total["moments"] = step.moments_bytes if step is not None else 0
    for tier, nbytes in step.external_bytes().items() if step is not None else ():
        total[tier] = total.get(tier, 0) + nbytes
    return total


# -- the seeds' arithmetic

# Bytes per parameter that stay whole on every rank, of 16: weight 2, gradient 2, master and two moments 12.
WHOLE_BYTES = {0: 16, 1: 4, 2: 2, 3: 0}


def mixed_precision_adam_bytes(params: int, ranks: int = 1, stage: int = 0) -> int:
    """The seeds' arithmetic: 2 B weight + 2 B gradient + 12 B (fp32 master, two moments) a parameter, sharded by stage.

    7e9 parameters on one rank: 112 GB.  At 64 ranks stages 1, 2, 3 divide that by 3.82, 7.21 and 64; 4 and 8 are the
    limits for infinitely many ranks, where what stays whole (4 or 2 of 16 bytes) is all that is left.
    """
    whole = WHOLE_BYTES[stage]
    return whole * params + (16 - whole) * params // ranks
