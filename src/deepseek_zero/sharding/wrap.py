"""Wraps a model: converts it into units of flat buffers, one unit at a time.

The peak of memory is therefore the model plus one unit. All ranks take rank 0's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..base.expanded import copy_into
from ..base.progress import LongWork
from ..comm.collectives import Comm, scatter
from ..planner.plan import Plan
from ..planner.pool_estimate import scratch_numel
from ..planner.row_of_group import predivide_of
from ..tiers.tier import Tiers, copy_engine_for
from .comm_context import CommContext
from .group_build import build_group
from .param_group import GroupParts, ParamGroup
from .pool import Pool
from .runtime import Runtime
from .unit import Unit

# Yields the number of each unit whose parameters have values.
ReadyUnits = Callable[[nn.Module, Plan, Comm], Iterable[int]]
MakeParts = Callable[[Plan, Comm, CommContext], GroupParts]


def wrap_model(
    model: nn.Module,
    plan: Plan,
    comm: Comm,
    tiers: Tiers,
    make_parts: MakeParts,
    ready_units: ReadyUnits,
) -> Runtime:
    """Shard a model in place as planned, and register its hooks.

    Args:
        model: The model to shard, with the same names and shapes on every rank.
        plan: The plan by which the model is sharded.
        comm: The communicator of all ranks, with the groups of ranks of the mesh.
        tiers: The memories that the plan uses in addition to the training device.
        make_parts: Returns the functions that create the objects for gathering and reducing.
        ready_units: Yields the number of each unit once, when its parameters have values.

    Returns:
        The runtime of the model, through which the engine and the optimizer use it.

    Note:
        Collective: every rank must call it with the same model and settings.
    """
    device = plan.mesh.device
    pool = Pool(device, comm, scratch_numel(plan.units, device), tiers.budget)
    settings = plan.settings
    divisor = (plan.mesh.reduce_size if settings.mean else 1.0) / predivide_of(
        settings, plan.mesh.reduce_size
    )
    comm_ctx = CommContext(
        comm.shard,
        pool,
        settings.bucket_numel,
        divisor,
        tiers,
        copy_engine=copy_engine_for(device),
    )
    parts = make_parts(plan, comm, comm_ctx)
    params = dict(model.named_parameters())
    modules = dict(model.named_modules(remove_duplicate=False))
    built: dict[int, list[ParamGroup]] = {}
    with LongWork("building the engine", plan.numel, "parameters") as work:
        for number in ready_units(model, plan, comm):
            planned = plan.units[number]
            built[number] = [
                build_group(group, params, parts.context_of(group), parts)
                for group in planned.groups
            ]
            work.advance(sum(group.layout.numel for group in planned.groups))
    units = list[Unit]()
    for number, planned in enumerate(plan.units):
        module = modules[planned.name] if number else model
        units.append(Unit(planned, module, built[number], number))
    pool.clear()  # drop the buffers in which units were packed
    _place_buffers(model, comm, device)
    return Runtime(model, units, parts.comm_ctx, plan)


def _place_buffers(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Move buffers (running statistics, masks) to the device, with rank 0's values.

    Every rank keeps them whole. Sparse buffers are not copied, because the number of their elements
    may differ between ranks.
    """
    for name, buffer in model.named_buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)
        if comm.size > 1 and buffer.numel() and buffer.layout is torch.strided:
            # Send bytes, because NCCL does not send every dtype, for example int16.
            flat = buffer.detach().reshape(-1).contiguous().clone().view(torch.uint8)
            scatter(comm, [flat] * comm.size, flat, f"buffer {name}")
            copy_into(buffer.data, flat.view(buffer.dtype).view(buffer.shape))
