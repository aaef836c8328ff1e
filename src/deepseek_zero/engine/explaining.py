"""Reports of an engine about the time of its steps and the links between hosts."""

from __future__ import annotations

from .. import report
from ..comm.measure import line_of
from ..optim.sharded import ShardedOptimizer
from ..planner.plan import Plan
from ..sharding.runtime import Runtime
from .explain_updates import explain_updates
from .parts import Parts


def describe(parts: Parts) -> list[str]:
    """Return lines of text about the settings, units and schedules of an engine.

    The configuration key `dump_state` logs these lines. Tests compare the lines of different
    configurations to find keys without effect.

    Args:
        parts: The parts of the engine.

    Returns:
        One string per line, without line ends.
    """
    runtime = parts.runtime
    units = [f"{unit.name}: {[group.plan for group in unit.groups]}" for unit in runtime.units]
    inner = parts.optimizer.inner if parts.optimizer is not None else None
    return [
        str(parts.plan_settings),
        str(parts.step_settings),
        f"loss scale {parts.scaler}",
        f"optimizer {type(inner).__name__} {inner.defaults if inner is not None else ''}",
        f"schedule {parts.schedule}",
        f"recomputation {parts.recompute.settings if parts.recompute is not None else None}",
        f"deterministic algorithms: {parts.determinism is not None}",
        f"sparse attention {parts.sparse_attention}",
        *units,
        str(runtime.schedule),
    ]


def lines_about_steps(runtime: Runtime, optimizer: ShardedOptimizer | None) -> list[str]:
    """Return lines of text about the time of this rank's steps, for `engine.explain`.

    The lines report the time spent on computation and on waiting for each kind of transfer. They
    also report the bytes moved between the device and other memories, the implementation of the
    optimizer update, and the state of each update policy. The first step is not measured, because
    it contains the warm-up. Until two steps have been taken, one line states this instead of times.

    Args:
        runtime: The runtime of the wrapped model, whose meter has measured the steps.
        optimizer: The optimizer whose updates and update policies are described; None omits their
            lines.

    Returns:
        One string per line, without line ends.
    """
    settings = runtime.settings
    comm = runtime.comm
    advice = report.Advice(
        settings.ahead_numel,
        settings.window_numel,
        max((unit.planned.gathered_numel for unit in runtime.units), default=0),
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
    """Return one line of text for each kind of network link that the steps use.

    The kinds are the links between hosts and those inside a host, in this order. Each line states
    how many bytes this rank sends per step, and the mean number of bytes per second over a whole
    step. If quantization reduces the bytes, the line also states their number without it. The line
    about links between hosts compares the rate with their bandwidth, if it is known.

    Args:
        runtime: The runtime of the wrapped model, whose meter has counted the transfers.
        plan: The current plan, which contains the expected bytes of each collective.

    Returns:
        One string per line. A kind over which this rank sends nothing has no line. The list is
        empty until two steps have been taken, and after `Meter.reset` until the next step ends.
    """
    comm = runtime.comm
    links = report.network_links(plan, comm.meter, line_of(comm), runtime.comm_ctx)
    return [link.explain() for link in links]
