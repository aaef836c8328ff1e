"""The plan of this process among its ranks: what it asks of the model, of the optimizer and of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..base.device import free_device_bytes
from ..base.errors import UsageError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..comm.context import ranks_of_this_host
from ..optim.sharded import update_settings_of, updates_in_backward
from ..optim.speculative import works_by_shard
from ..planner.auto_wrap_policy import ModelShape
from ..planner.plan import Machine, Plan, plan_shape
from ..planner.spec import PlanSettings
from ..planner.unit_tiers import PlacementSettings, TierChoices, describe_tiers
from ..planner.update import UpdateSettings
from ..tiers.disk import Disk
from ..tiers.host import free_host_bytes
from ..tiers.tier import Tier
from .optimizer import OptimizerParts
from .settings import placement_settings_of, step_settings_of

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

WORTH_FILLING = 0.6  # of what is free: activations, and whatever else runs, need the rest


def plan_run(
    config: Config, settings: PlanSettings, shape: ModelShape, optimizer: OptimizerParts, comm: Comm, mesh: Mesh
) -> Plan:
    """Return the plan of this process among its ranks.  Collective where memories are "auto"; logs what was chosen."""
    placement, update = placement_settings_of(config), update_of(config, optimizer, mesh.device)
    near = comm.replicas is not None and comm.replicas.reads_in_place
    if settings.secondary_ranks > 1:
        row = torch.tensor([int(comm.shard.reads_in_place)])
        in_place = bool(comm.whole.all_gather_rows(row, "where weights are read").all())
        settings = with_useful_copies(settings, mesh, in_place=in_place)
    settings = with_order_of_sums(settings, mesh, comm.ranks_per_host)
    inside, across = mesh.hosts_of(settings.ranks_per_host or 1)
    machine = Machine(
        comm.shard.reads_in_place,
        replicas_read_in_place=near,
        near_read_in_place=comm.would_read_in_place(inside),
        far_read_in_place=comm.would_read_in_place(across),
    )
    if not TierChoices.of(settings, placement, mesh.device).are_open:
        return say_uncoded(plan_shape(shape, settings, mesh, machine, update, placement))
    machine = replace(machine, budgets=free_budgets(placement, comm, mesh.device))
    with AllRanks(comm, "placing states"):
        found = plan_shape(shape, settings, mesh, machine, update, placement)
    log_once(f"placement: {describe_tiers(found.settings.unit_tiers)}")
    return say_uncoded(found)


def say_uncoded(plan: Plan) -> Plan:
    """Return the plan; logs why weights or gradients are not coded on their way where the settings ask for it."""
    asked, groups = plan.settings.compression, [group.plan for unit in plan.units for group in unit.groups]
    wanted = {"weights": asked.weights, "gradients": asked.gradients}
    found = {
        "weights": any(row.weight.wire is not None for row in groups),
        "gradients": any(row.grad is not None and row.grad.wire == asked.gradients for row in groups),
    }
    for state in (state for state, codec in wanted.items() if codec is not None and not found[state]):
        why = f"no unit has matrices of {asked.min_numel:,} elements that travel (compression.min_numel)"
        if plan.mesh.shard_size == 1:
            why = "no other rank shares slices with this one"
        elif state == "weights" and plan.settings.stage == 0:
            why = "stage 0 updates whole weights on every rank"
        log_once(f"{state} are sent as they are, though {wanted[state]} is asked for: {why}.")
    return plan


def with_useful_copies(settings: PlanSettings, mesh: Mesh, *, in_place: bool) -> PlanSettings:
    """Return the settings without a second copy of weights where none would be read; logs why.

    in_place: every rank reads the weights of those with which it shares slices where they lie.
    """
    size, why = settings.secondary_ranks, ""
    if size >= mesh.shard_size:
        why = f"{mesh.shard_size} ranks share slices, so that no smaller group is left for a copy"
    elif settings.stage < 3:
        why = f"stage {settings.stage} keeps whole weights, which are not gathered"
    elif in_place:
        why = "every rank reads the others' weights where they lie (one host), so that a gather moves nothing"
    elif settings.weight_tier is not Tier.DEVICE:
        why = "offload_param has the weights leave the device, and a copy would be there"
    if size == 1 or not why:
        return settings
    log_once(f"zero_hpz_partition_size = {size} changes nothing here: {why}.")
    return replace(settings, secondary_ranks=1)


def with_order_of_sums(settings: PlanSettings, mesh: Mesh, counted: int) -> PlanSettings:
    """Return the settings with the ranks per host that sums follow: stated, else counted; logs where that cannot be.

    counted: ranks that each of several hosts has; 1: one host, or several that differ.
    """
    if settings.ranks_per_host is not None:
        return settings
    try:
        mesh.near_size(counted)
    except UsageError as error:
        log_once(f"sums are formed in the order of ranks, and not host by host: {error.what}")
        counted = 1
    return replace(settings, ranks_per_host=counted)


def update_of(config: Config, optimizer: OptimizerParts, device: torch.device) -> UpdateSettings | None:
    """Return the optimizer as the planner needs it; None where there is none."""
    if optimizer.cls is None:
        return None
    settings = step_settings_of(config, optimizer.granularity, device)
    return update_settings_of(
        settings,
        optimizer.cls.__name__,
        optimizer.planned,
        scales_grads=config.fp16.enabled or settings.max_norm > 0,
        undoes=updates_in_backward(settings) and works_by_shard(optimizer.cls),
    )


def free_budgets(placement: PlacementSettings, comm: Comm, device: torch.device) -> dict[Tier, int]:
    """Return the bytes of one rank for each memory: stated, or free.  The least of what ranks have.  Collective."""
    sharers = ranks_of_this_host()
    memory = int(WORTH_FILLING * free_host_bytes()) // sharers
    near = memory if (free := free_device_bytes(device)) is None else int(WORTH_FILLING * free)
    disk = Disk.free_bytes(placement.path) // sharers if placement.path is not None else 0
    mine = [
        near if placement.device is None else placement.device,
        memory if placement.host is None else placement.host,
        disk if placement.disk is None else placement.disk,
    ]
    least = comm.all_gather_rows(torch.tensor(mine), "room for states").amin(dim=0)
    return dict(zip((Tier.DEVICE, Tier.HOST, Tier.NVME), map(int, least), strict=True))


def stated_budgets(settings: PlanSettings, placement: PlacementSettings, device: torch.device) -> dict[Tier, int]:
    """Return the bytes of one rank that the configuration states for each memory that a choice may take."""
    choices = TierChoices.of(settings, placement, device)
    stated = {Tier.DEVICE: placement.device, Tier.HOST: placement.host, Tier.NVME: placement.disk}
    asked = {*choices.weights, *choices.states} if choices.are_open else set[Tier]()
    if missing := [tier.value for tier in stated if tier in asked and stated[tier] is None]:
        raise UsageError(
            f'the configuration leaves memories open ("auto"), and no budget is given for {", ".join(missing)}.',
            "A plan of another machine cannot look at what is free there.",
            "state memory_budget.device, .host and .disk in bytes of one rank.",
        )
    return {tier: nbytes for tier, nbytes in stated.items() if nbytes is not None}
