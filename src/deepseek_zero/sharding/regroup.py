"""Changes groups and settings of a wrapped model between two steps.

The functions rebuild the states of a group in another layout or dtype, or change the settings of
the model.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..base.device import without_torch_function
from ..planner.plan_settings import Compression, PlanSettings
from ..planner.spec import ShardPlan
from .grad_reduction import GradReduction
from .grad_sum import GradState
from .gradient import Gradient
from .group_build import (
    allocate_weight,
    build_master,
    build_states,
    set_placeholders,
)
from .param_group import ParamGroup
from .runtime import Runtime
from .unit import Unit
from .whole_values import main_values, whole_values

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


def promote_unit(runtime: Runtime, unit: Unit, *, to_fp32: bool) -> None:
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


def resize(runtime: Runtime, settings: PlanSettings) -> None:
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


def send_as(runtime: Runtime, compression: Compression) -> None:
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
