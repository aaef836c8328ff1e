"""The bytes of a group's states and of an optimizer's moments.

    bytes = sum over groups and states of numel(placement) x itemsize, or the length of the codes

`Plan.bytes_by_state` (plan.py) adds the buffers of a whole plan. report/measure.py finds the bytes
that are in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.memory import PAGE
from ..precision.codecs import Cast
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
    """Return the bytes of one state on one rank.

    Args:
        spec: The placement, dtype and memory of the state; None counts as 0 bytes.
        padded_numel: The number of elements of the whole flat buffer, including padding.
        ranks: The number of ranks over which states are sharded.
    """
    if spec is None:
        return 0
    stored_as = spec.stored_as or Cast(spec.dtype)
    return stored_as.nbytes(spec.numel(padded_numel, ranks))


def _rows(plan: ShardPlan, moments_per_element: int) -> list[tuple[str, Spec | None, int]]:
    """Return the states with separate storage: name, spec, and number of copies."""
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


def host_pieces(
    group: GroupPlan, moments_per_element: int, *, is_weight_shared: bool = False
) -> list[HostPiece]:
    """Return the allocations in host memory that one rank makes for a group.

    The training device copies weights and gradients from and to it, and main weights only if
    weights are updated by quantized differences.

    Args:
        group: The plan of the parameter group.
        moments_per_element: The number of moments for each element.
        is_weight_shared: Whether the weight is in memory that all ranks of the host share, which is
            reserved in another way.
    """
    found: list[HostPiece] = []
    for state, spec, count in _rows(group.plan, moments_per_element):
        if spec is None or spec.tier is not Tier.HOST:
            continue
        if state == "weight" and is_weight_shared:
            continue
        nbytes = -(-spec_bytes(spec, group.padded_numel, group.ranks) // PAGE) * PAGE
        is_copied = state in ("weight", "grad") or (
            state == "master" and group.plan.weight_is_independent
        )
        found += [HostPiece(nbytes, is_copied)] * (count if nbytes else 0)
    return found


def group_bytes(
    group: GroupPlan, moments_per_element: int, states: Sequence[str] = STATES
) -> Counter[str]:
    """Return the bytes of one group on one rank, by state.

    A main weight that shares the storage of the weight counts once, as weight. Offloaded states
    count under their memory ("host", "nvme"), in whole pages. A second copy of the weight counts as
    "secondary", and the error feedback of quantized gradients as "errors".

    Args:
        group: The plan of the parameter group.
        moments_per_element: The number of moments for each element.
        states: The states to count; "secondary" counts with the weight, "errors" with the gradient.
    """
    plan = group.plan
    found = Counter(dict.fromkeys(STATES, 0))
    for state, spec, count in _rows(plan, moments_per_element):
        if state not in states:
            continue
        nbytes = spec_bytes(spec, group.padded_numel, group.ranks)
        if spec is None or spec.tier is Tier.DEVICE:
            found[state] += nbytes * count
        else:
            found[spec.tier.value] += -(-nbytes // PAGE) * PAGE * count
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
    """Return the bytes of all groups on one rank, by state, without small tensors.

    Args:
        groups: The planned parameter groups.
        moments_per_element: The number of moments for each element.
    """
    total = Counter(dict.fromkeys(STATES, 0))
    for group in groups:
        total.update(group_bytes(group, moments_per_element))
    return dict(total)


@dataclass(frozen=True)
class StateCounts:
    """The state that an optimizer keeps for a shard of n elements.

    Attributes:
        per_element: The number of fp32 values for each element.
        counters: The number of scalars, such as the update counter.
        options: The values per element that a hyper-parameter adds if it is set.
    """

    per_element: int
    counters: int = 0
    options: Mapping[str, int] = field(default_factory=dict)

    def count(self, group: Mapping[str, Any]) -> int:
        """Return the number of fp32 values per element that the optimizer keeps.

        Args:
            group: The hyper-parameters of the parameter group, which may add values.
        """
        return self.per_element + sum(
            count for option, count in self.options.items() if group.get(option)
        )

    def bytes_of(self, numel: int, group: Mapping[str, Any]) -> int:
        """Return the bytes of the states of one shard.

        Args:
            numel: The number of elements of the shard.
            group: The hyper-parameters of the shard's parameter group.
        """
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
MUON = {True: StateCounts(1), False: StateCounts(2, 1)}  # by `use_muon` of the parameter group


def is_known(optimizer: str) -> bool:
    """Return whether the number and sizes of an optimizer class's states are known.

    An unknown class is counted like Adam.
    """
    return optimizer in MOMENTS or optimizer == "Muon"


def moments_for(optimizer: str, group: Mapping[str, Any]) -> StateCounts:
    """Return how many values and scalars an optimizer class keeps as state.

    An unknown class counts as Adam.

    Args:
        optimizer: The name of the optimizer's class.
        group: The hyper-parameters of a parameter group.
    """
    return (
        MUON[bool(group.get("use_muon"))] if optimizer == "Muon" else MOMENTS.get(optimizer, _ADAM)
    )


# -- memory of mixed-precision Adam

# Bytes per parameter that are not sharded, of 16: weight 2, gradient 2, main weight and two moments
# 12
WHOLE_BYTES = {0: 16, 1: 4, 2: 2, 3: 0}


def mixed_precision_adam_bytes(params: int, ranks: int = 1, stage: int = 0) -> int:
    """Return the bytes of mixed-precision Adam on one rank.

    A parameter has 2 bytes of weight, 2 of gradient and 12 of fp32 main weight and moments, sharded
    by stage. For 7e9 parameters one rank needs 112 GB. On 64 ranks, stages 1, 2 and 3 divide that
    by 3.82, 7.21 and 64. For infinitely many ranks, the limits of stages 1 and 2 are 4 and 8.

    Args:
        params: The number of elements of all parameters.
        ranks: The number of ranks over which states are sharded.
        stage: The ZeRO stage, 0 to 3.
    """
    whole = WHOLE_BYTES[stage]
    return whole * params + (16 - whole) * params // ranks
