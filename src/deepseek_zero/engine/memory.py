"""The memory of an engine: predicted from its plan, and measured on its storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import parallel, report
from ..optim.sharded import ShardedOptimizer
from ..report.measure import OTHER, MemoryReport, bytes_of, live_storages, moments_of
from ..sharding.runtime import Runtime
from ..tiers.tier import Storage
from .parts import Parts, plan_of


def memory_report(parts: Parts) -> MemoryReport:
    """Return the planned and the measured bytes of each state on this rank.

    Offloaded activations are not counted. Pipeline messages are counted by their own storages.

    Args:
        parts: The parts of the engine whose storages are measured.

    Returns:
        The planned and measured bytes by kind of state and memory.
    """
    resting = [*offloaded_of(parts.runtime, parts.optimizer), *_parked(parts)]
    seen = {storage.memory.untyped_storage().data_ptr() for storage in resting}
    measured = {state: bytes_of(tensors, seen) for state, tensors in _held(parts).items()}
    for group in parts.runtime.groups:
        measured |= {
            tier.value: memory.reserved_bytes
            for tier, memory in group.comm_ctx.tiers.memories.items()
        }
    everything = live_storages(parts.runtime.comm_ctx.pool.device.type)
    measured[OTHER] = sum(count for address, count in everything.items() if address not in seen)
    plan = plan_of(parts.runtime, parts.optimizer, parts.pipeline)
    return MemoryReport(plan.bytes_by_state(), measured)


def _parked(parts: Parts) -> list[Storage]:
    """Return the offloaded activations."""
    return parts.recompute.offloaded() if parts.recompute is not None else []


def traced(parts: Parts) -> report.MemoryTrace:
    """Return a context that records the bytes of each state after every operator.

    Args:
        parts: The parts of the engine whose storages are measured.

    Returns:
        A context that yields a `report.MemoryTrace`, which is filled while the block runs.
    """
    runtime = parts.runtime

    def held() -> dict[str, list[Tensor]]:
        """Return the tensors by state, with gathered weights and loaded storages."""
        unsharded = [group.unsharded for group in runtime.groups]
        return _held(parts) | {
            "gathered": [buffer.memory for buffer in unsharded if buffer is not None],
            "offloaded": loaded(offloaded_of(runtime, parts.optimizer)),
            "parked": loaded(_parked(parts)),
        }

    def loaded(storages: Sequence[Storage]) -> list[Tensor]:
        """Return the memory of offloaded storages that are on the training device now."""
        return [storage.memory for storage in storages if not storage.is_offloaded]

    return report.MemoryTrace(held, lambda: runtime.comm.meter.clock.phase)


def offloaded_of(runtime: Runtime, optimizer: ShardedOptimizer | None) -> list[Storage]:
    """Return the storages of the weights, gradients and optimizer states that are offloaded.

    Args:
        runtime: The runtime of the wrapped model, with its units and parameter groups.
        optimizer: The engine's sharded optimizer; None if the engine has none.

    Returns:
        The storages in host memory or on a disk. Storages on the training device are not included.
    """
    found = list(optimizer.moments.offloaded()) if optimizer is not None else []
    return found + [storage for group in runtime.groups for storage in group.offloaded()]


def _held(parts: Parts) -> dict[str, list[Tensor]]:
    """Return the tensors of an engine by state.

    A storage that belongs to two states counts for the first. Sparse buffers have no storage.
    """
    runtime = parts.runtime
    optimizer = parts.optimizer
    held: dict[str, list[Tensor | None]] = {
        "weight": [],
        "secondary": [],
        "grad": [],
        "errors": [],
        "master": [],
        "moments": [],
        "buffers": [],
        "module_buffers": list(runtime.model.buffers()),
        "boundaries": [],
    }
    pools = {}
    for group in runtime.groups:
        pools[id(group.comm_ctx.pool)] = group.comm_ctx.pool
        held["weight"] += (group.weight.memory, group.placeholder)
        held["secondary"] += (buffer.memory for buffer in group.weight_gather.buffers())
        held["grad"] += (buffer.memory for buffer in group.gradient.buffers())
        held["errors"] += group.gradient.reduction.tensors()
        if group.master is not None:
            held["master"].append(group.master.buffer.memory)
    for pool in pools.values():
        held["buffers"] += pool.idle()
    if optimizer is not None:
        scratch = optimizer.scratch
        held["buffers"] += scratch.kept.values()
        moments = moments_of(cast("Any", optimizer.inner.state))
        held["moments"] += (each for each in moments if not scratch.is_placeholder(each))
        held["moments"] += optimizer.moments.on_device()
    if runtime.plan.tensor is not None:
        held["boundaries"] += _tensor_buffers(runtime.model)
    if parts.pipeline is not None:
        held["boundaries"] += parts.pipeline.executor.buffers()
    for optional in ("secondary", "errors"):
        if not held[optional]:
            del held[optional]
    return {
        state: [each for each in tensors if each is not None and each.layout is torch.strided]
        for state, tensors in held.items()
    }


def _tensor_buffers(model: nn.Module) -> list[Tensor | None]:
    """Return the buffers in which shared layers form sums; they share one group."""
    for layer in model.modules():
        if isinstance(layer, parallel.Layer) and isinstance(layer.axis, parallel.TensorAxis):
            return [*layer.axis.group.buffers()]
    return []
