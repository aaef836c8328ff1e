"""Chooses the extensions of one group from its plan."""

from __future__ import annotations

from functools import partial

from .. import extensions
from ..comm.collectives import Comm
from ..planner.extras import can_be_shared, feedback_of, late_gradient_of, second_copy_of
from ..planner.plan import Plan
from ..sharding.comm_context import CommContext, Route
from ..sharding.grad_reduction import GradReduction
from ..sharding.grad_sum import GradSum
from ..sharding.gradient import Gradient
from ..sharding.group import Group
from ..sharding.param_group import GroupParts
from ..sharding.weight_gather import WeightGather


def group_parts(plan: Plan, comm: Comm, comm_ctx: CommContext) -> GroupParts:
    """Return the parts of the groups of a plan. Every rank must call it.

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
    route = Route()
    per_host = plan.settings.ranks_per_host or 1
    if plan.mesh.near_size(per_host) > 1:
        route = extensions.TwoHops.over(comm.whole, *plan.mesh.host_groups(per_host))
    return GroupParts(partial(weight_gather_of, inner), reduction_of, kept_gradients_of, route)


def weight_gather_of(inner: CommContext | None, group: Group, what: str) -> WeightGather:
    """Return how a group's weight is gathered. Every rank must call it.

    Args:
        inner: The context of the ranks among which second copies are cut; None without any.
        group: The group.
        what: The name of the weight, for messages.
    """
    plan = group.plan
    if plan.weight_is_independent:
        return extensions.WeightDifferences(group)
    weight = plan.weight
    gather = WeightGather(group)
    if weight.stored_as is not None:
        gather = extensions.CodedWeight(group)
    if second_copy_of(plan) is not None:
        assert inner is not None
        return extensions.SecondaryCopy(group, inner, gather)
    if can_be_shared(plan, group.comm_ctx.pool.device):
        comm = group.comm_ctx.comm
        memory = comm.in_place.allocate(group.layout.padded_numel, weight.dtype, what)
        if memory is not None:
            return extensions.SharedWeight(group, memory)
    return gather


def reduction_of(group: Group) -> GradReduction:
    """Return how a group's gradients are summed."""
    if group.comm_ctx.outer is not None:
        reduction: GradReduction = extensions.SumOverReplicas(group)
    else:
        reduction = GradReduction(group)
    if feedback_of(group.plan) is not None:
        return extensions.ErrorFeedback(reduction)
    return reduction


def kept_gradients_of(gradient: Gradient) -> dict[str, GradSum]:
    """Return the gradients that are kept in addition to a group's own, by name."""
    if late_gradient_of(gradient.group.plan) is None:
        return {}
    return {extensions.DelayedGradient.name: extensions.DelayedGradient(gradient)}
