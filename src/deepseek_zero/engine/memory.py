"""The memory of an engine: predicted from its plan, and measured on its storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from .. import parallel, report
from ..optim.sharded import ShardedOptimizer
from ..planner.plan import Plan
from ..report.measure import OTHER, MemoryReport, bytes_of, live_storages, moments_of
from ..sharding.runtime import Runtime
from ..tiers.tier import Storage

if TYPE_CHECKING:  # as in engine.py
    from ..pipeline import Pipeline


def plan_of(
    runtime: Runtime,
    optimizer: ShardedOptimizer | None,
    pipeline: Pipeline | None = None,
    tokens: int | None = None,
) -> Plan:
    """Return the current plan of an engine.

    Args:
        runtime: The runtime of the model.
        optimizer: The optimizer, if there is one.
        pipeline: The pipeline, if there is one; it has the message sizes of the last step.
        tokens: The tokens of a micro-batch in the last step.
    """
    update = optimizer.plan if optimizer is not None else None
    found = replace(runtime.plan, update=update)
    seen = pipeline.seen_bytes() if pipeline is not None else None
    if found.pipeline is not None and seen is not None:
        found = replace(found, pipeline=found.pipeline.seen(*seen))
    if found.tensor is not None and tokens is not None:
        found = replace(found, tensor=replace(found.tensor, tokens=tokens))
    if found.sequence is not None and tokens is not None:
        found = replace(found, sequence=replace(found.sequence, tokens=tokens))
    return found


def memory_report(
    runtime: Runtime,
    optimizer: ShardedOptimizer | None,
    parked: Sequence[Storage] = (),
    pipeline: Pipeline | None = None,
) -> MemoryReport:
    """Return the bytes on this rank by state. Local.

    Args:
        runtime: The runtime of the model.
        optimizer: The optimizer, if there is one.
        parked: Offloaded activations, which are no state and are not counted.
        pipeline: The pipeline, if there is one; its messages have storage of their own.
    """
    resting = [storage.memory for storage in [*offloaded_of(runtime, optimizer), *parked]]
    seen = {tensor.untyped_storage().data_ptr() for tensor in resting}
    measured = {
        state: bytes_of([tensor for tensor in tensors if tensor is not None], seen)
        for state, tensors in _held(runtime, optimizer, pipeline).items()
    }
    for group in runtime.groups:
        measured |= {
            tier.value: memory.reserved_bytes
            for tier, memory in group.comm_ctx.tiers.memories.items()
        }
    everything = live_storages(runtime.comm_ctx.pool.device.type)
    measured[OTHER] = sum(count for address, count in everything.items() if address not in seen)
    return MemoryReport(plan_of(runtime, optimizer, pipeline).bytes_by_state(), measured)


def traced(
    runtime: Runtime,
    optimizer: ShardedOptimizer | None,
    parked: Callable[[], Sequence[Storage]],
    pipeline: Pipeline | None = None,
) -> report.MemoryTrace:
    """Return a trace of the memory of an engine.

    Args:
        runtime: The runtime of the model.
        optimizer: The optimizer, if there is one.
        parked: Returns the offloaded activations, which are not part of a state.
        pipeline: The pipeline, if there is one.
    """

    def held() -> dict[str, list[Tensor]]:
        found = {
            state: [each for each in tensors if each is not None]
            for state, tensors in _held(runtime, optimizer, pipeline).items()
        }
        gathered = [
            group.unsharded.memory for group in runtime.groups if group.unsharded is not None
        ]
        offloaded = resting(offloaded_of(runtime, optimizer))
        return found | {"gathered": gathered, "offloaded": offloaded, "parked": resting(parked())}

    def resting(storages: Sequence[Storage]) -> list[Tensor]:
        return [storage.memory for storage in storages if not storage.is_offloaded]

    return report.MemoryTrace(held, lambda: runtime.comm.meter.clock.phase)


def offloaded_of(runtime: Runtime, optimizer: ShardedOptimizer | None) -> list[Storage]:
    """Return the storages of an engine's offloaded states.

    Args:
        runtime: The runtime of the model.
        optimizer: The optimizer, if there is one.
    """
    found = list(optimizer.moments.offloaded()) if optimizer is not None else []
    return found + [storage for group in runtime.groups for storage in group.offloaded()]


def _held(
    runtime: Runtime, optimizer: ShardedOptimizer | None, pipeline: Pipeline | None
) -> dict[str, list[Tensor | None]]:
    """Return the tensors of an engine by state.

    A storage that belongs to two states counts for the first.
    """
    groups = runtime.groups
    gradients = [buffer for group in groups for buffer in group.gradient.buffers()]
    masters = [group.master for group in groups]
    pools = {id(group.comm_ctx.pool): group.comm_ctx.pool for group in groups}.values()
    lent: list[Tensor | None] = [tensor for pool in pools for tensor in pool.idle()]
    errors: list[Tensor | None] = [
        tensor for group in groups for tensor in group.gradient.reduction.tensors()
    ]
    copies: list[Tensor | None] = [
        buffer.memory for group in groups for buffer in group.weight_gather.buffers()
    ]
    return {
        "weight": [
            tensor for group in groups for tensor in (group.weight.memory, group.placeholder)
        ],
        **({"secondary": copies} if copies else {}),
        "grad": [buffer.memory for buffer in gradients],
        **({"errors": errors} if errors else {}),
        "master": [master.buffer.memory for master in masters if master is not None],
        "moments": _moments(optimizer) if optimizer is not None else [],
        "buffers": [*lent, *(optimizer.scratch.kept.values() if optimizer is not None else [])],
        "module_buffers": _registered(runtime.model),
        "boundaries": [
            *(_tensor_buffers(runtime.model) if runtime.plan.tensor is not None else []),
            *(pipeline.executor.buffers() if pipeline is not None else []),
        ],
    }


def _tensor_buffers(model: nn.Module) -> list[Tensor | None]:
    """Return the buffers in which shared layers form sums; they share one group."""
    layers = (each for each in model.modules() if isinstance(each, parallel.Layer))
    axes = (each.axis for each in layers if isinstance(each.axis, parallel.TensorAxis))
    axis = next(axes, None)
    return [*axis.group.buffers()] if axis is not None else []


def _moments(optimizer: ShardedOptimizer) -> list[Tensor | None]:
    """Yield the moments that the optimizer holds, without placeholders of stored ones."""
    held = moments_of(cast("Any", optimizer.inner.state))
    shown = [tensor for tensor in held if not optimizer.scratch.is_placeholder(tensor)]
    return [*shown, *optimizer.moments.on_device()]


def _registered(model: nn.Module) -> list[Tensor | None]:
    return list(model.buffers())
