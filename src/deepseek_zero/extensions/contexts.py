"""Contexts of groups whose gradients are also summed over replicas (replicas.py)."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace

from ..comm.collectives import Comm
from ..planner.plan import Plan
from ..planner.units import GroupPlan
from ..sharding.comm_context import CommContext


def with_replicas(comm_ctx: CommContext, comm: Comm, divisor: float) -> CommContext:
    """Return a copy of a context in which gradients are also summed over replicas.

    Args:
        comm_ctx: The context of the ranks over which states are sharded.
        comm: The communicator of the replicas: the ranks with the same slices.
        divisor: The divisor of the inner and outer sum together.
    """
    # The division happens once, in the first sum and before rounding.
    inner, outer = (divisor, 1.0) if comm_ctx.comm.size > 1 else (1.0, divisor)
    others = CommContext(comm, comm_ctx.pool, comm_ctx.bucket_numel, outer, comm_ctx.tiers)
    return replace(comm_ctx, divisor=inner, outer=others)


def contexts_of_sharers(plan: Plan, comm: Comm, comm_ctx: CommContext) -> dict[int, CommContext]:
    """Return the contexts of groups whose parameters are shared along "tp", by sharers.

    Args:
        plan: The plan of the model.
        comm: The communicator of all ranks, which has the groups of ranks of the mesh.
        comm_ctx: The context of the ranks over which states are sharded.

    Note:
        Collective: every rank must call it.
    """
    found = dict[int, CommContext]()
    wanted = set(map(sharers_of, plan.groups))
    for number in _of_all_ranks(wanted, comm.whole):
        sharers = comm.whole.split(plan.mesh.outer_groups(number), f"tp{number}")
        found[number] = with_replicas(comm_ctx, sharers, comm_ctx.divisor)
    return found


def sharers_of(planned: GroupPlan) -> int:
    """Return how many ranks along "tp" add up gradients of a group, this one included."""
    return max(1, len(planned.key.sharers)) if planned.key is not None else 1


def _of_all_ranks(wanted: Collection[int], world: Comm) -> list[int]:
    """Return the numbers of sharers above 1 on any rank, sorted. Every rank must call it.

    Ranks may hold pieces of the model that differ in these numbers.
    """
    if world.size == 1:
        return []
    everyone = world.all_gather_text(json.dumps(sorted(wanted)), "who shares parameters")
    return sorted({number for text in everyone for number in json.loads(text)} - {1})
