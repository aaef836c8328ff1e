"""Follows and refuses changes that a program makes to a wrapped model.

`follow_requires_grad` handles parameters that are frozen or unfrozen. A frozen parameter keeps its
place, main weight and moments, and a group whose parameters are all frozen is not reduced. A
parameter that was frozen when the model was wrapped has only a weight. When it is unfrozen, its
group is divided, and the unfrozen parameters form a trained group. All ranks compare the changes
before a group changes.

Other changes would lose values, so they raise an error. A parameter that is added after wrapping
would be trained without synchronisation. If the memory of a whole parameter is replaced (a cast, a
move, `.data = ...`), the optimizer no longer updates it. If the memory of a gathered parameter is
replaced by other values, they are lost when its group is resharded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from ..base.device import held_by, without_torch_function
from ..base.errors import UsageError
from ..base.log import log_once
from ..comm.agreement import agree
from ..comm.collectives import propagate_errors
from ..planner.units import plan_group
from ..sharding.buffer import FlatBuffer
from ..sharding.group_build import build_group
from ..sharding.hooks import weak_hook
from ..sharding.param_group import ParamGroup
from ..sharding.param_info import ParamInfo
from ..sharding.regroup import promote
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import ShardedParameter
from ..sharding.whole_values import restore_params


def watch_changes(runtime: Runtime, *, ignores_new_params: bool = False) -> None:
    """Follow or refuse changes of a wrapped model from now on.

    Args:
        runtime: The runtime of the model.
        ignores_new_params: Whether to ignore parameters that are added later, with a warning.
    """
    structure = Structure(ignores_new_params=ignores_new_params)
    forward = runtime.forward
    forward.before_forwards.append(weak_hook(runtime, _before_forward))
    forward.before_first_forwards.append(weak_hook(runtime, structure.check))
    if runtime.settings.unused_is_error:
        runtime.backward.before_ends.append(weak_hook(runtime, refuse_unused))
    if runtime.comm.whole.size > 1:
        _warn_of_max_norm(runtime.model)


def _warn_of_max_norm(model: nn.Module) -> None:
    """Log a warning for each embedding whose forward changes its weight on this rank only."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            log_once(
                f"the forward of embedding '{name}' changes its weight, because it has max_norm.  "
                "Each rank changes only the rows that its own batch uses, so the results depend on "
                "the number of ranks, and at stage 0 the ranks' weights become different.\n"
                "  What to do: set max_norm to None, and scale the rows that the forward returns, "
                "or scale the weight between steps inside "
                "deepseek_zero.zero.GatheredParameters(param, modifier_rank=0).",
                logging.WARNING,
            )


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


def frozen_or_unfrozen(groups: Iterable[ParamGroup]) -> list[ParamInfo]:
    """Return the parameters whose `requires_grad` changed since ranks last compared it."""
    changed = []
    with without_torch_function():
        for group in groups:
            for member in group.members:
                if member.param.requires_grad is member.is_frozen:
                    changed.append(member)
    return changed


def _before_forward(runtime: Runtime) -> None:
    """Refuse offloaded weights, and follow changes of `requires_grad`. Collective."""
    for group in runtime.groups[:1]:  # weights of all groups are moved, or of none
        group.refuse_offloaded_weight()
    if torch.is_grad_enabled():
        follow_requires_grad(runtime)


def follow_requires_grad(runtime: Runtime) -> None:
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


def _refuse_late(runtime: Runtime, changed: Sequence[ParamInfo]) -> None:
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


def _apply(runtime: Runtime, changed: Sequence[ParamInfo]) -> None:
    thawed = {id(member) for member in changed if member.is_frozen}
    parts = {
        group: [member for member in group.members if id(member) in thawed]
        for group in runtime.groups
        if not group.trainable
    }
    parts = {group: members for group, members in parts.items() if members}
    if held := [group for group in parts if group.is_in_block]:
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
    if new and optimizer is not None:
        optimizer.regroup(new)


def _divide(
    runtime: Runtime, unit: str, group: ParamGroup, thawed: list[ParamInfo] | None
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


class Structure:
    """Checks that a program has not added or replaced parameters of a wrapped model.

    Args:
        ignores_new_params: Whether to ignore parameters that are added later, with a warning.
    """

    def __init__(self, *, ignores_new_params: bool) -> None:
        self._ignores_new_params = ignores_new_params
        self._seen: list[tuple[nn.Module, list[int]]] = []
        # Added after wrapping, but frozen, so that they need no reduction.
        self._frozen_new_params: list[tuple[str, nn.Parameter]] = []

    def check(self, runtime: Runtime) -> None:
        """Raise an error if a program has added parameters to the model or replaced their memory.

        Args:
            runtime: The runtime of the model, the same in every call.

        Raises:
            UsageError: The program has added a parameter or replaced one's memory.
        """
        if not self._seen or any(_holds(module) != held for module, held in self._seen):
            new_params = _params_added_to(runtime.model, runtime.groups)
            _refuse_trained(new_params, only_warn=self._ignores_new_params)
            self._frozen_new_params = [
                (name, param) for name, param in new_params if not param.requires_grad
            ]
            self._seen = [(module, _holds(module)) for module in runtime.model.modules()]
        elif self._frozen_new_params:
            _refuse_trained(self._frozen_new_params, only_warn=self._ignores_new_params)
        _refuse_moved(runtime.groups)


def _holds(module: nn.Module) -> list[int]:
    """Return the ids of a module's own parameters and submodules.

    The objects are kept alive elsewhere, so that no other object gets the same id.
    """
    return [id(held) for held in held_by(module)]


def _params_added_to(
    model: nn.Module, groups: Sequence[ParamGroup]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a model that no group holds, with their names."""
    known = {id(member.param) for group in groups for member in group.members}
    if all(id(param) in known for param in model.parameters()):
        return []
    return [(name, param) for name, param in model.named_parameters() if id(param) not in known]


def _refuse_trained(new_params: Sequence[tuple[str, nn.Parameter]], *, only_warn: bool) -> None:
    """Raise an error if a parameter that was added after wrapping requires a gradient."""
    added = next((each for each in new_params if each[1].requires_grad), None)
    if added is None:
        return
    new, param = added
    if not isinstance(param, nn.Parameter):
        raise UsageError(
            f"parameter '{new}' of a wrapped model is replaced by a tensor, as by "
            "torch.func.functional_call.",
            "The engine reduces gradients and updates weights of its own parameters only.",
            "call functional_call with a copy of the model that is not wrapped.",
        )
    if only_warn:
        log_once(
            f"parameter '{new}' joined the model after initialize(): each rank keeps it whole, and "
            "nothing reduces its gradient or updates it.",
            logging.WARNING,
        )
        return
    raise UsageError(
        f"parameter '{new}' joined the model after it was wrapped.",
        "Its gradient would not be reduced, nor its values kept equal on all ranks.",
        "change the model (adapters, resized embeddings, new heads) before initialize() or "
        "DeepSeekZeRO3 wraps it.",
    )


def _refuse_moved(groups: Sequence[ParamGroup]) -> None:
    for group in groups:
        if group.is_sharded or group.is_in_block:
            continue  # sharded parameters check themselves (sharded_parameter.py)
        start = group.weight.memory.data_ptr()
        step = group.weight.memory.element_size()
        for member in group.members:
            if member.param.data_ptr() != start + member.slot.start * step and member.slot.numel:
                raise UsageError(
                    f"the memory of parameter '{member.name}' was replaced after the model was "
                    f"wrapped; it is now {member.param.dtype}, {tuple(member.param.shape)} on "
                    f"{member.param.device}.",
                    "Casting or moving the model, or assigning to `.data`, parts it from what the "
                    "optimizer updates.",
                    "cast, move and resize before wrapping; change values in place (`copy_`, "
                    "load_state_dict).",
                )


def lost_at_reshard(members: Sequence[ParamInfo], full: FlatBuffer) -> UsageError | None:
    """Return an error if a reshard would lose new values of a parameter, else None.

    Also log a warning for each parameter that the program changed in place.

    Args:
        members: The parameters of a group that is about to be resharded.
        full: The gathered buffer, which holds the group's old values.
    """
    error = _error_of_lost_values(members, full)
    _warn_of_lost_changes(members)
    return error


def _error_of_lost_values(members: Sequence[ParamInfo], full: FlatBuffer) -> UsageError | None:
    """Return an error for the first parameter that was moved to other memory with other values.

    The same values in another dtype do not count, because some layers cast their parameters in each
    forward.
    """
    start = full.memory.data_ptr()
    step = full.memory.element_size()
    for member in members:
        param = member.param
        slot = member.slot
        is_in_place = param.data_ptr() == start + slot.start * step
        if is_in_place or not slot.numel or type(param) is ShardedParameter:
            continue
        value = param.data
        gathered = full.view(slot)
        if value.shape != gathered.shape or not torch.equal(gathered.to(value), value):
            return UsageError(
                f"the memory of parameter '{member.name}' was replaced by other values during "
                "forward or backward.",
                "At stage 3 a block uses a gathered copy of its parameters. The copy is freed "
                "after the block, so the new values would be lost.",
                "assign them inside `with deepseek_zero.zero.GatheredParameters(param, "
                "modifier_rank=0):` on all ranks, or compute with the changed tensor and leave the "
                "parameter as it is.",
            )
    return None


def _warn_of_lost_changes(members: Iterable[ParamInfo]) -> None:
    for member in members:
        if member.was_written() and not member.has_warned:
            member.has_warned = True
            log_once(
                f"parameter '{member.name}' was changed in place during forward or backward, for "
                "example by max_norm of an embedding.  At stage 3 such a change is lost: the next "
                "gather or update overwrites it.\n"
                "  What to do: compute with a changed copy of the parameter, or "
                "change it between steps inside "
                "deepseek_zero.zero.GatheredParameters(param, modifier_rank=0).",
                logging.WARNING,
            )


def refuse_unused(runtime: Runtime) -> None:
    """Raise an error if a trainable parameter got no gradient in a backward.

    Called if `ignore_unused_parameters` is false.

    Args:
        runtime: The runtime of the model, whose backward ends.

    Raises:
        UsageError: A trainable parameter got no gradient.
    """
    arrived = {number for unit in runtime.units for number in unit.arrived}
    members = [member for group in runtime.trained_groups for member in group.members]
    unused = [
        member.name
        for member in members
        if id(member.param) not in arrived and member.param.requires_grad
    ]
    if unused:
        raise UsageError(
            f"{len(unused)} parameters got no gradient in this backward, among them '{unused[0]}'.",
            "ignore_unused_parameters is false: an unused parameter is an error.",
            "use them in forward, freeze them (requires_grad_(False)), or set "
            "ignore_unused_parameters to true.",
        )
