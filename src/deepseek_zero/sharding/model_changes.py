"""Checks that raise if a program uses or changes a wrapped model in a way that loses values.

A parameter that is added after wrapping would be trained without synchronisation. If the memory of
a whole parameter is replaced (a cast, a move, `.data = ...`), the optimizer no longer updates it.
If the memory of a gathered parameter is replaced by other values, they are lost when its group is
resharded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..base.device import held_by, without_torch_function
from ..base.errors import UsageError
from ..base.log import log_once
from ..comm.agreement import agree, agree_on, values_in
from ..comm.collectives import Comm
from ..planner.auto_wrap_policy import BATCH_NORMS
from ..planner.plan import Plan
from .buffer import FlatBuffer
from .param_info import ParamInfo
from .sharded_parameter import ShardedParameter


@dataclass(frozen=True)
class ModelRules:
    """The behavior of one wrapped model that an API chooses and the plan does not contain.

    Attributes:
        allows_unmanaged_params: Whether to ignore parameters that are added after wrapping, with a
            warning; otherwise they are an error.
        requires_scaled_loss: Whether a loss of the engine's own forward must be scaled before its
            backward.
        gathers_state_dict: `state_dict()` of the model gathers sharded parameters, which is a
            collective. Otherwise it is local, and sharded parameters are empty tensors.
    """

    allows_unmanaged_params: bool = False
    requires_scaled_loss: bool = False
    gathers_state_dict: bool = True


class RefusesCopies:
    """Base class of the hooks of a wrapped model, whose modules cannot be copied.

    Raises:
        UsageError: An instance is copied or pickled.
    """

    __torch_unserializable__ = True  # torch.save omits hooks of tensors without a warning

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _not_copied("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_copied("pickle")


def _not_copied(operation: str) -> UsageError:
    return UsageError(
        f"{operation} of a wrapped model is not possible.",
        "Its modules carry the hooks of one engine, whose communication cannot be copied.",
        "build a second model and give it `model.state_dict()`, which gathers full tensors on all "
        "ranks; or copy the model before it is wrapped.",
    )


class WrappedGroup(Protocol):
    """Interface of a parameter group (`ParamGroup`), as the checks of this module use it."""

    @property
    def members(self) -> Sequence[ParamInfo]: ...
    @property
    def weight(self) -> FlatBuffer: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def is_pinned(self) -> bool: ...


class Structure:
    """Checks that a program has not added or replaced parameters of a wrapped model."""

    def __init__(
        self, model: nn.Module, groups: Sequence[WrappedGroup], *, ignores_new_params: bool = False
    ) -> None:
        """Record the modules and parameters of a model.

        Args:
            model: The wrapped model whose modules are recorded.
            groups: The parameter groups that hold the model's parameters.
            ignores_new_params: Whether to ignore parameters that are added later, with a warning.
        """
        self.model = model
        self.groups = list(groups)
        self._ignores_new_params = ignores_new_params
        self._seen: list[tuple[nn.Module, list[int]]] = []
        # Added after wrapping, but frozen, so that they need no reduction.
        self._frozen_new_params: list[tuple[str, nn.Parameter]] = []

    def follow(self, groups: Sequence[WrappedGroup]) -> None:
        """Check other parameter groups from now on, after parameters moved between groups.

        Args:
            groups: All parameter groups of the model.
        """
        self.groups = list(groups)

    def check(self) -> None:
        """Raise an error if a program has added parameters to the model or replaced their memory.

        Raises:
            UsageError: The program has added a parameter or replaced one's memory.
        """
        if not self._seen or any(_holds(module) != held for module, held in self._seen):
            new_params = _params_added_to(self.model, self.groups)
            _refuse_trained(new_params, only_warn=self._ignores_new_params)
            self._frozen_new_params = [
                (name, param) for name, param in new_params if not param.requires_grad
            ]
            self._seen = [(module, _holds(module)) for module in self.model.modules()]
        elif self._frozen_new_params:
            _refuse_trained(self._frozen_new_params, only_warn=self._ignores_new_params)
        _refuse_moved(self.groups)


def compare_ranks(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Raise an error on every rank if ranks differ in their model or settings.

    The comparison covers parameters (names, shapes, dtypes, order), buffers, units and settings.

    Args:
        model: The model before it is sharded.
        plan: The plan of the model, whose units and settings are compared.
        comm: The communicator of all ranks of the job.

    Raises:
        ModelMismatchError: Ranks differ.

    Note:
        Collective: every rank must call it.
    """
    why = (
        "Each rank holds a slice of the same flat buffers, so names, shapes, dtypes, order and "
        "settings must agree."
    )
    fix = "build the model and the configuration from the same arguments on every rank."
    agree_on(comm, values_in(plan.settings, "plan"), "what they are about to shard", why, fix)
    lines = [f"unit {unit.name}" for unit in plan.units]
    for name, param in model.named_parameters():
        lines.append(
            f"parameter {name} {tuple(param.shape)} {param.dtype} "
            f"requires_grad={param.requires_grad}"
        )
    lines += [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
        for name, buffer in model.named_buffers()
    ]
    agree(comm, lines, "what they are about to shard", why, fix)


def _holds(module: nn.Module) -> list[int]:
    """Return the ids of a module's own parameters and submodules.

    The objects are kept alive elsewhere, so that no other object gets the same id.
    """
    return [id(held) for held in held_by(module)]


def _params_added_to(
    model: nn.Module, groups: Sequence[WrappedGroup]
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


def _refuse_moved(groups: Sequence[WrappedGroup]) -> None:
    for group in groups:
        if group.is_sharded or group.is_pinned:
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


def frozen_or_unfrozen(groups: Iterable[WrappedGroup]) -> list[ParamInfo]:
    """Return the parameters whose `requires_grad` changed since ranks last compared it."""
    changed = []
    with without_torch_function():
        for group in groups:
            for member in group.members:
                if member.param.requires_grad is member.is_frozen:
                    changed.append(member)
    return changed


def error_of_lost_values(members: Sequence[ParamInfo], full: FlatBuffer) -> UsageError | None:
    """Return an error if a reshard would lose new values of a parameter, else None.

    The error names the first parameter that the program has moved to other memory with other
    values. The same values in another dtype do not count, because some layers cast their parameters
    in each forward.

    Args:
        members: The parameters of the group.
        full: The gathered buffer, which holds the group's old values.
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


def warn_of_lost_changes(members: Iterable[ParamInfo]) -> None:
    """Log a warning for each gathered parameter that the program changed in place.

    Args:
        members: The parameters of a group that is about to be resharded.
    """
    for member in members:
        if member.was_written() and not member.has_warned:
            member.has_warned = True
            log_once(
                f"parameter '{member.name}' was changed in place during forward or backward, for "
                "example by max_norm of an embedding.  At stage 3 such a change is lost: the next "
                "gather or update overwrites it.\n"
                "  What to do: use stage 2, compute with a changed copy of the parameter, or "
                "change it between steps inside "
                "deepseek_zero.zero.GatheredParameters(param, modifier_rank=0).",
                logging.WARNING,
            )


def refuse_unused(groups: Iterable[WrappedGroup], arrived: Collection[int]) -> None:
    """Raise an error if a trainable parameter got no gradient in a backward.

    Called if `ignore_unused_parameters` is false.

    Args:
        groups: The trained parameter groups.
        arrived: The ids of the parameters with a gradient.

    Raises:
        UsageError: A trainable parameter got no gradient.
    """
    members = [member for group in groups for member in group.members]
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


def explain_dtypes(error: BaseException, model: nn.Module, compute: torch.dtype) -> None:
    """Add a note to torch's error about mixed dtypes, because wrapping casts the weights only.

    Args:
        error: The error that ended the forward.
        model: The wrapped model.
        compute: The dtype of its weights.
    """
    if not isinstance(error, RuntimeError) or "type" not in str(error):
        return
    others = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_other = buffer.is_floating_point() and buffer.dtype != compute
            if is_other and not isinstance(module, BATCH_NORMS):
                others.append(f"'{prefix}.{name}'" if prefix else f"'{name}'")
    named = ", ".join(others[:3])
    if len(others) > 3:
        named += f" and {len(others) - 3} more"
    which = f" Buffers with another dtype are {named}." if others else ""
    error.add_note(
        f"[deepseek_zero] The weights were cast to {compute}. Tensors that forward creates keep "
        f"their dtype.{which}\n"
        "  What to do: cast them where they are used, as in `x + self.table.to(x.dtype)`, or cast "
        "the buffers before wrapping; torch_autocast casts both in each operation."
    )
