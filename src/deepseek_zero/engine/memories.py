"""Open the memories outside the training device that a plan uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..comm.context import ranks_of_this_host
from ..planner.plan import Plan
from ..tiers.budget import DeviceBudget
from ..tiers.disk import Disk
from ..tiers.host import HostMemory
from ..tiers.tier import Tier, TierMemory, Tiers
from .settings import disk_settings_of, state_folder

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


def open_tiers(plan: Plan, config: Config, comm: Comm, chunk_numel: int) -> Tiers:
    """Open the host memory and the files to which a plan offloads states.

    Args:
        plan: The plan, which assigns each state to a memory.
        config: The run's configuration, from which the settings are read.
        comm: The communicator of the ranks that call this function.
        chunk_numel: The size of a transferred chunk in elements.

    Returns:
        The opened memories, from which states are allocated and through which they are transferred.

    Raises:
        StorageError: The disk of a rank cannot be used; raised on every rank.

    Note:
        Collective: every rank must call it.
    """
    chosen = plan.settings
    memories = dict[Tier, TierMemory]()
    wanted = {chosen.weight_tier, chosen.state_tier}
    wanted |= {tier for unit in chosen.unit_tiers for tier in (unit.weights, unit.states)}
    if Tier.HOST in wanted:
        zero = config.zero_optimization
        offloading = [
            each for each in (zero.offload_optimizer, zero.offload_param) if each.device != "none"
        ]
        is_pinned = plan.mesh.device.type == "cuda" and any(each.pin_memory for each in offloading)
        memories[Tier.HOST] = HostMemory(pinned=is_pinned, pieces=plan.host_pieces())
    if Tier.NVME in wanted:
        with AllRanks(comm, "opening nvme_path"):
            path = Path(state_folder(config) or "")
            memories[Tier.NVME] = Disk(path, disk_settings_of(config))
    for memory in memories.values():
        memory.traffic.clock = comm.meter.clock
    return Tiers(memories, chunk_numel, DeviceBudget(chosen.device_bytes))


def check_space(plan: Plan, tiers: Tiers, comm: Comm) -> None:
    """Raise an error on every rank if a memory is too small for the plan.

    Args:
        plan: The plan, which assigns each state to a memory.
        tiers: The memories that were opened for it.
        comm: The communicator of the ranks that call this function.

    Note:
        Collective: every rank must call it.
    """
    if not tiers.memories:
        return
    needed = plan.bytes_by_tier()
    with AllRanks(comm, "checking free memory"):
        for tier, memory in tiers.memories.items():
            memory.check_space(needed[tier], ranks_of_this_host())


def commit(tiers: Tiers, comm: Comm) -> None:
    """Allocate the pages of a plan's memories.

    Call it after the model's own values were freed.

    Args:
        tiers: The memories that were opened for the plan.
        comm: The communicator of the ranks that call this function.

    Note:
        Collective: every rank must call it.
    """
    with AllRanks(comm, "reserving host memory"):
        for memory in tiers.memories.values():
            memory.commit(ranks_of_this_host())
