"""Access to gradients, main weights and optimizer states of single parameters.

The functions read and write a whole state, or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..optim.master_shard import ParamOverlap
from ..optim.sharded import ShardedOptimizer
from ..planner.layout import Slot
from ..planner.spec import R, S
from ..precision.policy import cast_master
from ..sharding.buffer import FlatBuffer
from ..sharding.grad_edits import complete
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of
from .gathered_parameters import gather_full


def optimizer_of(param: nn.Parameter) -> ShardedOptimizer | None:
    """Return the optimizer that updates a parameter; None if none does."""
    owner = owner_of(param)
    found = owner.optimizer() if isinstance(owner, ParamGroup) else None
    return found if isinstance(found, ShardedOptimizer) else None


# -- optimizer state


def full_state(param: nn.Parameter, key: str) -> Tensor | None:
    """Return a whole element-wise optimizer state of a parameter.

    Args:
        param: The parameter.
        key: The name of the state, for example "exp_avg".

    Returns:
        An fp32 tensor in the parameter's shape; None if there is no such state.

    Note:
        Collective: every rank must call it.
    """
    owner = owner_of(param)
    if not isinstance(owner, ParamGroup) or not owner.trainable:
        return None
    slot = _slot(owner, param)
    comm = owner.comm_ctx.comm
    shards = list(_state_views(param, key))
    full = torch.zeros(slot.numel, dtype=torch.float32, device=owner.comm_ctx.pool.device)
    for cover, view in shards:
        full[cover.start : cover.stop].copy_(view)
    row = torch.tensor([sum(cover.stop - cover.start for cover, _ in shards)])
    known = comm.all_gather_rows(row, f"{key} of {slot.name}") if comm.size > 1 else row
    if not int(known.sum()):
        return None
    if owner.master is not None and owner.master.placement is not R:
        complete(full, owner, slot, f"{key} of {slot.name}")
    return full.view(slot.shape)


def set_full_state(param: nn.Parameter, value: Tensor, key: str) -> None:
    """Write a whole element-wise optimizer state; each rank keeps its part.

    Args:
        param: The parameter.
        value: The new state in the parameter's shape, the same on every rank.
        key: The name of the state.

    Raises:
        UsageError: The parameter has no such state, or the value has another size.

    Note:
        Collective: every rank must call it.
    """
    owner = _owner(param)
    flat = _flat(value, _slot(owner, param))
    optimizer = optimizer_of(param)
    if optimizer is None:
        raise _no_optimizer(owner, param)
    found = list(_state_views(param, key))
    lacks = torch.tensor([len(list(_covers(optimizer, owner, param))) - len(found)])
    if int(owner.comm_ctx.comm.all_gather_rows(lacks, f"{key} of {owner.name_of(param)}").sum()):
        raise _no_state(optimizer, owner.name_of(param), key)
    for cover, view in found:
        view.copy_(flat[cover.start : cover.stop])


def local_state(param: nn.Parameter, key: str) -> Tensor | None:
    """Return a copy of this rank's part of an optimizer state, flat.

    After the first step, the result is empty if this rank has no element of a trained parameter.

    Args:
        param: The parameter.
        key: The name of the state.

    Returns:
        A flat tensor; None if there is no such state.
    """
    if views := [view for _, view in _state_views(param, key)]:
        return torch.cat(views)
    owner = owner_of(param)
    optimizer = optimizer_of(param)
    if not isinstance(owner, ParamGroup) or optimizer is None or not optimizer.steps:
        return None
    return (
        None
        if any(_covers(optimizer, owner, param))
        else torch.zeros(0, device=owner.comm_ctx.pool.device)
    )


def set_local_state(param: nn.Parameter, value: Tensor, key: str) -> None:
    """Write this rank's part of an optimizer state.

    Args:
        param: The parameter.
        value: The new values; as many elements as `local_state` returns.
        key: The name of the state.

    Raises:
        UsageError: The parameter has no such state, or the value has another size.
    """
    owner = _owner(param)
    optimizer = optimizer_of(param)
    if optimizer is None:
        raise _no_optimizer(owner, param)
    found = list(_state_views(param, key))
    if not found and any(_covers(optimizer, owner, param)):
        raise _no_state(optimizer, owner.name_of(param), key)
    flat = _part(value, sum(view.numel() for _, view in found), owner.name_of(param))
    used = 0
    for _, view in found:
        view.copy_(flat[used : used + view.numel()])
        used += view.numel()


def _covers(
    optimizer: ShardedOptimizer, owner: ParamGroup, param: nn.Parameter
) -> Iterator[ParamOverlap]:
    name = owner.name_of(param)
    for shard in optimizer.shards():
        if shard.group is owner and name in shard.names:
            yield from (cover for cover in shard.overlaps() if cover.slot.name == name)


def _state_views(param: nn.Parameter, key: str) -> Iterator[tuple[ParamOverlap, Tensor]]:
    owner = owner_of(param)
    optimizer = optimizer_of(param)
    if not isinstance(owner, ParamGroup) or optimizer is None:
        return
    owner.guard.refuse_offloaded()  # on every rank, even if this one has no part of the parameter
    for cover in _covers(optimizer, owner, param):
        state = optimizer.load_states().get(cover.shard.param, {}).get(key)
        if isinstance(state, Tensor) and state.shape == cover.shard.param.shape:
            yield cover, cover.of(state)


def _no_state(optimizer: ShardedOptimizer, name: str, key: str) -> UsageError:
    known = sorted({key for state in optimizer.load_states().values() for key in state})
    reason = "An optimizer makes its state in its first step."
    fix = "take a step first."
    if known:
        reason = f"It has {', '.join(known)}."
        fix = "name one of these."
    return UsageError(
        f"optimizer {type(optimizer.inner).__name__} has no element-wise state '{key}' for "
        f"'{name}'.",
        reason,
        fix,
    )


# -- masters and gradients


def set_full_master(param: nn.Parameter, value: Tensor) -> None:
    """Write a whole new value into main weight and weight; each rank keeps its part.

    Args:
        param: The parameter.
        value: The new value in the parameter's shape, the same on every rank.

    Raises:
        UsageError: The parameter belongs to no engine, or the value has another size.
    """
    owner = _owner(param)
    slot = _slot(owner, param)
    rank = owner.comm_ctx.comm.rank
    flat = _flat(value, slot).to(owner.comm_ctx.pool.device)
    owner.weight_gather.changed()
    with torch.no_grad():
        start, stop, place = owner.weight.local_range(slot, rank)
        with owner.weight.writing(place, place + stop - start) as view:
            dtype = owner.master.dtype if owner.master is not None else view.dtype
            cast_master(flat[start:stop].to(dtype), view)
        if owner.master is not None:
            start, stop, place = owner.master.buffer.local_range(slot, rank)
            owner.master.write(place, place + stop - start, flat[start:stop])


def local_master(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's part of a main weight, flat; None if there is none."""
    owner = owner_of(param)
    if not isinstance(owner, ParamGroup) or owner.master is None:
        return None
    place, end = owner.master.buffer.owned_range(_slot(owner, param), owner.master.rank)
    values = owner.master.read(place, end)
    return values if owner.master.is_split else values.clone()


def set_local_master(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a sharded main weight, then update the weights.

    At stage 0 with several ranks, every rank holds the whole main weight, so there is no part to
    write.

    Args:
        param: The parameter.
        value: The new values; as many elements as `local_master` returns.

    Raises:
        UsageError: The parameter has no sharded main weight, or the value has another size.

    Note:
        Collective: every rank must call it.
    """
    owner = _owner(param)
    slot = _slot(owner, param)
    comm = owner.comm_ctx.comm
    if owner.master is None or (owner.master.placement is R and comm.size > 1):
        raise UsageError(
            f"'{slot.name}' has no sharded master on this engine.",
            "It is frozen, or ZeRO is off (stage 0) and every rank holds all of it.",
            "use safe_set_full_fp32_param.",
        )
    owner.weight_gather.changed()
    with torch.no_grad():
        place, end = owner.master.buffer.owned_range(slot, owner.master.rank)
        owner.master.write(
            place, end, _part(value, end - place, slot.name).to(owner.comm_ctx.pool.device)
        )
        owner.refresh(f"changed {slot.name}").wait()


def local_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's part of a reduced gradient, flat, in fp32.

    Returns:
        A flat tensor; None before a backward.
    """
    owner = owner_of(param)
    if not isinstance(owner, ParamGroup) or not owner.trainable:
        return None
    owner.grad_view.take_assigned()
    if not owner.gradient.sum.has(owner.index[id(param)]):
        return None
    return owner.gradient.sum.own_part(_slot(owner, param)).float().clone()


def set_grad(param: nn.Parameter, value: Tensor, *, local: bool) -> None:
    """Write a reduced gradient.

    Args:
        param: The parameter.
        value: The new gradient: this rank's part, flat, if `local`; otherwise the whole gradient,
            the same on every rank.
        local: Whether `value` is this rank's part.

    Raises:
        UsageError: There is no reduced gradient, or the value has another size.
    """
    owner = _owner(param)
    if not owner.trainable or not owner.gradient.sum.is_reduced:
        raise UsageError(
            f"'{owner.name_of(param)}' has no reduced gradient to change.",
            "It is frozen, or no backward has ended since the last step.",
            "call it between backward and step, at the accumulation boundary.",
        )
    slot = _slot(owner, param)
    number = owner.index[id(param)]
    owner.grad_view.take_assigned()
    with torch.no_grad():
        if local:
            owner.grad_view.edits.assign_shard(
                number, _part(value, owner.gradient.sum.own_part(slot).numel(), slot.name)
            )
        else:
            owner.grad_view.edits.assign(number, _flat(value, slot))


# -- whole states


def full_master(param: nn.Parameter) -> Tensor | None:
    """Return the whole fp32 main weight of a parameter. Collective.

    Returns:
        A tensor in the parameter's shape; None if there is no main weight.
    """

    def values_of(group: ParamGroup) -> FlatBuffer | None:
        return None if group.master is None else group.master.values()

    return _full(param, values_of)


def full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole reduced gradient of a parameter in fp32. Collective.

    Returns:
        A tensor in the parameter's shape; None before a backward.
    """

    def held(group: ParamGroup) -> FlatBuffer | None:
        group.grad_view.take_assigned()
        gradient = group.gradient.sum
        reduced = gradient.reduced() if gradient.has(group.index[id(param)]) else None
        if reduced is None or gradient.buffer is None:
            return None
        placement = S if reduced.numel() < group.layout.padded_numel else R
        if group.comm_ctx.comm.size == 1:
            placement = S
        return FlatBuffer(group.layout, replace(gradient.buffer.spec, placement=placement), reduced)

    found = _full(param, held)
    return found.float() if found is not None else None


def _full(param: nn.Parameter, choose: Any) -> Tensor | None:
    owner = owner_of(param)
    if not isinstance(owner, ParamGroup):
        return None
    with torch.no_grad():
        buffer = choose(owner)
        if buffer is None:
            return None
        slot = owner.members[owner.index[id(param)]].slot
        return (
            gather_full(buffer, owner, slot.name)[slot.start : slot.stop].view(slot.shape).clone()
        )


# -- arithmetic


def _owner(param: nn.Parameter) -> ParamGroup:
    """Return the group of a parameter whose state is about to be written."""
    owner = owner_of(param)
    if not isinstance(owner, ParamGroup):
        raise UsageError(
            "this parameter belongs to no engine.",
            "Only a wrapped model's parameters have sharded state.",
            "pass a parameter of the model that initialize (or DeepSeekZeRO3) wrapped.",
        )
    owner.guard.before_write()
    return owner


def _no_optimizer(owner: ParamGroup, param: nn.Parameter) -> UsageError:
    return UsageError(
        f"'{owner.name_of(param)}' has no optimizer state.",
        "It is frozen, or its engine has no optimizer.",
        "give initialize an optimizer that updates this parameter.",
    )


def _slot(owner: ParamGroup, param: nn.Parameter) -> Slot:
    return owner.members[owner.index[id(param)]].slot


def _flat(value: Tensor, slot: Slot) -> Tensor:
    if value.numel() != slot.numel:
        raise UsageError(
            f"a value of shape {tuple(value.shape)} was given for '{slot.name}' of shape "
            f"{slot.shape}.",
            fix="pass the whole value, in the parameter's shape.",
        )
    return value.detach().reshape(-1)


def _part(value: Tensor, numel: int, name: str) -> Tensor:
    if value.numel() != numel:
        raise UsageError(
            f"{value.numel()} elements were given for '{name}', of which this rank holds {numel}.",
            fix="pass as many as the matching safe_get_local function returns.",
        )
    return value.detach().reshape(-1)
