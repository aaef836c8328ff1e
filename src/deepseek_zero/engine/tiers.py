"""Which memories an engine's states rest in, and whether they are large enough: asked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..activations.recompute import RecomputeSettings
from ..base.device import free_device_bytes
from ..base.log import log_once
from ..comm.agreement import run_on_all_ranks
from ..comm.collectives import Comm
from ..comm.context import ranks_of_this_host
from ..planner.memory import UnitFacts, moments_for, step_of_units, total_bytes, units_of_model
from ..planner.pool_estimate import buffer_bytes, pool_buffers
from ..planner.spec import PlanSettings
from ..planner.unit_tiers import TierChoices, assign_tiers, describe_tiers, split_by_ratio
from ..tiers.budget import NO_LIMIT, DeviceBudget
from ..tiers.disk import Disk, DiskSettings
from ..tiers.host import HostMemory, free_host_bytes
from ..tiers.tier import Memory, Tier, Tiers

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME, "auto": Tier.DEVICE}
WORTH_FILLING = 0.6  # of what is free: activations, and whatever else runs, need the rest


@dataclass(frozen=True)
class PlacementSettings:
    """What is left open.  device, host, disk: bytes of one rank; None: what is free, shared by the ranks of a host.

    ratio: share of the states that goes where `offload_optimizer` says.  undo_bytes: of the device, for what undoes
    updates ahead of their step.
    """

    chooses_weights: bool = False
    chooses_states: bool = False
    device: int | None = None
    host: int | None = None
    disk: int | None = None
    path: Path | None = None
    ratio: float = 1.0
    undo_bytes: int = 0


def placement_settings_of(config: Config) -> PlacementSettings:
    zero, budget = config.zero_optimization, config.memory_budget
    path = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
    return PlacementSettings(
        chooses_weights=zero.offload_param.device == "auto",
        chooses_states=zero.offload_optimizer.device == "auto",
        device=budget.device,
        host=budget.host,
        disk=budget.disk,
        path=Path(path) if path else None,
        ratio=zero.offload_optimizer.ratio,
        undo_bytes=zero.offload_optimizer.undo_bytes if updates_ahead(config) else 0,
    )


def updates_ahead(config: Config) -> bool:
    """Whether some units are updated in backward, ahead of their step."""
    offload = config.zero_optimization.offload_optimizer
    return offload.super_offload or offload.delayed_update_after is not None


def with_places(
    settings: PlanSettings,
    wish: PlacementSettings,
    model: nn.Module,
    comm: Comm,
    optimizer: str | None,
    device: torch.device,
) -> PlanSettings:
    """The plan with a place for every unit where the configuration leaves that open.  Collective; logs the choice."""
    choices = _choices(settings, wish, device)
    if len(choices.weights) > 1 or len(choices.states) > 1:
        units = {
            tier: units_of_model(model, replace(settings, weight_tier=tier, state_tier=tier), comm.size)
            for tier in {*choices.weights, *choices.states}
        }
        moments = moments_for(optimizer, {}).per_element if optimizer is not None else 0
        working = _working_bytes(units, settings, comm, optimizer, device) + wish.undo_bytes
        budgets = _budgets(wish, comm, working, device)
        rests = run_on_all_ranks(comm, "placing states", lambda: assign_tiers(units, choices, budgets, moments))
        log_once(f"placement: {describe_tiers(rests)}")
        return replace(settings, unit_tiers=rests)
    if wish.ratio < 1.0 and settings.state_tier is not Tier.DEVICE:
        units_now = units_of_model(model, settings, comm.size)
        return replace(settings, unit_tiers=split_by_ratio(units_now, settings.weight_tier, wish.ratio))
    return settings


def _choices(settings: PlanSettings, wish: PlacementSettings, device: torch.device) -> TierChoices:
    """On a CPU the host's memory is the device's, so it is a place of its own only where it has a budget."""
    tiers = [Tier.DEVICE]
    tiers += [Tier.HOST] if wish.host is not None or device.type != "cpu" else []
    tiers += [Tier.NVME] if wish.path is not None else []
    return TierChoices(
        tuple(tiers) if wish.chooses_weights and settings.stage == 3 else (settings.weight_tier,),
        tuple(tiers) if wish.chooses_states and settings.stage > 0 else (settings.state_tier,),
    )


def _budgets(wish: PlacementSettings, comm: Comm, working_bytes: int, device: torch.device) -> dict[Tier, int]:
    """Bytes of one rank for each memory; the least of what ranks have counts for all.  Collective."""
    sharers = ranks_of_this_host()
    memory = int(WORTH_FILLING * free_host_bytes()) // sharers
    near = memory if (free := free_device_bytes(device)) is None else int(WORTH_FILLING * free)
    disk = Disk.free_bytes(wish.path) // sharers if wish.path is not None else 0
    mine = [
        (near if wish.device is None else wish.device) - working_bytes,
        memory if wish.host is None else wish.host,
        disk if wish.disk is None else wish.disk,
    ]
    least = comm.all_gather_rows(torch.tensor(mine), "room for states").amin(dim=0)
    return dict(zip((Tier.DEVICE, Tier.HOST, Tier.NVME), map(int, least), strict=True))


def _working_bytes(
    units: Mapping[Tier, list[UnitFacts]],
    settings: PlanSettings,
    comm: Comm,
    optimizer: str | None,
    device: torch.device,
) -> int:
    """What the schedule lends and a step works in, where as much as possible rests elsewhere."""
    slowest = units[max(units, key=list(Tier).index)]
    lent = pool_buffers(slowest, settings, device=device, in_place=comm.reads_in_place)
    step = replace(step_of_units(slowest, comm.rank, optimizer or "SGD", 1 << 20), casts_grads=True)  # a step may clip
    return buffer_bytes(lent) + step.scratch_bytes


def tiers_of(config: Config, settings: PlanSettings, comm: Comm, device: torch.device, chunk_numel: int) -> Tiers:
    """The memories that a plan names.  Collective: where one rank's disk refuses, every rank raises."""
    zero, memories = config.zero_optimization, dict[Tier, Memory]()
    wanted = {settings.weight_tier, settings.state_tier}
    wanted |= {tier for rest in settings.unit_tiers for tier in (rest.weights, rest.states)}
    if Tier.HOST in wanted:
        asks = any(
            section.pin_memory for section in (zero.offload_optimizer, zero.offload_param) if section.device != "none"
        )
        memories[Tier.HOST] = HostMemory(pinned=asks and device.type == "cuda")
    if Tier.NVME in wanted:
        path = Path(zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path or "")
        threads = DiskSettings(config.aio.queue_depth, config.aio.block_size)
        memories[Tier.NVME] = run_on_all_ranks(comm, "opening nvme_path", lambda: Disk(path, threads))
    for memory in memories.values():
        memory.traffic.clock = comm.meter.clock
    return Tiers(memories, chunk_numel, DeviceBudget(settings.device_bytes))


def recompute_settings_of(config: Config) -> RecomputeSettings:
    """Where the inputs of checkpoints are parked; the plain settings where nothing is said of it."""
    section, plain = config.activation_checkpointing, RecomputeSettings()
    tier = Tier.DEVICE if section.contiguous_memory_optimization else None
    if section.device != "none" or section.cpu_checkpointing:
        tier = TIERS[section.device if section.device != "none" else "cpu"]
    is_disk = tier is Tier.NVME
    return RecomputeSettings(
        tier,
        Path(section.nvme_path or "") if is_disk else None,
        DiskSettings(config.aio.queue_depth, config.aio.block_size) if is_disk else plain.disk,
        section.number_checkpoints,
        section.profile,
    )


def admit(tiers: Tiers, model: nn.Module, settings: PlanSettings, comm: Comm, optimizer: str | None) -> None:
    """Raise on every rank where a memory is too small for what the plan puts there.  Collective."""
    if not tiers.memories:
        return
    needed = resting_bytes(model, settings, comm.size, optimizer)

    def ask() -> None:
        for tier, memory in tiers.memories.items():
            memory.check_room(needed[tier], ranks_of_this_host())

    run_on_all_ranks(comm, "asking for room", ask)


def resting_bytes(model: nn.Module, settings: PlanSettings, ranks: int, optimizer: str | None) -> dict[Tier, int]:
    """Bytes of one rank outside the training device, from the plan."""
    moments = moments_for(optimizer, {}).per_element if optimizer is not None else 0
    groups = [group for unit in units_of_model(model, settings, ranks) for group in unit.groups]
    found = total_bytes(groups, moments)
    return {tier: found.get(tier.value, 0) for tier in (Tier.HOST, Tier.NVME)}


def device_bytes_of(config: Config) -> int:
    """What states and buffers may take of the training device."""
    return NO_LIMIT if config.memory_budget.device is None else config.memory_budget.device
