"""ZeRO as data: four kinds of state, each with a placement, a dtype and a tier.

            Z0   Z1   Z2   Z3
 weight      R    R    R    S
 grad        P    P    S    S      (Z0 is reduced to R, Z1 to this rank's slice of P)
 master      R    S    S    S
 moments     R    S    S    S

A stage chooses a column; tiny parameters (`persistent`) use column Z2 at stage 3; frozen ones have a weight row only.
The plan is printed (`explain`), estimated (report/estimate.py multiplies it out) and saved with every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ..precision.policy import Policy
from ..tiers.tier import Tier
from .placement import P, Placement, R, S


@dataclass(frozen=True)
class Spec:
    """How one state of one group of parameters is kept."""

    placement: Placement
    dtype: torch.dtype
    tier: Tier = Tier.DEVICE

    def numel(self, padded_numel: int, ranks: int) -> int:
        """Elements of a flat buffer of `padded_numel` that one rank holds."""
        return padded_numel // ranks if self.placement is S else padded_numel

    def __str__(self) -> str:
        return f"{self.placement.value} {str(self.dtype).removeprefix('torch.')} {self.tier.value}"


@dataclass(frozen=True)
class ShardPlan:
    """The row of one group of parameters.  `grad`, `master`, `moments` are None for frozen parameters.

    master_is_weight: fp32 training, where the master is the weight's own storage (its slice at stages 1 and 2).  The
    moments have the dtype the optimizer works in; the master may be stored otherwise (`master_is_split`).
    """

    weight: Spec
    grad: Spec | None = None
    master: Spec | None = None
    moments: Spec | None = None
    master_is_weight: bool = False

    @property
    def master_is_split(self) -> bool:
        """Whether the master is the live bf16 weight and, in its own storage, 16 more bits (precision/split.py)."""
        return self.master is not None and self.master.dtype == torch.int16

    def lifted(self) -> ShardPlan:
        """The same row with an fp32 weight and gradient, and a whole fp32 master.  Moments stay where they are."""
        grad = replace(self.grad, dtype=torch.float32) if self.grad is not None else None
        return replace(self, weight=replace(self.weight, dtype=torch.float32), grad=grad, master=self.moments)

    def rows(self) -> dict[str, str]:
        """State -> its row in words, "-" for none."""
        found = {"weight": self.weight, "grad": self.grad, "master": self.master, "moments": self.moments}
        words = {state: str(spec) if spec is not None else "-" for state, spec in found.items()}
        if self.master_is_split:
            words["master"] = words["master"].replace("int16", "weight+int16")
        return words


COLUMNS: dict[int, tuple[Placement, Placement, Placement]] = {
    #   weight grad master and moments
    0: (R, P, R),
    1: (R, P, S),
    2: (R, S, S),
    3: (S, S, S),
}


@dataclass(frozen=True)
class PlanSettings:
    """What the sharding layer needs to know, free of any configuration file.  Sizes count elements.

    persistence_numel: parameters up to this size stay gathered (per parameter).  persistence_total_numel: their sum.
    window_numel: gathered elements kept alive (stage3_max_live_parameters). keep_numel: a gathered unit stays if it
    is used again within this many elements (stage3_max_reuse_distance). ahead_numel: gathered before they are needed.
    bucket_numel: elements per reduction message. overlap: reduce while backward goes on. mean: divide sums by the
    ranks.  tunes: sizes that nobody stated, which may grow while that shortens waiting (tuning.py).  weight_tier:
    where sharded weights rest.  state_tier: where moments, masters of their own and gradient shards do.
    """

    stage: int = 3
    policy: Policy = field(default_factory=Policy)
    accumulation: int = 1
    persistence_numel: int = 100_000
    persistence_total_numel: int = 2**63 - 1
    window_numel: int = 1_000_000_000
    keep_numel: int = 1_000_000_000
    ahead_numel: int = 50_000_000
    bucket_numel: int = 500_000_000
    overlap: bool = True
    mean: bool = True
    prescale: bool = False
    predivide: float = 1.0
    deterministic: bool = False
    transport: str = "fastest"
    weight_tier: Tier = Tier.DEVICE
    state_tier: Tier = Tier.DEVICE
    unused_is_error: bool = False
    tunes: tuple[str, ...] = ()
    unit_names: tuple[str, ...] = ()
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()


def predivide_of(settings: PlanSettings, ranks: int) -> float:
    """What partial gradients are divided by before they travel; the rest of the mean's division follows the sum."""
    return float(ranks) if settings.prescale else settings.predivide


def plan_for(settings: PlanSettings, dtype: torch.dtype, *, trainable: bool, persistent: bool, ranks: int) -> ShardPlan:
    """The plan of parameters of one dtype.  dtype: what they were built with.

    In a world of one a gradient shard is the whole gradient, so it is accumulated where it lies (P) at every stage,
    unless it rests in another memory.  A master that is the weight itself rests where the weight does.
    """
    weight_place, grad_place, state_place = COLUMNS[2 if persistent and settings.stage == 3 else settings.stage]
    weight_tier = settings.weight_tier if weight_place is S else Tier.DEVICE
    weight = Spec(weight_place, settings.policy.weight_dtype(dtype), weight_tier)
    if not trainable:
        return ShardPlan(weight)
    policy = settings.policy
    tier = settings.state_tier
    moments = Spec(state_place, policy.master_dtype(weight.dtype), tier)
    master = replace(moments, dtype=policy.stored_dtype(weight.dtype))
    is_weight = master.dtype == weight.dtype
    if is_weight:
        master = replace(master, tier=weight.tier)
    in_place = grad_place is P or (ranks == 1 and tier is Tier.DEVICE)
    grad_dtype = policy.grad_dtype(weight.dtype, settings.accumulation)
    grad = Spec(P, grad_dtype) if in_place else Spec(S, grad_dtype, tier)
    return ShardPlan(weight, grad, master, moments, master_is_weight=is_weight)
