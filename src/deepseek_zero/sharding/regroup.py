"""`requires_grad_` after wrapping: the groups of a unit follow, at the next forward that trains.

A parameter that is frozen keeps its place, its master and its moments, which nobody touches until it is unfrozen; a
group without any other is not reduced.  One that was frozen when it was wrapped has a weight only: it leaves its group
for one that is trained.  All ranks compare what changed before anything does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..base.device import without_torch_function
from ..base.errors import UsageError
from ..comm.agreement import agree, propagate_errors
from ..planner.units import plan_group
from .executor import Updates
from .param_group import ParamGroup, ParamInfo, build_group

if TYPE_CHECKING:
    from .runtime import Runtime


def changed_among(groups: Sequence[ParamGroup]) -> list[ParamInfo]:
    """Members whose `requires_grad` is not what it was when all ranks looked last."""
    with without_torch_function():
        return [
            member for group in groups for member in group.members if member.param.requires_grad is member.is_frozen
        ]


def follow_requires_grad(runtime: Runtime, *, begins_a_step: bool) -> None:
    """Let groups be what `requires_grad` says.  Collective where it changed; between two steps, every unit at rest."""
    changed = changed_among(runtime.groups)
    if not changed:
        return
    if not begins_a_step:
        _refuse_late(runtime, changed)
        return
    lines = [f"{member.name} {'trained' if member.is_frozen else 'frozen'}" for member in changed]
    with torch.inference_mode(False), torch.no_grad(), propagate_errors(runtime.comm):
        agree(
            runtime.comm,
            lines,
            "which parameters are frozen now",
            "Ranks reduce and update slices of the same tensors.",
            "call requires_grad_ with the same parameters, before the same forward, on every rank.",
        )
        _apply(runtime, changed)


def _refuse_late(runtime: Runtime, changed: Sequence[ParamInfo]) -> None:
    """Within a step a parameter may be frozen, and unfrozen where its gradient still has a place."""
    ready = {id(member) for group in runtime.trained_groups if not group.is_idle for member in group.members}
    thawed = [member.name for member in changed if member.is_frozen and id(member) not in ready]
    if thawed:
        raise UsageError(
            f"'{thawed[0]}' was unfrozen between the micro-batches of a step, or behind a forward that no backward "
            "followed.",
            "Its gradient gets a place when a step begins.",
            "call requires_grad_(True) after step() and before the next forward; run forwards that nothing is learnt "
            "from under torch.no_grad().",
        )


def _apply(runtime: Runtime, changed: Sequence[ParamInfo]) -> None:
    thawed = {id(member) for member in changed if member.is_frozen}
    parts = {
        group: [member for member in group.members if id(member) in thawed]
        for group in runtime.groups
        if not group.trainable
    }
    parts = {group: members for group, members in parts.items() if members}
    if held := [group for group in parts if group.is_pinned]:
        raise UsageError(
            f"'{held[0].members[0].name}' was unfrozen and a forward begun inside GatheredParameters.",
            "Its memory is about to be laid out anew.",
            "leave the block before the forward.",
        )
    optimizer: Updates | None = runtime.executor.updates()
    if parts and optimizer is not None:
        optimizer.refuse_regrouping()
    for member in changed:
        member.is_frozen = not member.is_frozen
    new: list[ParamGroup] = []
    for unit in runtime.units:
        groups = [each for group in unit.groups for each in (_divide(runtime, unit.name, group, parts.get(group)))]
        fresh = [group for group in groups if group not in unit.groups]
        for group in groups:
            group.is_idle = group.trainable and all(member.is_frozen for member in group.members)
        unit.set_groups(groups)
        for group in fresh:
            group.runtime = weakref.ref(runtime)
            if group.trainable:
                if unit.is_promoted:
                    group.promote_to_fp32(unit.name)
                runtime.watch(unit, group)
        new += fresh
    runtime.comm_ctx.pool.clear()
    runtime.executor.replan()
    runtime.forward.structure.follow(runtime.groups)
    if new and optimizer is not None:
        optimizer.regroup(new)


def _divide(runtime: Runtime, unit: str, group: ParamGroup, thawed: list[ParamInfo] | None) -> list[ParamGroup]:
    """A frozen group as one that is trained and one of what is still frozen.  Collective."""
    if not thawed:
        return [group]
    assert group.planned.key is not None
    group.guard.before_write()
    group.restore_params()
    found = []
    for trainable in (True, False):
        params = {member.name: member.param for member in group.members if (member in thawed) is trainable}
        if params:
            key = replace(group.planned.key, trainable=trainable)
            shapes = [tuple(param.shape) for param in params.values()]
            planned = plan_group(unit, key, list(params), shapes, runtime.settings, runtime.plan.mesh)
            found.append(build_group(planned, params, runtime.comm_ctx))
    return found
