"""What a group's states and an optimizer's moments take, in bytes; report/measure.py finds what is
held.

    bytes = sum over groups and states of numel(placement) x itemsize, or the length of the codes
    that they rest as

A whole plan's bytes, with what the pool lends and a step works in, are `Plan.bytes_by_state`
(plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.memory import PAGE
from ..precision.compact import storage_dtype
from ..tiers.host import HostPiece
from ..tiers.tier import Tier
from .extras import feedback_of, late_gradient_of, momenta_codec_of, second_copy_of
from .spec import ShardPlan, Spec
from .units import GroupPlan

STATES = ("weight", "grad", "master", "moments")
COUNTER_BYTES = 4  # torch keeps steps in fp32 scalars


# -- states


def spec_bytes(spec: Spec | None, padded_numel: int, ranks: int) -> int:
    """Bytes one rank holds of one state."""
    return 0 if spec is None else spec.resting.nbytes(spec.numel(padded_numel, ranks))


def _rows(plan: ShardPlan, moments_per_element: int) -> list[tuple[str, Spec | None, int]]:
    """Return the states that have memory of their own: name, spec, and how often it is there."""
    moments = plan.moments and replace(
        plan.moments, dtype=storage_dtype(plan.moments_format, plan.moments.dtype)
    )
    return [
        ("weight", plan.weight, 1),
        ("grad", plan.grad, 1),
        ("grad", late_gradient_of(plan), 1),
        ("master", None if plan.master_is_weight else plan.master, 1),
        ("moments", moments, moments_per_element),
    ]


def host_pieces(group: GroupPlan, moments_per_element: int) -> list[HostPiece]:
    """Return what one rank reserves of host memory for a group, state by state.

    The training device copies weights and gradients; masters only where weights follow them by
    differences.
    """
    found: list[HostPiece] = []
    for state, spec, count in _rows(group.plan, moments_per_element):
        if spec is None or spec.tier is not Tier.HOST:
            continue
        nbytes = -(-spec_bytes(spec, group.padded_numel, group.ranks) // PAGE) * PAGE
        is_copied = state in ("weight", "grad") or (
            state == "master" and group.plan.weight_is_independent
        )
        found += [HostPiece(nbytes, is_copied)] * (count if nbytes else 0)
    return found


def group_bytes(
    group: GroupPlan, moments_per_element: int, states: Sequence[str] = STATES
) -> dict[str, int]:
    """Return the bytes one rank holds of one group, by state; a master that is the weight's own
    storage counts once, as weight.

    Offloaded states count under their memory ("host", "nvme"), in whole pages; a second copy of the
    weight as "secondary", with the weight; what codes leave out of gradients as "errors", with the
    gradient.
    """
    plan = group.plan
    found = dict.fromkeys(STATES, 0)
    for state, spec, count in _rows(plan, moments_per_element):
        if state not in states:
            continue
        nbytes = spec_bytes(spec, group.padded_numel, group.ranks)
        if spec is None or spec.tier is Tier.DEVICE:
            found[state] += nbytes * count
        else:
            found[spec.tier.value] = (
                found.get(spec.tier.value, 0) + -(-nbytes // PAGE) * PAGE * count
            )
    copy = second_copy_of(plan)
    if copy is not None and "weight" in states:
        found["secondary"] = spec_bytes(copy, group.padded_numel, group.secondary_ranks)
    feedback = feedback_of(plan)
    if feedback is not None and "grad" in states:
        found["errors"] = feedback.nbytes(group.errors_numel)
    if momenta_codec_of(plan) is not None and "grad" in states:
        found["errors"] = group.exchange_bytes
    return found


def total_bytes(groups: Sequence[GroupPlan], moments_per_element: int = 2) -> dict[str, int]:
    """Bytes one rank holds of all groups, by state: the plan multiplied out, small tensors left
    aside.
    """
    total = dict.fromkeys(STATES, 0)
    for group in groups:
        for state, count in group_bytes(group, moments_per_element).items():
            total[state] = total.get(state, 0) + count
    return total


@dataclass(frozen=True)
class StateCounts:
    """The state that an optimizer keeps for a shard of n elements: per_element * n fp32 values and
    some scalars.

    options: hyper-parameters that add values per element where they are set.
    """

    per_element: int
    counters: int = 0
    options: Mapping[str, int] = field(default_factory=dict)

    def count(self, group: Mapping[str, Any]) -> int:
        """Values per element under one parameter group's hyper-parameters."""
        return self.per_element + sum(
            count for option, count in self.options.items() if group.get(option)
        )

    def bytes_of(self, numel: int, group: Mapping[str, Any]) -> int:
        """Bytes for one piece under one parameter group's hyper-parameters."""
        return numel * self.count(group) * torch.float32.itemsize + self.counters * COUNTER_BYTES


_ADAM = StateCounts(2, 1, {"amsgrad": 1})
MOMENTS: dict[str, StateCounts] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "OneBitAdam": _ADAM,
    "NAdam": StateCounts(2, 2),  # step and the product of its momentum schedule
    "RAdam": StateCounts(2, 1),
    "Adamax": StateCounts(2, 1),
    "Adadelta": StateCounts(2, 1),
    "Adagrad": StateCounts(1, 1),
    "RMSprop": StateCounts(1, 1, {"momentum": 1, "centered": 1}),
    "Rprop": StateCounts(2, 1),
    "ASGD": StateCounts(1, 3),
    "SGD": StateCounts(0, 0, {"momentum": 1}),
    "Lion": StateCounts(1),
    "Lamb": StateCounts(2, 1),
}
MOMENT_OPTIONS = frozenset(option for row in MOMENTS.values() for option in row.options)
MUON = {True: StateCounts(1), False: StateCounts(2, 1)}  # by its groups' `use_muon`


def is_known(optimizer: str) -> bool:
    """Return whether the states of an optimizer class are known, and not taken for those of
    Adam.
    """
    return optimizer in MOMENTS or optimizer == "Muon"


def moments_for(optimizer: str, group: Mapping[str, Any]) -> StateCounts:
    """The row of an optimizer class; a class we do not know is taken for an Adam."""
    return (
        MUON[bool(group.get("use_muon"))] if optimizer == "Muon" else MOMENTS.get(optimizer, _ADAM)
    )


# -- the seeds' arithmetic

# Bytes per parameter that stay whole on every rank, of 16: weight 2, gradient 2, master and two
# moments 12.
WHOLE_BYTES = {0: 16, 1: 4, 2: 2, 3: 0}


def mixed_precision_adam_bytes(params: int, ranks: int = 1, stage: int = 0) -> int:
    """The seeds' arithmetic: 2 B weight + 2 B gradient + 12 B (fp32 master, two moments) a
    parameter, sharded by stage.

    7e9 parameters on one rank: 112 GB.  At 64 ranks stages 1, 2, 3 divide that by 3.82, 7.21 and
    64; 4 and 8 are the limits for infinitely many ranks, where what stays whole (4 or 2 of 16
    bytes) is all that is left.
    """
    whole = WHOLE_BYTES[stage]
    return whole * params + (16 - whole) * params // ranks
