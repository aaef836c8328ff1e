"""Read and write the sharded states of a parameter.

`safe_*_full_*` reads or writes a full value: every rank calls it with the same parameter.
`safe_*_local_*` reads or writes this rank's shard, flat. `deepseek_zero.utils` re-exports these
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..extensions import param_states
from ..extensions.param_states import full_grad, full_master
from ..sharding.param_group import ParamGroup
from ..sharding.sharded_parameter import owner_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the full fp32 main weight of a parameter, in the parameter's shape.

    Returns:
        A new tensor, or None for a frozen parameter.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    found = full_master(param)
    return found.float() if found is not None else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full reduced gradient of a parameter, in the parameter's shape.

    Under fp16 it is still multiplied by the loss scale. Inside `no_sync`, before the reduction, it
    is this rank's own gradient.

    Returns:
        The gradient between backward and step; None at any other time.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    found = full_grad(param)
    owner = owner_of(param)
    if found is not None or not isinstance(owner, ParamGroup) or owner.plan.grad is None:
        return found
    own = owner.gradient.summand.collected(owner.index[id(param)])
    return own.view(param.shape).float().clone() if own is not None else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a full optimizer state of a parameter, in the parameter's shape.

    Args:
        param: A parameter of a wrapped model.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Returns:
        An fp32 tensor, or None before the first step and for an unknown name.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    return param_states.full_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the main weight and the weight of a parameter.

    Args:
        param: A parameter of a wrapped model.
        value: The full value, the same on every rank.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    param_states.set_full_master(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the reduced gradient of a parameter.

    Args:
        param: A parameter of a wrapped model.
        value: The full gradient, the same on every rank.
    """
    param_states.set_grad(param, value, local=False)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace an optimizer state of a parameter.

    Args:
        param: A parameter of a wrapped model.
        value: The full state, the same on every rank.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Raises:
        UsageError: The optimizer has no such state.

    Note:
        Collective: every rank must call it with the same parameter.
    """
    param_states.set_full_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of the fp32 main weight, flat.

    None for a frozen parameter.
    """
    found = param_states.local_master(param)
    return found.float() if found is not None else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's shard of the reduced gradient, flat.

    None except between backward and step.
    """
    return param_states.local_grad(param)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's shard of an optimizer state, flat.

    Args:
        param: A parameter of a wrapped model.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Returns:
        A copy, or None if this rank has no such state.
    """
    return param_states.local_state(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's shard of the main weight and the weight.

    Args:
        param: A parameter of a wrapped model.
        value: The new shard, flat.

    Note:
        Collective: the other ranks update their copies of the weight.
    """
    param_states.set_local_master(param, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's shard of the reduced gradient.

    Args:
        param: A parameter of a wrapped model.
        value: The new shard, flat.
    """
    param_states.set_grad(param, value, local=True)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Replace this rank's shard of an optimizer state.

    Args:
        param: A parameter of a wrapped model.
        value: The new shard, flat.
        optim_state_key: Name of an element-wise state, such as "exp_avg".

    Raises:
        UsageError: The optimizer has no such state.
    """
    param_states.set_local_state(param, value, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the full gradients of several parameters by a function of each.

    Args:
        param_list: Parameters of a wrapped model. Those without a gradient are skipped.
        update_func: Returns the new gradient from (gradient, parameter); the same on every rank.

    Note:
        Collective: every rank must call it with the same parameters.
    """
    with torch.no_grad():
        for param in param_list:
            grad = full_grad(param)
            if grad is not None:
                param_states.set_grad(param, update_func(grad, param), local=False)
