"""The engine's memory, predicted from its plan and measured from live storages."""

from __future__ import annotations

from torch import Tensor

from ..optim.sharded import ShardedOptimizer
from ..report.estimate import MOMENTS_PER_ELEMENT, facts_of, total_bytes
from ..report.measure import MemoryReport, bytes_of, live_storages, moments_of
from ..sharding.runtime import Runtime


def memory_report(runtime: Runtime, optimizer: ShardedOptimizer | None) -> MemoryReport:
    """Bytes on this rank by state.  Local."""
    facts = [facts_of(group.plan, group.layout) for group in runtime.groups]
    per_element = MOMENTS_PER_ELEMENT.get(type(optimizer.inner).__name__, 2) if optimizer is not None else 0
    predicted = total_bytes(facts, per_element)
    pool = runtime.root.groups[0].route.pool if runtime.root.groups else runtime.units[-1].groups[0].route.pool
    predicted["buffers"] = pool.allocated_bytes
    seen: set[int] = set()
    groups = runtime.groups
    measured = {
        "weight": bytes_of([group.weight.storage for group in groups], seen),
        "grad": bytes_of(
            [group.gradient.buffer.storage for group in groups if group.gradient.buffer is not None], seen
        ),
        "master": bytes_of([group.master.storage for group in groups if group.master is not None], seen),
        "moments": bytes_of(_moments(optimizer), seen),
        "buffers": bytes_of([tensor for idle in pool._idle.values() for tensor in idle], seen),
    }
    everything = live_storages(runtime.device.type)
    measured["other"] = sum(count for address, count in everything.items() if address not in seen)
    return MemoryReport(predicted, measured)


def _moments(optimizer: ShardedOptimizer | None) -> list[Tensor]:
    return [] if optimizer is None else moments_of(optimizer.state)
