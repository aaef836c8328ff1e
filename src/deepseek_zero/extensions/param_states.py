"""Read and write the sharded states of single parameters: gradient, main weight, optimizer states.

`safe_*_full_*` reads or writes a full value: every rank calls it with the same parameter.
`safe_*_local_*` reads or writes this rank's shard, flat. `deepseek_zero.utils` re-exports these
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..base.errors import UsageError, shown
from ..base.given import refuse
from ..optim.inner_states import load_states
from ..optim.param_overlap import ParamOverlap, overlaps_of
from ..optim.sharded import ShardedOptimizer
from ..planner.layout import Slot
from ..planner.spec import R, S
from ..precision.policy import cast_master
from ..sharding.buffer import FlatBuffer
from ..sharding.grad_edits import complete, is_reduced, own_part
from ..sharding.param_group import ParamGroup
from ..sharding.param_ranges import local_range, owned_range, write_main
from ..sharding.sharded_parameter import owner_of
from ..sharding.whole_values import main_values
from .gathered_parameters import gather_full


def _group_of(param: nn.Parameter) -> ParamGroup | None:
    """Return the parameter group of an engine that a parameter is in; None if it is in none."""
    if not isinstance(param, Tensor):
        raise refuse("a safe_... function", "param", param, "a parameter", "pass one parameter.")
    owner = owner_of(param)
    return owner if isinstance(owner, ParamGroup) else None


def optimizer_of(param: nn.Parameter) -> ShardedOptimizer | None:
    """Return the engine's optimizer that updates a parameter.

    Args:
        param: A parameter of a wrapped model.

    Returns:
        The optimizer; None if the parameter is in no engine or is not updated.
    """
    owner = _group_of(param)
    found = owner.optimizer() if owner is not None else None
    return found if isinstance(found, ShardedOptimizer) else None


# -- optimizer states


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a full optimizer state of a parameter, in the parameter's shape.

    Pending updates run first, and the optimizer states of this rank are fetched if they are
    offloaded.

    Args:
        param: A parameter of a wrapped model.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Returns:
        A new fp32 tensor. None if the parameter has no state of this name, for example before the
        first step, if it is frozen, or if it belongs to no wrapped model.

    Raises:
        UsageError: `engine.offload_states` has moved states, or an earlier update failed.
        StorageError: A disk failed.
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    owner = _group_of(param)
    if owner is None or not owner.trainable:
        return None
    slot = _slot(owner, param)
    what = f"{optim_state_key} of {slot.name}"
    comm = owner.comm_ctx.comm
    full = torch.zeros(slot.numel, dtype=torch.float32, device=owner.comm_ctx.pool.device)
    copied = 0
    for cover, view in _state_views(param, optim_state_key):
        full[cover.start : cover.stop].copy_(view)
        copied += view.numel()
    row = torch.tensor([copied], device="cpu")
    known = comm.all_gather_rows(row, what) if comm.size > 1 else row
    if not int(known.sum()):
        return None
    if owner.master is not None and owner.master.placement is not R:
        complete(full, owner, slot, what)
    return full.view(slot.shape)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace an optimizer state of a parameter.

    Args:
        param: A parameter of a wrapped model.
        value: The full state, the same on every rank. Each rank copies its shard and casts it to
            the dtype of the state.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Raises:
        UsageError: The parameter belongs to no engine or is frozen, the optimizer has no such state
            (for example before the first step), the size of `value` does not match,
            `engine.offload_states` has moved states, or an earlier update failed.
        StorageError: A disk failed.
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    owner = _owner(param)
    flat = _flat(value, _slot(owner, param))
    optimizer = _optimizer(owner, param)
    found = list(_state_views(param, optim_state_key))
    name = owner.name_of(param)
    lacks = torch.tensor([len(list(_covers(optimizer, owner, name))) - len(found)], device="cpu")
    if int(owner.comm_ctx.comm.all_gather_rows(lacks, f"{optim_state_key} of {name}").sum()):
        raise _no_state(optimizer, name, optim_state_key)
    for cover, view in found:
        view.copy_(flat[cover.start : cover.stop])


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's shard of an optimizer state of a parameter, flat.

    Pending updates run first, and the optimizer states of this rank are fetched if they are
    offloaded. At stage 0, the shard is the full state.

    Args:
        param: A parameter of a wrapped model.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Returns:
        A copy in the dtype of the state. None if the parameter has no state of this name, for
        example before the first step, if it is frozen, or if it belongs to no wrapped model. If
        this rank has no element of the parameter, the result after the first step is an empty fp32
        tensor. The name is then compared with the states of this rank's other parameters, if any.

    Raises:
        UsageError: `engine.offload_states` has moved states, or an earlier update failed.
        StorageError: A disk failed.
    """
    if views := [view for _, view in _state_views(param, optim_state_key)]:
        return torch.cat(views)
    owner = _group_of(param)
    optimizer = optimizer_of(param)
    if owner is None or optimizer is None or not optimizer.steps:
        return None
    if any(_covers(optimizer, owner, owner.name_of(param))):
        return None
    known = _elementwise_keys(optimizer)
    if known and optim_state_key not in known:
        return None
    return torch.zeros(0, dtype=torch.float32, device=owner.comm_ctx.pool.device)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Replace this rank's shard of an optimizer state of a parameter.

    The function does not communicate. Ranks that hold the same elements, for example all ranks at
    stage 0, must be given the same values.

    Args:
        param: A parameter of a wrapped model.
        value: The new shard, flat, with as many elements as `safe_get_local_optimizer_state`
            returns. It is cast to the dtype of the state.
        optim_state_key: Name of an element-wise state, such as "exp_avg". If this rank has no
            element of the parameter, the name is compared with the states of this rank's other
            parameters, if any.

    Raises:
        UsageError: The parameter belongs to no engine or is frozen, the optimizer has no such state
            (for example before the first step), the size of `value` does not match,
            `engine.offload_states` has moved states, or an earlier update failed.
        StorageError: A disk failed.
    """
    owner = _owner(param)
    optimizer = _optimizer(owner, param)
    name = owner.name_of(param)
    views = [view for _, view in _state_views(param, optim_state_key)]
    known = _elementwise_keys(optimizer)
    is_here = any(_covers(optimizer, owner, name))
    if not views and (is_here or (known and optim_state_key not in known)):
        raise _no_state(optimizer, name, optim_state_key)
    sizes = [view.numel() for view in views]
    parts = _part(value, sum(sizes), name).split(sizes)
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)


def _covers(optimizer: ShardedOptimizer, owner: ParamGroup, name: str) -> Iterator[ParamOverlap]:
    for shard in optimizer.shards():
        if shard.group is owner and name in shard.names:
            yield from (cover for cover in overlaps_of(shard) if cover.slot.name == name)


def _state_views(param: nn.Parameter, key: str) -> Iterator[tuple[ParamOverlap, Tensor]]:
    owner = _group_of(param)
    optimizer = optimizer_of(param)
    if owner is None or optimizer is None:
        return
    owner.guard.refuse_offloaded()  # on every rank, even if this one has no part of the parameter
    for cover in _covers(optimizer, owner, owner.name_of(param)):
        state = load_states(optimizer.shard_set).get(cover.shard.param, {}).get(key)
        if isinstance(state, Tensor) and state.shape == cover.shard.param.shape:
            yield cover, cover.of(state)


def _elementwise_keys(optimizer: ShardedOptimizer) -> set[str]:
    """Return the names of the element-wise states of this rank's shards."""
    states = load_states(optimizer.shard_set)
    return {
        key
        for shard, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == shard.shape
    }


def _optimizer(owner: ParamGroup, param: nn.Parameter) -> ShardedOptimizer:
    optimizer = optimizer_of(param)
    if optimizer is None:
        raise UsageError(
            f"'{owner.name_of(param)}' has no optimizer state.",
            "It is frozen, or its engine has no optimizer.",
            "give initialize an optimizer that updates this parameter.",
        )
    return optimizer


def _no_state(optimizer: ShardedOptimizer, name: str, key: str) -> UsageError:
    known = sorted(_elementwise_keys(optimizer))
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


# -- main weights


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the full main weight of a parameter in fp32, in the parameter's shape.

    Pending updates run first.

    Args:
        param: A parameter of a wrapped model.

    Returns:
        A new fp32 tensor. None if the parameter has no main weight, because it is frozen or belongs
        to no wrapped model.

    Raises:
        UsageError: `engine.offload_states` has moved the main weight, or an earlier update failed.
        StorageError: A disk failed.
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    owner = _group_of(param)
    if owner is None or owner.master is None:
        return None
    with torch.no_grad():
        return _gathered(main_values(owner.master), owner, param).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the main weight and the weight of a parameter.

    The weight that the forward uses gets `value` in its own dtype. Each rank copies its part of
    `value`. Pending updates run first. A frozen parameter has no main weight, so only its weight is
    replaced.

    Args:
        param: A parameter of a wrapped model.
        value: The full value, the same on every rank.

    Raises:
        UsageError: The parameter belongs to no engine, the size of `value` does not match,
            `engine.offload_states` has moved states, or an earlier update failed.
        StorageError: A disk failed.
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it with the same parameter. Ranks that read each other's
        weights in shared memory wait for each other before the weight changes.
    """
    owner = _owner(param)
    slot = _slot(owner, param)
    rank = owner.comm_ctx.comm.rank
    flat = _flat(value, slot).to(owner.comm_ctx.pool.device)
    owner.weight_gather.before_write(slot.name)
    owner.weight_gather.changed()
    with torch.no_grad():
        start, stop, place = local_range(owner.weight, slot, rank)
        with owner.weight.writing(place, place + stop - start) as view:
            dtype = owner.master.dtype if owner.master is not None else view.dtype
            cast_master(flat[start:stop].to(dtype), view)
        if owner.master is not None:
            start, stop, place = local_range(owner.master.buffer, slot, rank)
            write_main(owner.master, place, flat[start:stop])


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of a parameter's main weight, flat, in fp32.

    Pending updates run first. At stage 0 with several ranks, every rank holds the full main weight.
    The function then returns the elements that would be this rank's shard at stage 1.

    Args:
        param: A parameter of a wrapped model.

    Returns:
        A copy, which is empty if this rank has no element of the parameter. None if the parameter
        has no main weight, because it is frozen or belongs to no wrapped model.

    Raises:
        UsageError: `engine.offload_states` has moved the main weight, or an earlier update failed.
        StorageError: A disk failed.
    """
    owner = _group_of(param)
    if owner is None or owner.master is None:
        return None
    place, end = owned_range(owner.master.buffer, _slot(owner, param), owner.comm_ctx.comm.rank)
    return owner.master.read(place, end).to(torch.float32, copy=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's shard of a parameter's fp32 main weight and weight.

    At stages 1 and 2, the new values are then all-gathered into the weights of all ranks. At stage
    0 with several ranks, every rank holds the full main weight, so the function raises an error.

    Args:
        param: A parameter of a wrapped model.
        value: The new shard, flat, with as many elements as `safe_get_local_fp32_param` returns.

    Raises:
        UsageError: The parameter belongs to no engine or has no sharded main weight, the size of
            `value` does not match, `engine.offload_states` has moved states, or an earlier update
            failed.
        StorageError: A disk failed.
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it, so that ranks with a copy of the weight update it, and
        ranks that read the weight in shared memory have read it before it changes.
    """
    owner = _owner(param)
    slot = _slot(owner, param)
    if owner.master is None or (owner.master.placement is R and owner.comm_ctx.comm.size > 1):
        raise UsageError(
            f"'{slot.name}' has no sharded master on this engine.",
            "It is frozen, or ZeRO is off (stage 0) and every rank holds all of it.",
            "use safe_set_full_fp32_param.",
        )
    owner.weight_gather.before_write(slot.name)
    owner.weight_gather.changed()
    with torch.no_grad():
        place, end = owned_range(owner.master.buffer, slot, owner.comm_ctx.comm.rank)
        part = _part(value, end - place, slot.name)
        write_main(owner.master, place, part.to(owner.comm_ctx.pool.device))
        owner.refresh(f"changed {slot.name}").wait()


# -- gradients


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full reduced gradient of a parameter, in the parameter's shape.

    Under fp16 the gradient is still multiplied by the loss scale. Stages 0 and 1 reduce gradients
    only in the last backward of a step. Before it, and inside `no_sync`, the function returns the
    gradient of this rank only.

    Args:
        param: A parameter of a wrapped model.

    Returns:
        A new fp32 tensor. None before the first backward of a step, after the step has freed the
        gradients, for a parameter without a gradient, and for a parameter of no wrapped model.

    Raises:
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    found = full_grad(param)
    owner = _group_of(param)
    if found is not None or owner is None or owner.plan.grad is None:
        return found
    summand = owner.gradient.summand
    number = owner.index[id(param)]
    if number not in summand.arrived:
        return None
    return summand.values(number).view(param.shape).float().clone()


def full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full reduced gradient of a parameter in fp32, in the parameter's shape.

    Returns:
        A new tensor, or None before the reduction.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    owner = _group_of(param)
    if owner is None:
        return None
    with torch.no_grad():
        owner.grad_view.take_assigned()
        gradient = owner.gradient.sum
        reduced = gradient.reduced() if is_reduced(gradient, owner.index[id(param)]) else None
        if reduced is None or gradient.buffer is None:
            return None
        is_slice = reduced.numel() < owner.layout.padded_numel or owner.comm_ctx.comm.size == 1
        spec = replace(gradient.buffer.spec, placement=S if is_slice else R)
        return _gathered(FlatBuffer(owner.layout, spec, reduced), owner, param).float()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the reduced gradient of a parameter.

    Each rank copies its shard of `value`; nothing is communicated. The function may be called
    between the last backward of an accumulation and the step. A parameter without a gradient gets
    one, so the step updates it.

    Args:
        param: A parameter of a wrapped model.
        value: The full gradient, the same on every rank. Under fp16 it must be multiplied by the
            loss scale.

    Raises:
        UsageError: The parameter belongs to no engine or is frozen, no gradients have been reduced
            since the last step, the size of `value` does not match, or `engine.offload_states` has
            moved states.

    Note:
        Every rank must call it with the same parameter, although it does not communicate.
    """
    owner = _owner_of_grad(param)
    with torch.no_grad():
        flat = _flat(value, _slot(owner, param))
        owner.grad_view.edits.assign(owner.index[id(param)], flat)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of a parameter's reduced gradient, flat, in fp32.

    Under fp16 the gradient is still multiplied by the loss scale. At stage 0, the shard is the full
    gradient.

    Args:
        param: A parameter of a wrapped model.

    Returns:
        A copy, which is empty if this rank has no element of the parameter. None before gradients
        are reduced, after the step has freed them, for a parameter without a gradient, and for a
        parameter of no wrapped model.
    """
    owner = _group_of(param)
    if owner is None or not owner.trainable:
        return None
    owner.grad_view.take_assigned()
    if not is_reduced(owner.gradient.sum, owner.index[id(param)]):
        return None
    return own_part(owner.gradient.sum, _slot(owner, param)).float().clone()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's shard of a parameter's reduced gradient.

    The function does not communicate. It may be called between the last backward of an accumulation
    and the step. A parameter without a gradient gets one on this rank. Ranks that hold the same
    elements, for example all ranks at stage 0, must be given the same values.

    Args:
        param: A parameter of a wrapped model.
        value: The new shard, flat, with as many elements as `safe_get_local_grad` returns. Under
            fp16 it must be multiplied by the loss scale.

    Raises:
        UsageError: The parameter belongs to no engine or is frozen, no gradients have been reduced
            since the last step, the size of `value` does not match, or `engine.offload_states` has
            moved states.
    """
    owner = _owner_of_grad(param)
    slot = _slot(owner, param)
    with torch.no_grad():
        part = _part(value, own_part(owner.gradient.sum, slot).numel(), slot.name)
        owner.grad_view.edits.assign_shard(owner.index[id(param)], part)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the full gradients of several parameters by the results of a function.

    Args:
        param_list: Parameters of a wrapped model. Those without a reduced gradient are skipped.
        update_func: Called with the full gradient, a new fp32 tensor, and the parameter, for one
            parameter at a time and without autograd. It returns the new gradient, which must have
            the same values on every rank. Under fp16 both gradients are multiplied by the loss
            scale.

    Raises:
        UsageError: `param_list` is one parameter, the size of a new gradient does not match, or
            `engine.offload_states` has moved states.
        PeerError: Another rank failed.

    Note:
        Collective: every rank must call it with the same parameters.
    """
    if isinstance(param_list, Tensor) or not isinstance(param_list, Iterable):
        raise refuse(
            "safe_update_full_grad_vectorized",
            "param_list",
            param_list,
            "an iterable of parameters",
            "pass a list, for example list(model.parameters()).",
        )
    with torch.no_grad():
        for param in param_list:
            grad = full_grad(param)
            if grad is not None:
                safe_set_full_grad(param, update_func(grad, param))


# -- helpers


def _gathered(buffer: FlatBuffer, owner: ParamGroup, param: nn.Parameter) -> Tensor:
    """Return a copy of a parameter's elements of a group's state. Collective if it is sharded."""
    slot = _slot(owner, param)
    return gather_full(buffer, owner, slot.name)[slot.start : slot.stop].view(slot.shape).clone()


def _owner(param: nn.Parameter) -> ParamGroup:
    """Return the group of a parameter whose state is about to be written."""
    owner = _group_of(param)
    if owner is None:
        raise UsageError(
            "this parameter belongs to no engine.",
            "Only a wrapped model's parameters have sharded state.",
            "pass a parameter of the model that initialize (or DeepSeekZeRO3) wrapped.",
        )
    owner.guard.before_write()
    return owner


def _owner_of_grad(param: nn.Parameter) -> ParamGroup:
    """Return the group of a parameter whose reduced gradient is about to be written."""
    owner = _owner(param)
    if not owner.trainable or not owner.gradient.sum.is_reduced:
        raise UsageError(
            f"'{owner.name_of(param)}' has no reduced gradient to change.",
            "It is frozen, or no backward has ended since the last step.",
            "call it between backward and step, at the accumulation boundary.",
        )
    owner.grad_view.take_assigned()
    return owner


def _slot(owner: ParamGroup, param: nn.Parameter) -> Slot:
    return owner.members[owner.index[id(param)]].slot


def _flat(value: Tensor, slot: Slot) -> Tensor:
    _refuse_other_types(slot.name, value)
    if value.numel() != slot.numel:
        raise UsageError(
            f"a value of shape {tuple(value.shape)} was given for '{slot.name}' of shape "
            f"{slot.shape}.",
            fix="pass the whole value, in the parameter's shape.",
        )
    return value.detach().reshape(-1)


def _part(value: Tensor, numel: int, name: str) -> Tensor:
    _refuse_other_types(name, value)
    if value.numel() != numel:
        raise UsageError(
            f"{value.numel()} elements were given for '{name}', of which this rank holds {numel}.",
            fix="pass as many as the matching safe_get_local function returns.",
        )
    return value.detach().reshape(-1)


def _refuse_other_types(name: str, value: Tensor) -> None:
    """Raise UsageError if a value is not a tensor."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{shown(value)} was given for '{name}'.", fix="pass a tensor.")
