"""Changes groups and settings of a wrapped model between two steps.

`follow_requires_grad` handles parameters that are frozen or unfrozen. A frozen parameter keeps its
place, main weight and moments, and a group whose parameters are all frozen is not reduced. A
parameter that was frozen when the model was wrapped has only a weight. When it is unfrozen, its
group is divided, and the unfrozen parameters form a trained group. All ranks compare the changes
before a group changes.

Other functions rebuild the states of a group in another layout or dtype, or change the settings of
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..base.device import without_torch_function
from ..base.errors import UsageError
from ..comm.agreement import agree
from ..comm.collectives import Comm, propagate_errors
from ..planner.plan import Plan
from ..planner.plan_settings import Compression, PlanSettings
from ..planner.spec import ShardPlan
from ..planner.units import plan_group
from .casts import Casts
from .comm_context import CommContext
from .grad_reduction import GradReduction
from .grad_sum import GradState
from .gradient import Gradient
from .group_build import (
    allocate_weight,
    build_group,
    build_master,
    build_states,
    set_placeholders,
)
from .model_changes import Structure, frozen_or_unfrozen
from .param_group import ParamGroup
from .param_info import ParamInfo
from .reduce_lane import ReduceLane
from .step_state import StepState
from .unit import Unit
from .whole_values import main_values, restore_params, whole_values


class HasCasts(Protocol):
    """Interface of `Forward`, whose casts follow the dtypes of units."""

    casts: Casts


class FetchesSaved(Protocol):
    """Interface of `ExternalReads` for the hooks of forward."""

    def fetch_saved(self, group: ParamGroup) -> None: ...


class WrappedModel(Protocol):
    """Interface of `Runtime` for the functions of this file, and for the hooks of forward."""

    units: list[Unit]
    settings: PlanSettings
    comm: Comm
    comm_ctx: CommContext
    reductions: ReduceLane
    step: StepState
    structure: Structure
    added_params: Callable[[], Any]

    @property
    def externals(self) -> FetchesSaved: ...
    @property
    def forward(self) -> HasCasts: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def groups(self) -> list[ParamGroup]: ...
    @property
    def trained_groups(self) -> list[ParamGroup]: ...
    def add_group(self, unit: Unit, group: ParamGroup) -> None: ...
    def replan(self) -> None: ...


class RegroupedOptimizer(Protocol):
    """Interface through which a change of parameter groups reaches the optimizer."""

    def refuse_regrouping(self) -> None:
        """Raise `UsageError` if parameters cannot move to other groups.

        Called before anything has changed.
        """

    def regroup(self, groups: Sequence[ParamGroup]) -> None:
        """Add the parameters of new parameter groups to the optimizer.

        Args:
            groups: The new groups, whose parameters have become trainable.
        """


def follow_requires_grad(runtime: WrappedModel) -> None:
    """Update the groups of a model after `requires_grad` of parameters changed.

    No forward may be running.

    Raises:
        UsageError: A parameter without memory for its gradient was unfrozen within a step.

    Note:
        Collective if a parameter was frozen or unfrozen: every rank must call it.
    """
    changed = frozen_or_unfrozen(runtime.groups)
    if not changed:
        return
    if not runtime.step.is_between_steps:
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


def _refuse_late(runtime: WrappedModel, changed: Sequence[ParamInfo]) -> None:
    """Raise an error if a parameter without memory for its gradient was unfrozen in a step."""
    ready = {
        id(member)
        for group in runtime.trained_groups
        if not group.is_idle
        for member in group.members
    }
    thawed = [member.name for member in changed if member.is_frozen and id(member) not in ready]
    if thawed:
        raise UsageError(
            f"'{thawed[0]}' was unfrozen between the micro-batches of a step, or behind a forward "
            "that no backward followed.",
            "Its gradient gets a place when a step begins.",
            "call requires_grad_(True) after step() and before the next forward; run forwards that "
            "nothing is learnt from under torch.no_grad().",
        )


def _apply(runtime: WrappedModel, changed: Sequence[ParamInfo]) -> None:
    thawed = {id(member) for member in changed if member.is_frozen}
    parts = {
        group: [member for member in group.members if id(member) in thawed]
        for group in runtime.groups
        if not group.trainable
    }
    parts = {group: members for group, members in parts.items() if members}
    if held := [group for group in parts if group.is_pinned]:
        raise UsageError(
            f"'{held[0].members[0].name}' was unfrozen and a forward begun inside "
            "GatheredParameters.",
            "Its memory is about to be laid out anew.",
            "leave the block before the forward.",
        )
    optimizer: RegroupedOptimizer | None = runtime.added_params()
    if parts and optimizer is not None:
        optimizer.refuse_regrouping()
    for member in changed:
        member.is_frozen = not member.is_frozen
    new: list[ParamGroup] = []
    for unit in runtime.units:
        groups = [
            each
            for group in unit.groups
            for each in _divide(runtime, unit.name, group, parts.get(group))
        ]
        fresh = [group for group in groups if group not in unit.groups]
        for group in groups:
            # Frozen members must not receive what the reduction kept from earlier steps
            group.gradient.reduction.forget()
            group.is_idle = group.trainable and all(each.is_frozen for each in group.members)
        unit.set_groups(groups)
        for group in fresh:
            if group.trainable and unit.is_promoted:
                promote(group, unit.name, to_fp32=True)
            runtime.add_group(unit, group)
        new += fresh
    runtime.comm_ctx.pool.clear()
    runtime.replan()
    runtime.structure.follow(runtime.groups)
    if new and optimizer is not None:
        optimizer.regroup(new)


def _divide(
    runtime: WrappedModel, unit: str, group: ParamGroup, thawed: list[ParamInfo] | None
) -> list[ParamGroup]:
    """Divide a frozen group into a trained group and a frozen one.

    Note:
        Collective: every rank of the shard group must call it.
    """
    if not thawed:
        return [group]
    assert group.planned.key is not None
    group.guard.before_write()
    restore_params(group)
    found = []
    for trainable in (True, False):
        params = {
            member.name: member.param for member in group.members if (member in thawed) is trainable
        }
        if params:
            key = replace(group.planned.key, trainable=trainable)
            shapes = [tuple(param.shape) for param in params.values()]
            planned = plan_group(
                unit, key, list(params), shapes, runtime.settings, runtime.plan.mesh
            )
            found.append(build_group(planned, params, group.comm_ctx, group.parts))
    return found


# -- groups in another layout or dtype


def relayout(group: ParamGroup, granularity: str) -> None:
    """Change a group's layout, with the same bits of weight and main weight.

    Gradients are discarded.

    Args:
        group: The parameter group to change.
        granularity: "element" to cut parameters anywhere between ranks, "tensor" to keep each
            whole.

    Note:
        Collective: every rank of the shard group must call it.
    """
    full = whole_values(group)
    for member in group.members:
        member.unshard(full.view(member.slot))
    group.planned = group.planned.relayout(granularity)
    group.new_gradient()
    build_states(group)


def promote(group: ParamGroup, what: str, *, to_fp32: bool) -> None:
    """Rebuild weight and gradient in fp32, or in 16 bits again, from the main weight.

    Gradients are discarded.

    Args:
        group: The parameter group to change.
        what: The name of the unit, used in error messages.
        to_fp32: Whether to use fp32; False for the dtypes of the original plan.

    Note:
        Collective: every rank of the shard group must call it.
    """
    planned = group.planned
    if not to_fp32:
        planned = planned.demoted()
    elif planned.plan.weight.dtype != torch.float32:
        planned = planned.promoted()
    if group.master is None or planned is group.planned:
        return
    values = main_values(group.master)
    group.planned = planned
    allocate_weight(group, what)
    is_split = group.plan.master_is_split
    group.master = build_master(group, None if is_split else values)
    assert group.master is not None
    if is_split:
        group.master.write_consuming(0, values.memory.numel(), values.memory)
    else:
        group.master.copy_to_weight(0, values.memory.numel())
    group.placeholder = group.placeholder.to(group.plan.weight.dtype)
    set_placeholders(group.members, group.placeholder)
    group.new_gradient()
    with without_torch_function():
        group.show_own()
    group.refresh(what).wait()


def promote_unit(runtime: WrappedModel, unit: Unit, *, to_fp32: bool) -> None:
    """Change the dtype in which a sharded unit computes to fp32, or back to 16 bits.

    Args:
        runtime: The runtime of the model.
        unit: The unit, the same on every rank.
        to_fp32: Whether to use fp32; False for the original dtype.

    Note:
        Collective: every rank must call it.
    """
    unit.is_promoted = to_fp32
    for group in unit.trained:
        promote(group, unit.name, to_fp32=to_fp32)
    runtime.forward.casts.any_promoted = any(each.is_promoted for each in runtime.units)


# -- settings; every rank must call these functions between the same two steps


def resize(runtime: WrappedModel, settings: PlanSettings) -> None:
    """Change the sizes of messages and prefetch buffers.

    Args:
        runtime: The wrapped model.
        settings: The settings with the new sizes.

    Note:
        Every rank must call it between the same two steps; it does not communicate.
    """
    runtime.settings = settings
    runtime.replan()
    runtime.comm_ctx.pool.clear()  # drop buffers of the old sizes
    for group in runtime.groups:
        group.comm_ctx = replace(group.comm_ctx, bucket_numel=settings.bucket_numel)


def send_as(runtime: WrappedModel, compression: Compression) -> None:
    """Change the compression of messages, between two steps.

    Args:
        runtime: The wrapped model.
        compression: The new codecs, of the same layout.

    Note:
        Every rank must call it between the same two steps; it does not communicate.
    """
    runtime.settings = replace(runtime.settings, compression=compression)
    for group in runtime.groups:
        planned = group.planned.sent_as(runtime.settings)
        if planned != group.planned:
            assert group.weight_gather.makes_copies, (
                "what lies in pages that others read in place does not travel"
            )
            group.planned = planned
            group.weight.spec = planned.plan.weight
            grad = planned.plan.grad
            buffer = group.gradient.sum.buffer
            if buffer is not None and grad is not None:
                buffer.spec = replace(buffer.spec, wire=grad.wire, wire_inside=grad.wire_inside)
    runtime.replan()
    runtime.comm_ctx.pool.clear()


def is_empty(gradient: Gradient) -> bool:
    """Return whether a rank has no gradient of a group: own, reduced or kept."""
    is_kept = any(kept.is_full for kept in gradient.kept.values())
    return gradient.sum.state is GradState.EMPTY and not is_kept


def drop_gradient_buffers(gradient: Gradient) -> None:
    """Free the memory of a group's sum and kept gradients; all must be empty.

    The next gradients are allocated with the current plan, for example in another dtype.

    Args:
        gradient: The gradient of the group.
    """
    assert is_empty(gradient), "a gradient's memory was dropped with it"
    gradient.sum.drop()
    for kept in gradient.kept.values():
        kept.drop()


def set_grad_dtype(group: ParamGroup, dtype: torch.dtype) -> None:
    """Change the dtype of a group's gradients, between two steps.

    Args:
        group: The parameter group, which has no gradient at the moment.
        dtype: The new dtype.

    Note:
        Every rank must call it between the same two steps; it does not communicate.
    """
    assert group.plan.grad is not None
    if dtype != group.plan.grad.dtype:
        group.planned = group.planned.with_grad_dtype(dtype)
        drop_gradient_buffers(group.gradient)


def reduce_by(group: ParamGroup, reduction: GradReduction, plan: ShardPlan) -> None:
    """Replace the object that reduces a group's gradients, between two steps.

    Args:
        group: The parameter group to change.
        reduction: Reduces the gradients from now on.
        plan: The placement, dtype and codec of the group's states under the new reduction.
    """
    group.planned = replace(group.planned, plan=plan)
    group.gradient.reduction = reduction
