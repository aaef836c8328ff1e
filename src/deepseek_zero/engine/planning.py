"""The plan of this process among its ranks, and what a plan asks of a machine and an optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..base.device import free_device_bytes
from ..base.errors import UsageError
from ..base.log import log_once
from ..base.mesh import Mesh
from ..comm.agreement import run_on_all_ranks
from ..comm.collectives import Comm
from ..comm.context import ranks_of_this_host
from ..optim.sharded import StepSettings, unknown_parameter, update_settings_of, updates_in_backward
from ..optim.speculative import works_by_shard
from ..planner.plan import Machine, Plan, plan_model
from ..planner.spec import PlanSettings
from ..planner.unit_tiers import PlacementSettings, TierChoices, describe_tiers
from ..planner.update import ParamGroupPlan, UpdateSettings
from ..sharding.ties import refuse_complex, tie_shared, without_twins
from ..tiers.disk import Disk
from ..tiers.host import free_host_bytes
from ..tiers.tier import Tier
from .optimizer import OptimizerParts
from .settings import placement_settings_of, plan_settings_of, step_settings_of

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

WORTH_FILLING = 0.6  # of what is free: activations, and whatever else runs, need the rest


def plan_run(
    config: Config,
    model: nn.Module,
    comm: Comm,
    mesh: Mesh,
    parts: OptimizerParts,
    leaf_modules: tuple[str, ...] = (),
) -> Plan:
    """Return the plan of this process among its ranks.  Collective where memories are "auto"; logs what was chosen."""
    settings, placement = plan_settings_of(config, leaf_modules), placement_settings_of(config)
    device = mesh.device
    update = update_of(config, parts, model, step_settings_of(config, parts.granularity, device))
    near = comm.replicas is not None and comm.replicas.reads_in_place
    machine = Machine(comm.shard.reads_in_place, replicas_read_in_place=near)
    if not TierChoices.of(settings, placement, device).are_open:
        return plan_model(model, settings, mesh, machine, update, placement)
    machine = replace(machine, budgets=free_budgets(placement, comm, device))
    found = run_on_all_ranks(
        comm, "placing states", lambda: plan_model(model, settings, mesh, machine, update, placement)
    )
    log_once(f"placement: {describe_tiers(found.settings.unit_tiers)}")
    return found


def look_at(model: nn.Module) -> None:
    """Tie parameters over one memory; UsageError where some are complex or overlap."""
    refuse_complex(model)
    tie_shared(model)


def update_of(config: Config, parts: OptimizerParts, model: nn.Module, settings: StepSettings) -> UpdateSettings | None:
    """Return the optimizer as the planner needs it; None where there is none.  UsageError where it holds a parameter
    that the model does not have.
    """
    if parts.cls is None:
        return None
    names = {id(param): name for name, param in model.named_parameters()}
    given = without_twins(parts.groups)
    if any(id(param) not in names for group in given for param in group["params"]):
        raise unknown_parameter()
    groups = [
        ParamGroupPlan(
            {**parts.defaults, **{key: value for key, value in group.items() if key != "params"}},
            frozenset(names[id(param)] for param in group["params"]),
            granularity != "element",
        )
        for group, granularity in zip(given, parts.granularity, strict=True)
    ]
    return update_settings_of(
        settings,
        parts.cls.__name__,
        groups,
        scales_grads=config.fp16.enabled or settings.max_norm > 0,
        undoes=updates_in_backward(settings) and works_by_shard(parts.cls),
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
