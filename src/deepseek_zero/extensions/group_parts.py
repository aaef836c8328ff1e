"""Chooses the extensions of one group from its plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from .. import extensions
from ..comm.by_host import ByHost
from ..comm.collectives import Comm
from ..planner.extras import can_be_shared, feedback_of, late_gradient_of, second_copy_of
from ..planner.plan import Plan
from ..planner.units import GroupPlan
from ..sharding.comm_context import CommContext, Route
from ..sharding.grad_reduction import GradReduction
from ..sharding.grad_sum import GradSum
from ..sharding.gradient import Gradient
from ..sharding.group import Group
from ..sharding.param_group import GroupParts, ParamGroup
from ..sharding.weight_gather import WeightGather
from .contexts import contexts_of_sharers, sharers_of, with_replicas
from .model_changes import lost_at_reshard


def group_parts(plan: Plan, comm: Comm, comm_ctx: CommContext) -> GroupParts:
    """Choose the classes that gather weights and reduce gradients in a run.

    Args:
        plan: The plan of the model, with the features that each parameter group uses.
        comm: The communicator of the world, which has the groups of ranks of the mesh.
        comm_ctx: The context of the ranks of the shard group.

    Returns:
        Functions that create these objects for one parameter group, and the route of messages:
        directly or within hosts first.

    Note:
        Collective: every rank must call it.
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
        route = extensions.TwoHops(ByHost.over(comm.whole, *plan.mesh.host_groups(per_host)))
    sharded = replace(comm_ctx, route=route)
    whole = sharded
    if comm.outer is not None:
        whole = with_replicas(sharded, comm.outer, comm_ctx.divisor)
    of_sharers = contexts_of_sharers(plan, comm, sharded)

    def context_of(planned: GroupPlan) -> CommContext:
        return of_sharers.get(sharers_of(planned), whole)

    return GroupParts(
        whole,
        context_of,
        partial(weight_gather_of, inner),
        reduction_of,
        kept_gradients_of,
        lost_at_reshard,
    )


def weight_gather_of(inner: CommContext | None, group: Group, what: str) -> WeightGather:
    """Create the object that all-gathers the weight of a parameter group.

    Args:
        inner: The context of the ranks over which the second copy of weights (hpZ of ZeRO++) is
            sharded; None without second copies.
        group: The parameter group, whose plan selects the class.
        what: The name of the weight, used in error messages.

    Returns:
        An instance of the class that the plan selects.

    Note:
        Collective: every rank must call it.
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


def reduction_of(group: ParamGroup) -> GradReduction:
    """Create the object that sums the gradients of a parameter group over the ranks.

    Args:
        group: The parameter group, whose plan selects the class.
    """
    has_feedback = feedback_of(group.plan) is not None
    if group.comm_ctx.outer is None:
        return extensions.ErrorFeedback(group) if has_feedback else GradReduction(group)
    kind = extensions.ReplicatedErrorFeedback if has_feedback else extensions.SumOverReplicas
    return kind(group)


def kept_gradients_of(gradient: Gradient) -> dict[str, GradSum]:
    """Create the buffers for gradients that a parameter group keeps after their step.

    Args:
        gradient: The gradient of the parameter group.

    Returns:
        The buffers by name, for example "delayed" for delayed updates; usually empty.
    """
    if late_gradient_of(gradient.group.plan) is None:
        return {}
    return {extensions.DelayedGradient.name: extensions.DelayedGradient(gradient)}
