"""Chooses the extensions of one group from its plan."""

from __future__ import annotations

from functools import partial

from ..comm.collectives import Comm
from ..planner.extras import feedback_of, second_copy_of
from ..planner.plan import Plan
from ..planner.spec import S
from ..sharding.buffer import CommContext
from ..sharding.grad_reduction import GradReduction
from ..sharding.group import Group
from ..sharding.param_group import GroupParts
from ..sharding.weight_gather import WeightGather
from ..tiers.tier import Tier
from .delayed_update import kept_gradients_of
from .error_feedback import ErrorFeedback
from .replicas import SumOverReplicas
from .secondary_copy import SecondaryCopy
from .shared_weight import SharedWeight
from .weight_differences import WeightDifferences


def group_parts(plan: Plan, comm: Comm, comm_ctx: CommContext) -> GroupParts:
    """Return the parts of the groups of a plan. Collective.

    Args:
        plan: The plan of the model.
        comm: The world's communicator, laid out on its mesh.
        comm_ctx: The context of the ranks that share slices.
    """
    inner = None
    few = plan.settings.secondary_ranks
    if 1 < few < plan.mesh.shard_size:
        ranks = comm.whole.split(plan.mesh.inner_groups(few), "inner")
        pool, tiers = comm_ctx.pool, comm_ctx.tiers
        inner = CommContext(ranks, pool, tiers=tiers, gather_kind="inner_gather")
    return GroupParts(partial(weight_gather_of, inner), reduction_of, kept_gradients_of)


def weight_gather_of(inner: CommContext | None, group: Group, what: str) -> WeightGather:
    """Return how a group's weight is gathered. Collective.

    Args:
        inner: The context of the ranks among which second copies are cut; None without any.
        group: The group.
        what: The name of the weight, for messages.
    """
    plan = group.plan
    if plan.weight_is_independent:
        return WeightDifferences(group)
    if second_copy_of(plan) is not None:
        assert inner is not None
        return SecondaryCopy(group, inner)
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
