"""Which memories an engine's states rest in, and whether they are large enough: asked before anything is allocated.

Called by assemble.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from ..comm.agreement import together
from ..comm.collectives import Comm
from ..config import Config
from ..report.estimate import moments_for, total_bytes, units_of_model
from ..sharding.plan import PlanSettings
from ..tiers.disk import Disk, DiskSettings
from ..tiers.host import HostMemory
from ..tiers.tier import Memory, Tier, Tiers

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


def tiers_of(config: Config, comm: Comm, device: torch.device, chunk_numel: int) -> Tiers:
    """The memories that a configuration names.  Collective: where one rank's disk refuses, every rank raises."""
    zero, memories = config.zero_optimization, dict[Tier, Memory]()
    wanted = {zero.offload_optimizer.device, zero.offload_param.device}
    if "cpu" in wanted:
        pinned = device.type != "cpu" and (zero.offload_optimizer.pin_memory or zero.offload_param.pin_memory)
        memories[Tier.HOST] = HostMemory(pinned=pinned)
    if "nvme" in wanted:
        place = zero.offload_optimizer if zero.offload_optimizer.device == "nvme" else zero.offload_param
        settings = DiskSettings(config.aio.queue_depth, config.aio.block_size)
        memories[Tier.NVME] = together(comm, "opening nvme_path", lambda: Disk(Path(place.nvme_path or ""), settings))
    return Tiers(memories, chunk_numel)


def admit(tiers: Tiers, model: nn.Module, settings: PlanSettings, comm: Comm, optimizer: str | None) -> None:
    """Raise on every rank where a memory is too small for what the plan puts there.  Collective."""
    if not tiers.memories:
        return
    needed = resting_bytes(model, settings, comm.size, optimizer)
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", comm.size))

    def ask() -> None:
        for tier, memory in tiers.memories.items():
            memory.admit(needed[tier], sharers)

    together(comm, "asking for room", ask)


def resting_bytes(model: nn.Module, settings: PlanSettings, ranks: int, optimizer: str | None) -> dict[Tier, int]:
    """Bytes of one rank outside the training device, from the plan."""
    moments = moments_for(optimizer, {}).per_element if optimizer is not None else 0
    groups = [group for unit in units_of_model(model, settings, ranks) for group in unit.groups]
    found = total_bytes(groups, moments)
    return {tier: found.get(tier.value, 0) for tier in (Tier.HOST, Tier.NVME)}
