"""Open the memories outside the training device that a plan uses, and free idle memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..base.device import CPU
from ..base.memory import KEPT_BYTES, return_pages
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..comm.context import ranks_of_this_host
from ..planner.plan import Plan
from ..planner.spec import P
from ..sharding.grad_sum import GradState
from ..sharding.hooks import weak_hook
from ..sharding.pool import has_pages_to_return
from ..sharding.runtime import Runtime
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


def free_idle_memory(runtime: Runtime) -> None:
    """Free memory of a model between its uses, from now on.

    Args:
        runtime: The runtime of the model.
    """
    if runtime.comm_ctx.pool.device != CPU:
        runtime.forward.before_first_forwards.append(weak_hook(runtime, _free_gradients))
    elif not runtime.settings.streams_weights:  # otherwise the pages would be faulted in at once
        runtime.backward.after_drops.append(weak_hook(runtime, _return_idle_pages))


def _free_gradients(runtime: Runtime) -> None:
    """Free the buffers of empty, replicated gradients until the next backward.

    A buffer that is slow to allocate again is kept: on a CPU, or if other ranks use it.
    """
    for group in runtime.trained_groups:
        gradient = group.gradient
        is_alone = group.comm_ctx.comm.size == 1 and gradient.reduction.sums_all
        is_unused = gradient.sum.state is GradState.EMPTY and gradient.summand.buffer is None
        if gradient.sum.spec.placement is P and is_alone and is_unused:
            gradient.sum.drop()


def _return_idle_pages(runtime: Runtime) -> None:
    """Return the pages of large idle CPU buffers to the system after a step.

    The pages of the first `KEPT_BYTES` are kept, so that the next step has fewer page faults.
    """
    pool = runtime.comm_ctx.pool
    kept = 0
    for tensor in filter(has_pages_to_return, pool.idle()):
        kept += tensor.nbytes
        if kept > KEPT_BYTES:
            pool.comm.wait_until_read(tensor)
            return_pages(tensor)
