"""Turns a model into units on flat buffers, unit by unit, so that the peak is the model plus one
unit.

Collective: ranks first compare what they are about to shard, then take rank 0's values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from ..base.progress import LongWork
from ..comm.agreement import AllRanks, agree, agree_on, values_in
from ..comm.by_host import ByHost
from ..comm.collectives import Comm, scatter
from ..comm.context import ranks_of_this_host
from ..planner.plan import Plan
from ..planner.pool_estimate import scratch_numel
from ..planner.row_of_group import predivide_of
from ..planner.units import GroupKey
from ..tiers.budget import DeviceBudget
from ..tiers.disk import Disk, DiskSettings
from ..tiers.host import HostMemory
from ..tiers.tier import Tier, TierMemory, Tiers
from .buffer import CommContext, Pool
from .grad_reduction import GradReduction
from .group_build import build_group
from .init import materialise
from .param_group import GroupParts, ParamGroup
from .rules import ModelRules
from .runtime import Runtime
from .unit import Unit
from .weight_gather import WeightGather

MakeParts = Callable[[Plan, Comm, CommContext], GroupParts]


def plain_parts(plan: Plan, comm: Comm, comm_ctx: CommContext) -> GroupParts:
    """Return the parts of groups without extensions."""
    return GroupParts(lambda group, _: WeightGather(group), GradReduction)


def wrap_model(
    model: nn.Module,
    plan: Plan,
    comm: Comm,
    tiers: Tiers | None = None,
    make_parts: MakeParts = plain_parts,
    rules: ModelRules = ModelRules(),  # noqa: B008  # frozen
) -> Runtime:
    """Shard a model in place, as planned, and hook it. Collective: every rank passes the same
    model and settings.

    Args:
        model: The model, whole.
        plan: What to build.
        comm: The world's communicator, laid out on its mesh.
        tiers: The memories that the plan names beside the training device.
        make_parts: Returns the parts that extensions replace. Collective.
    """
    device = plan.mesh.device
    compare_ranks(model, plan, comm)
    tiers = tiers or Tiers()
    pool = Pool(
        device, comm, tiers.budget, scratch_numel(plan.units, device), plan.machine.spans_hosts
    )
    settings = plan.settings
    divisor = (plan.mesh.reduce_size if settings.mean else 1.0) / predivide_of(
        settings, plan.mesh.reduce_size
    )
    comm_ctx = CommContext.over(comm, pool, settings.bucket_numel, divisor, tiers)
    parts = make_parts(plan, comm, comm_ctx)
    per_host = settings.ranks_per_host or 1
    if plan.mesh.near_size(per_host) > 1:
        comm_ctx = replace(
            comm_ctx, hosts=ByHost.over(comm.whole, *plan.mesh.host_groups(per_host))
        )
    contexts = {1: comm_ctx}
    wanted = {_sharers(group.key) for unit in plan.units for group in unit.groups}
    for neighbours in _of_all_ranks(wanted, comm.whole):
        sharers = comm.whole.split(plan.mesh.outer_groups(neighbours), f"tp{neighbours}")
        contexts[neighbours] = comm_ctx.with_outer(sharers, divisor)
    params = dict(model.named_parameters())
    modules = dict(model.named_modules(remove_duplicate=False))
    built: dict[int, list[ParamGroup]] = {}
    with LongWork("building the engine", plan.numel, "parameters") as work:
        for number in _as_they_get_values(model, plan, params, comm):
            built[number] = [
                build_group(group, params, contexts[_sharers(group.key)], parts)
                for group in plan.units[number].groups
            ]
            work.advance(sum(group.layout.numel for group in plan.units[number].groups))
    units = [
        Unit(
            unit.name,
            modules[unit.name] if number else model,
            built[number],
            number,
            is_tile=unit.is_tile,
        )
        for number, unit in enumerate(plan.units)
    ]
    pool.clear()  # what units were packed in on their way to their slices
    _place_buffers(model, comm, device)
    return Runtime(model, units, comm_ctx, plan, rules)


def _sharers(key: GroupKey | None) -> int:
    """How many neighbours along "tp" have summands of a group's gradients, this rank among them."""
    return max(1, len(key.sharers)) if key is not None else 1


def _of_all_ranks(wanted: Collection[int], world: Comm) -> list[int]:
    """Return what any rank wants beyond its own, in one order: pieces of a model differ in it.
    Collective.
    """
    if world.size == 1:
        return []
    everyone = world.all_gather_text(json.dumps(sorted(wanted)), "who shares parameters")
    return sorted({neighbours for text in everyone for neighbours in json.loads(text)} - {1})


@dataclass(frozen=True)
class MemorySettings:
    """The memories beside the training device.  pins_host: page-lock host memory beside a GPU.
    path: of a disk.
    """

    pins_host: bool = False
    path: Path = Path()
    disk: DiskSettings = field(default_factory=DiskSettings)


def open_tiers(plan: Plan, settings: MemorySettings, comm: Comm, chunk_numel: int) -> Tiers:
    """Open the memories that a plan names.  Collective.

    Raises on every rank where one rank's disk refuses.
    """
    chosen = plan.settings
    memories = dict[Tier, TierMemory]()
    wanted = {chosen.weight_tier, chosen.state_tier}
    wanted |= {tier for unit in chosen.unit_tiers for tier in (unit.weights, unit.states)}
    if Tier.HOST in wanted:
        is_pinned = settings.pins_host and plan.mesh.device.type == "cuda"
        memories[Tier.HOST] = HostMemory(pinned=is_pinned, pieces=plan.host_pieces())
    if Tier.NVME in wanted:
        with AllRanks(comm, "opening nvme_path"):
            memories[Tier.NVME] = Disk(settings.path, settings.disk)
    for memory in memories.values():
        memory.traffic.clock = comm.meter.clock
    return Tiers(memories, chunk_numel, DeviceBudget(chosen.device_bytes))


def check_room(plan: Plan, tiers: Tiers, comm: Comm) -> None:
    """Raise on every rank where a memory is too small for what the plan puts there.  Collective."""
    if not tiers.memories:
        return
    needed = plan.bytes_by_tier()
    with AllRanks(comm, "asking for room"):
        for tier, memory in tiers.memories.items():
            memory.check_room(needed[tier], ranks_of_this_host())


def commit(tiers: Tiers, comm: Comm) -> None:
    """Give the memories of a plan their pages, after the model's own values are gone.
    Collective.
    """
    with AllRanks(comm, "reserving host memory"):
        for memory in tiers.memories.values():
            memory.commit(ranks_of_this_host())


def _as_they_get_values(
    model: nn.Module, plan: Plan, params: Mapping[str, nn.Parameter], comm: Comm
) -> Iterator[int]:
    """Numbers of units whose parameters all have values: of a model on the meta device, as soon as
    they have.
    """
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
    for module in materialise(model, comm, plan.mesh.device):
        here = {id(param) for param in module.parameters(recurse=False)}
        for number, missing in lacking.items():
            if missing & here:
                missing -= here
                if not missing:
                    yield number


def _place_buffers(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Buffers (running statistics, masks) stay whole on every rank; rank 0's values win."""
    for name, buffer in model.named_buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)
        if comm.size > 1 and buffer.numel():
            flat = buffer.detach().reshape(-1).contiguous().clone()
            scatter(comm, [flat] * comm.size, flat, f"buffer {name}")
            buffer.data.copy_(flat.view(buffer.shape))


def compare_ranks(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Raise on every rank if ranks differ in parameters (names, shapes, dtypes, order), buffers,
    units or settings.
    """
    why = (
        "Each rank holds a slice of the same flat buffers, so names, shapes, dtypes, order and "
        "settings must agree."
    )
    fix = "build the model and the configuration from the same arguments on every rank."
    agree_on(comm, values_in(plan.settings, "plan"), "what they are about to shard", why, fix)
    lines = [f"unit {unit.name}" for unit in plan.units]
    for name, param in model.named_parameters():
        lines.append(
            f"parameter {name} {tuple(param.shape)} {param.dtype} "
            f"requires_grad={param.requires_grad}"
        )
    lines += [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
        for name, buffer in model.named_buffers()
    ]
    agree(
        comm,
        lines,
        "what they are about to shard",
        why,
        fix,
    )
