"""Builds the states of a parameter group again, in another layout or dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..base.device import without_torch_function
from .buffer import FlatBuffer
from .group_build import allocate_weight, build_states, set_placeholders, whole_values
from .main_weight import build_master, weight_shard
from .param_group import ParamGroup


def relayout(group: ParamGroup, granularity: str) -> None:
    """Cut a group anew, keeping the bits of weight and main weight. Collective; gradients are
    dropped.
    """
    full = whole_values(group)
    for member in group.members:
        member.unshard(full.view(member.slot))
    group.planned = group.planned.relayout(granularity)
    group.new_gradient()
    build_states(group)


def promote_to_fp32(group: ParamGroup, what: str) -> None:
    """Store weight and gradient in fp32 from now on, cut from the main weight. Collective;
    gradients are dropped.
    """
    if group.master is None or group.plan.weight.dtype == torch.float32:
        return
    values = group.master.values()
    group.planned = group.planned.promoted()
    _store_anew(group, values, what)


def demote(group: ParamGroup, what: str) -> None:
    """Store weight and gradient again as before `promote_to_fp32`, cut from the main weight.
    Collective; gradients are dropped.
    """
    if group.master is None or group.planned.low is None:
        return
    values = group.master.values()
    group.planned = group.planned.demoted()
    _store_anew(group, values, what)


def _store_anew(group: ParamGroup, values: FlatBuffer, what: str) -> None:
    """Store a weight of these values of the main weight as it is planned now. Collective."""
    assert group.master is not None
    allocate_weight(group, what)
    if group.plan.master_is_split:
        group.master = build_master(group.weight, group.plan, group.comm_ctx)
        assert group.master is not None
        group.master.write_consuming(0, values.memory.numel(), values.memory)
    else:
        values.guard = group.guard
        beneath = None
        if not group.plan.weight_is_independent:
            beneath = weight_shard(group.weight, group.plan, group.master.rank)
        group.master = replace(group.master, buffer=values, weight=beneath, is_split=False)
        group.master.copy_to_weight(0, values.memory.numel())
    group.placeholder = group.placeholder.to(group.plan.weight.dtype)
    set_placeholders(group.members, group.placeholder)
    group.new_gradient()
    with without_torch_function():
        group.show_own()
    group.refresh(what).wait()
