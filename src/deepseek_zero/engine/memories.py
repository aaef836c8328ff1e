"""Open the memories outside the training device that a plan uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..comm.context import ranks_of_this_host
from ..planner.plan import Plan
from ..tiers.budget import DeviceBudget
from ..tiers.disk import Disk, DiskSettings
from ..tiers.host import HostMemory
from ..tiers.tier import Tier, TierMemory, Tiers


@dataclass(frozen=True)
class MemorySettings:
    """The memories outside the training device.

    Attributes:
        pins_host: Page-lock host memory for a GPU.
        path: The directory on a disk.
        disk: The settings of the disk.
    """

    pins_host: bool = False
    path: Path = Path()
    disk: DiskSettings = field(default_factory=DiskSettings)


def open_tiers(plan: Plan, settings: MemorySettings, comm: Comm, chunk_numel: int) -> Tiers:
    """Open the memories that a plan uses.

    Args:
        plan: The plan.
        settings: The settings of the memories.
        comm: The communicator of the ranks.
        chunk_numel: The size of a transferred chunk in elements.

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
        is_pinned = settings.pins_host and plan.mesh.device.type == "cuda"
        memories[Tier.HOST] = HostMemory(pinned=is_pinned, pieces=plan.host_pieces())
    if Tier.NVME in wanted:
        with AllRanks(comm, "opening nvme_path"):
            memories[Tier.NVME] = Disk(settings.path, settings.disk)
    for memory in memories.values():
        memory.traffic.clock = comm.meter.clock
    return Tiers(memories, chunk_numel, DeviceBudget(chosen.device_bytes))


def check_space(plan: Plan, tiers: Tiers, comm: Comm) -> None:
    """Raise on every rank if a memory is too small for the plan.

    Args:
        plan: The plan.
        tiers: The memories that were opened for it.
        comm: The communicator of the ranks.

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
        comm: The communicator of the ranks.

    Note:
        Collective: every rank must call it.
    """
    with AllRanks(comm, "reserving host memory"):
        for memory in tiers.memories.values():
            memory.commit(ranks_of_this_host())
