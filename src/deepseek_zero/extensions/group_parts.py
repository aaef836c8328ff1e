"""Chooses the extensions of one group from its plan."""

from __future__ import annotations

from ..planner.extras import feedback_of, second_copy_of
from ..planner.spec import S
from ..sharding.grad_reduction import GradReduction
from ..sharding.group import Group
from ..sharding.param_group import GroupParts
from ..sharding.weight_gather import WeightGather
from ..tiers.tier import Tier
from .error_feedback import ErrorFeedback
from .replicas import SumOverReplicas
from .secondary_copy import SecondaryCopy
from .shared_weight import SharedWeight
from .weight_differences import WeightDifferences


def weight_gather_of(group: Group, what: str) -> WeightGather:
    """Return how a group's weight is gathered. Collective."""
    plan = group.plan
    if plan.weight_is_independent:
        return WeightDifferences(group)
    if second_copy_of(plan) is not None:
        return SecondaryCopy(group)
    weight = plan.weight
    if weight.placement is S and weight.tier is Tier.DEVICE and weight.wire is None:
        comm = group.comm_ctx.comm
        memory = comm.symmetric_memory(group.layout.padded_numel, weight.dtype, what)
        if memory is not None:
            return SharedWeight(group, memory)
    return WeightGather(group)


def reduction_of(group: Group) -> GradReduction:
    """Return how a group's gradients are summed. Local."""
    plain = SumOverReplicas if group.comm_ctx.outer is not None else GradReduction
    reduction = plain(group)
    return reduction if feedback_of(group.plan) is None else ErrorFeedback(reduction)


GROUP_PARTS = GroupParts(weight_gather_of, reduction_of)
