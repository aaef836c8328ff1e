"""What an engine reports about its steps: where their time went, and the links between hosts."""

from __future__ import annotations

from .. import report
from ..comm.measure import line_of
from ..optim.sharded import ShardedOptimizer
from ..planner.plan import Plan
from ..sharding.runtime import Runtime
from .explain_updates import explain_updates


def lines_about_steps(runtime: Runtime, optimizer: ShardedOptimizer | None) -> list[str]:
    """Return where this rank's steps went since the second one."""
    settings = runtime.settings
    comm = runtime.comm
    advice = report.Advice(
        settings.ahead_numel,
        settings.window_numel,
        max((unit.gathered_numel for unit in runtime.units), default=0),
        comm.reads_in_place,
    )
    found = report.where_steps_went(comm.meter, advice)
    found += report.what_moved(report.links_of(runtime.comm_ctx.tiers, comm.meter))
    if optimizer is None:
        return found
    found += explain_updates(optimizer)
    for policy in optimizer.policies:
        found += policy.explain()
    return found


def lines_about_network(runtime: Runtime, plan: Plan) -> list[str]:
    """Return a line for each link between hosts that steps use."""
    comm = runtime.comm
    links = report.network_links(plan, comm.meter, line_of(comm), runtime.comm_ctx)
    return [link.explain() for link in links]
