"""Building the states of a parameter group from whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..base.device import CPU
from ..base.memory import trim_heap
from ..comm.collectives import Comm, scatter
from ..planner.spec import R, S
from ..planner.units import GroupPlan
from ..precision.policy import cast_master
from ..tiers.tier import Tier
from .buffer import FlatBuffer
from .comm_context import CommContext
from .main_weight import MasterWeight
from .param_group import GroupParts, ParamGroup
from .param_info import ParamInfo
from .sharded_parameter import owner_of, set_owner, take_values
from .split_main_weight import SplitMasterWeight
from .whole_values import restore_params


def build_group(
    planned: GroupPlan,
    params: Mapping[str, nn.Parameter],
    comm_ctx: CommContext,
    parts: GroupParts,
) -> ParamGroup:
    """Build a parameter group as planned from whole parameters, with rank 0's values.

    Args:
        planned: The layout of the group, and the placement, dtype and memory of its states.
        params: The parameters, by full name.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        parts: Functions that create the objects that gather the weight and reduce the gradient.

    Returns:
        The group, whose parameters are now sharded or views of the replicated weight.

    Note:
        Collective: every rank of the shard group must call it.
    """
    members = [
        ParamInfo(params[slot.name], slot, type(params[slot.name])) for slot in planned.layout.slots
    ]
    group = ParamGroup(members, planned, comm_ctx, parts)
    build_states(group)
    return group


def build_states(group: ParamGroup) -> None:
    """Build the states of a group as planned, and shard its parameters. Collective.

    The values of rank 0 are copied to the positions of the parameters in the current layout.
    """
    group.members = [
        replace(member, slot=slot)
        for member, slot in zip(group.members, group.layout.slots, strict=True)
    ]
    set_placeholders(group.members, group.placeholder)
    comm = group.comm_ctx.comm
    plan = group.plan
    name = group.members[0].name
    built = (plan.moments or plan.weight).dtype
    values = _packed(group, built)
    full = FlatBuffer(group.layout, replace(plan.weight.gathered(), dtype=built), values)
    _broadcast_from_first(full, comm, f"values of {name}", only_own=group.is_sharded)
    if group.layout.padded_numel:
        own = full.slice_of(comm.rank) if group.is_sharded else full.memory
        group.gradient.reduction.copy_from_first(own, f"replicas of {name}")
        del own  # the pool drops a buffer that is still viewed
    allocate_weight(group, name)
    with group.weight.writing(0, group.weight.numel) as own:
        values = full.memory if plan.weight.placement is R else full.slice_of(comm.rank)
        cast_master(values, own)
    group.master = build_master(group)
    if group.master is not None and not plan.master_is_weight:
        values = full.memory if group.master.placement is R else full.slice_of(comm.rank)
        group.master.write_consuming(0, values.numel(), values)
    del values
    group.comm_ctx.pool.give(full.memory)
    storages = group.offloaded()
    for storage in storages:
        storage.store(0, storage.memory.numel()).wait()
    if storages:
        trim_heap()  # return the heap memory of the original values
    for member in group.members:
        set_owner(member.param, group)
    group.show_own()


def _packed(group: ParamGroup, dtype: torch.dtype) -> Tensor:
    """Return this rank's values, flat; each original is dropped after its copy."""
    flat = group.comm_ctx.pool.take(group.layout.padded_numel, dtype)
    for low, high in group.layout.gaps:
        flat[low:high].zero_()
    for member in group.members:
        held_by = owner_of(member.param)  # a divided group, or one of an earlier engine
        if isinstance(held_by, ParamGroup) and held_by is not group:
            restore_params(held_by)
        values, member.param_class = take_values(member.param)
        flat[member.slot.start : member.slot.stop].copy_(values)
        del values
        # Drop the original at once, so that a unit never exists twice in memory.
        member.param.__class__ = member.param_class
        member.param.data = member.placeholder
    return flat


def set_placeholders(members: Sequence[ParamInfo], placeholder: Tensor) -> None:
    """Expand an element of the weight's dtype to each shape, as data of sharded parameters."""
    for member in members:
        member.placeholder = placeholder.expand(member.slot.shape)


def _broadcast_from_first(full: FlatBuffer, comm: Comm, what: str, *, only_own: bool) -> None:
    """Copy rank 0's values of a whole buffer, or only each rank's slice of it. Collective."""
    slices = [full.slice_of(rank) for rank in range(comm.size)]
    scatter(comm, slices, slices[comm.rank], what)
    if not only_own:
        comm.all_gather(full.memory, "gather", what).wait()


def allocate_weight(group: ParamGroup, name: str) -> None:
    """Allocate the weight of a group; errors name its first parameter. Collective."""
    what = f"the weights of {name}"
    group.weight_gather = group.parts.weight_gather(group, what)
    group.weight = group.weight_gather.allocate(what)
    group.weight.guard = group.guard


def build_master(group: ParamGroup, values: FlatBuffer | None = None) -> MasterWeight | None:
    """Build the main weight that belongs to the weight of a group; None if nothing is trained.

    Args:
        group: The parameter group, whose weight is allocated.
        values: A buffer that becomes the main weight; None to allocate it without initial values.
    """
    plan = group.plan
    if plan.master is None or plan.moments is None:
        return None
    comm_ctx = group.comm_ctx
    weight = group.weight
    if plan.master.placement is not plan.weight.placement:  # the main weight covers one slice
        spec = replace(plan.weight, placement=S)
        weight = FlatBuffer(group.layout, spec, group.own_weight, guard=group.guard)
    has_weight = not plan.weight_is_independent
    if values is None and plan.master_is_weight:
        has_weight = False
        values = FlatBuffer(group.layout, plan.master, weight.memory, weight.storage)
    elif values is None:
        what = f"the master of {group.layout.slots[0].name}"
        values = FlatBuffer.allocate(
            group.layout, plan.master, comm_ctx, what, is_copied=plan.weight_is_independent
        )
    values.guard = group.guard
    kind = SplitMasterWeight if plan.master_is_split and has_weight else MasterWeight
    return kind(
        values,
        plan.moments.dtype,
        weight if has_weight else None,
        is_exposed=is_exposed(group),
        update_device=comm_ctx.pool.device if plan.moments.tier is Tier.DEVICE else CPU,
        copy_engine=comm_ctx.copy_engine,
    )


def is_exposed(group: ParamGroup) -> bool:
    """Whether a program can change a group's weight between steps without its guard."""
    return not group.is_sharded or group.comm_ctx.comm.size == 1
