"""Turns a model into units on flat buffers, unit by unit, so that the peak is the model plus one unit.

Collective: ranks first compare what they are about to shard, then take rank 0's values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..base.device import default_device
from ..base.errors import UsageError
from ..comm.agreement import agree
from ..comm.collectives import Comm, scatter
from ..planner.auto_wrap_policy import (
    GroupKey,
    UnitChoice,
    choose_units,
    full_precision_names,
    group_params,
    persistent_names,
)
from ..planner.spec import PlanSettings, predivide_of
from ..tiers.copy_engine import copy_engine_for
from ..tiers.tier import Tiers
from .buffer import CommContext, Pool
from .init import materialise
from .param_group import ParamGroup, planned_group
from .runtime import Runtime
from .sharded_parameter import owner_of
from .unit import Unit


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a parameter belongs to an engine already; local, before any collective."""
    for name, param in model.named_parameters():
        owner = owner_of(param)
        runtime = owner.runtime() if isinstance(owner, ParamGroup) else None
        if runtime is not None and not runtime.is_destroyed:
            raise UsageError(
                f"parameter '{name}' already belongs to an engine.",
                "A parameter lives in one engine at a time.",
                "call destroy() on the first engine, or build the second from its own copy of the model.",
            )


def wrap_model(
    model: nn.Module,
    settings: PlanSettings,
    comm: Comm,
    device: torch.device | None = None,
    tiers: Tiers | None = None,
) -> Runtime:
    """Shard a model in place and hook it.  Collective: every rank passes the same model and settings.

    tiers: the memories that `settings` names beside the training device.
    """
    device = device or default_device()
    choices = choose_units(model, settings)
    compare_ranks(model, choices, settings, comm)
    tiers = tiers or Tiers()
    pool = Pool(device, comm, tiers.budget)
    divisor = (comm.size if settings.mean else 1.0) / predivide_of(settings, comm.size)
    comm_ctx = CommContext(comm, pool, settings.bucket_numel, divisor, tiers, copy_engine=copy_engine_for(pool.device))
    persistent = persistent_names(choices, settings)
    full_precision = full_precision_names(model) if settings.policy.compute is not None else frozenset()
    built: dict[int, list[ParamGroup]] = {}
    for number in _as_they_get_values(model, choices, comm, device):
        choice, groups = choices[number], group_params(choices[number], persistent, full_precision)
        built[number] = [_group(choice, key, names, settings, comm_ctx) for key, names in groups.items()]
    units = [
        Unit(choice.name or "root", choice.module, built[number], number, is_tile=choice.is_tile)
        for number, choice in enumerate(choices)
    ]
    pool.clear()  # what units were packed in on their way to their slices
    _place_buffers(model, comm, device)
    return Runtime(model, units, comm_ctx, settings)


def _as_they_get_values(model: nn.Module, choices: list[UnitChoice], comm: Comm, device: torch.device) -> Iterator[int]:
    """Numbers of units whose parameters all have values: of a model on the meta device, as soon as they have."""
    lacking = {
        number: {id(param) for param in choice.params.values() if param.is_meta}
        for number, choice in enumerate(choices)
    }
    yield from (number for number, params in lacking.items() if not params)
    if not any(lacking.values()):
        return
    for module in materialise(model, comm, device):
        here = {id(param) for param in module.parameters(recurse=False)}
        for number, params in lacking.items():
            if params & here:
                params -= here
                if not params:
                    yield number


def _group(
    choice: UnitChoice, key: GroupKey, names: list[str], settings: PlanSettings, comm_ctx: CommContext
) -> ParamGroup:
    params = {name: choice.params[name] for name in names}
    return planned_group(choice.name or "root", key, params, settings, comm_ctx)


def _place_buffers(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Buffers (running statistics, masks) stay whole on every rank; rank 0's values win."""
    for name, buffer in model.named_buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)
        if comm.size > 1 and buffer.numel():
            flat = buffer.detach().reshape(-1).contiguous().clone()
            scatter(comm, [flat] * comm.size, flat, f"buffer {name}")
            buffer.data.copy_(flat.view(buffer.shape))


def compare_ranks(model: nn.Module, choices: list[UnitChoice], settings: PlanSettings, comm: Comm) -> None:
    """Raise on every rank if ranks differ in parameters (names, shapes, dtypes, order), buffers, units or settings."""
    lines = [f"settings {settings}"]
    lines += [f"unit {choice.name}" for choice in choices]
    for name, param in model.named_parameters():
        lines.append(f"parameter {name} {tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}")
    lines += [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    agree(
        comm,
        lines,
        "what they are about to shard",
        "Each rank holds a slice of the same flat buffers, so names, shapes, dtypes, order and settings must agree.",
        "build the model and the configuration from the same arguments on every rank.",
    )
