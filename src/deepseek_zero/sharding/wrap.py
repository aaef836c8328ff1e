"""Wraps a model: converts it into units of flat buffers, one unit at a time.

The peak of memory is therefore the model plus one unit. The ranks first compare what they are about
to shard, then take rank 0's values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from ..base.expanded import copy_into
from ..base.progress import LongWork
from ..comm.collectives import Comm, scatter
from ..planner.plan import Plan
from ..planner.pool_estimate import scratch_numel
from ..planner.row_of_group import predivide_of
from ..planner.units import GroupKey
from ..tiers.tier import Tiers
from .comm_context import CommContext
from .grad_reduction import GradReduction
from .group_build import build_group
from .message import Pool
from .model_changes import ModelRules, compare_ranks
from .param_group import GroupParts, ParamGroup
from .runtime import Runtime
from .unit import Unit
from .weight_gather import WeightGather

# Gives a model on the meta device its values, and yields each module that has received them.
Materialise = Callable[[nn.Module, Comm, torch.device], Iterator[nn.Module]]
MakeParts = Callable[[Plan, Comm, CommContext], GroupParts]


def plain_parts(plan: Plan, comm: Comm, comm_ctx: CommContext) -> GroupParts:
    """Return functions that create the default objects for gathering and reducing.

    Args:
        plan: The plan of the model; not used, because extensions read it.
        comm: The communicator of all ranks; not used.
        comm_ctx: The communicator of the shard group; not used.
    """
    return GroupParts(lambda group, _: WeightGather(group), GradReduction)


def wrap_model(
    model: nn.Module,
    plan: Plan,
    comm: Comm,
    tiers: Tiers | None = None,
    make_parts: MakeParts = plain_parts,
    rules: ModelRules = ModelRules(),  # noqa: B008  # frozen
    materialise: Materialise | None = None,
) -> Runtime:
    """Shard a model in place as planned, and register its hooks.

    Args:
        model: The model to shard, with equal parameters on every rank.
        plan: The plan by which the model is sharded.
        comm: The communicator of all ranks, with the groups of ranks of the mesh.
        tiers: The memories that the plan uses in addition to the training device.
        make_parts: A function that returns the functions that create the objects for gathering and
            reducing.
            Collective: every rank calls it.
        rules: The behavior that the calling API chooses.
        materialise: Gives a model on the meta device its values; None if it has values.

    Returns:
        The runtime of the model, through which the engine and the optimizer use it.

    Raises:
        ModelMismatchError: Ranks differ in the model or the settings.

    Note:
        Collective: every rank must call it with the same model and settings.
    """
    device = plan.mesh.device
    compare_ranks(model, plan, comm)
    tiers = tiers or Tiers()
    pool = Pool(device, comm, tiers.budget, scratch_numel(plan.units, device))
    settings = plan.settings
    divisor = (plan.mesh.reduce_size if settings.mean else 1.0) / predivide_of(
        settings, plan.mesh.reduce_size
    )
    comm_ctx = CommContext.over(comm, pool, settings.bucket_numel, divisor, tiers)
    parts = make_parts(plan, comm, comm_ctx)
    comm_ctx = replace(comm_ctx, route=parts.route)
    contexts = {1: comm_ctx}
    wanted = {_sharers(group.key) for unit in plan.units for group in unit.groups}
    for neighbours in _of_all_ranks(wanted, comm.whole):
        sharers = comm.whole.split(plan.mesh.outer_groups(neighbours), f"tp{neighbours}")
        contexts[neighbours] = comm_ctx.with_outer(sharers, divisor)
    params = dict(model.named_parameters())
    modules = dict(model.named_modules(remove_duplicate=False))
    built: dict[int, list[ParamGroup]] = {}
    with LongWork("building the engine", plan.numel, "parameters") as work:
        for number in _as_they_get_values(model, plan, params, comm, materialise):
            built[number] = [
                build_group(group, params, contexts[_sharers(group.key)], parts)
                for group in plan.units[number].groups
            ]
            work.advance(sum(group.layout.numel for group in plan.units[number].groups))
    units = list[Unit]()
    for number, unit in enumerate(plan.units):
        module = modules[unit.name] if number else model
        units.append(Unit(unit.name, module, built[number], number, is_tile=unit.is_tile))
    pool.clear()  # drop the buffers in which units were packed
    _place_buffers(model, comm, device)
    return Runtime(model, units, comm_ctx, plan, rules)


def _sharers(key: GroupKey | None) -> int:
    """Return how many ranks along "tp" add up gradients of a group, this one included."""
    return max(1, len(key.sharers)) if key is not None else 1


def _of_all_ranks(wanted: Collection[int], world: Comm) -> list[int]:
    """Return the numbers of sharers above 1 on any rank, sorted. Every rank must call it.

    Ranks may hold pieces of the model that differ in these numbers.
    """
    if world.size == 1:
        return []
    everyone = world.all_gather_text(json.dumps(sorted(wanted)), "who shares parameters")
    return sorted({neighbours for text in everyone for neighbours in json.loads(text)} - {1})


def _as_they_get_values(
    model: nn.Module,
    plan: Plan,
    params: Mapping[str, nn.Parameter],
    comm: Comm,
    materialise: Materialise | None,
) -> Iterator[int]:
    """Yield the number of each unit as soon as all its parameters have values."""
    lacking = {
        number: {
            id(params[name])
            for group in unit.groups
            for name in group.names
            if params[name].is_meta
        }
        for number, unit in enumerate(plan.units)
    }
    yield from (number for number, missing in lacking.items() if not missing)
    if not any(lacking.values()):
        return
    assert materialise is not None, "nothing gives the model its values"
    for module in materialise(model, comm, plan.mesh.device):
        here = {id(param) for param in module.parameters(recurse=False)}
        for number, missing in lacking.items():
            if missing & here:
                missing -= here
                if not missing:
                    yield number


def _place_buffers(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Move buffers (running statistics, masks) to the device, with rank 0's values.

    Every rank keeps them whole. Sparse buffers are not copied, because the number of their elements
    may differ between ranks.
    """
    for name, buffer in model.named_buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)
        if comm.size > 1 and buffer.numel() and buffer.layout is torch.strided:
            flat = buffer.detach().reshape(-1).contiguous().clone()
            scatter(comm, [flat] * comm.size, flat, f"buffer {name}")
            copy_into(buffer.data, flat.view(buffer.shape))
