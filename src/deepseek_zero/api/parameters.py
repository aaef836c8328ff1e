"""Access to the sharded states of a parameter.

`safe_*_full_*` reads or writes a whole value: every rank calls it with the same parameter.
`safe_*_local_*` reads or writes this rank's part, flat.  `deepseek_zero.utils` re-exports them.
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
    """Return a parameter's whole master in fp32, in the parameter's shape; None for a frozen one.
    Collective.
    """
    found = full_master(param)
    return found.float() if found is not None else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return a parameter's whole reduced gradient, in its shape, between backward and step; None at
    any other time.  Collective.

    Under fp16 it is still multiplied by the loss scale, as it is held.  Inside no_sync, where
    nothing is reduced yet, it is this rank's own.
    """
    found = full_grad(param)
    owner = owner_of(param)
    if found is not None or not isinstance(owner, ParamGroup) or owner.plan.grad is None:
        return found
    own = owner.gradient.summand.collected(owner.index[id(param)])
    return own.view(param.shape).float().clone() if own is not None else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole element-wise optimizer state ("exp_avg"), in the parameter's shape; None
    before the first step.  Collective.
    """
    return param_states.full_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's master and weight by a whole value, which every rank passes alike.
    Collective.
    """
    param_states.set_full_master(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's reduced gradient by a whole value, which every rank passes alike."""
    param_states.set_grad(param, value, local=False)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace an element-wise optimizer state by a whole value, which every rank passes alike."""
    param_states.set_full_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master in fp32, flat; None for a frozen parameter."""
    found = param_states.local_master(param)
    return found.float() if found is not None else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the reduced gradient, flat, between backward and step; None at any
    other time.
    """
    return param_states.local_grad(param)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state, flat; None where it has none."""
    return param_states.local_state(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of master and weight, flat.  Collective: other ranks' copies
    follow.
    """
    param_states.set_local_master(param, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the reduced gradient, flat."""
    param_states.set_grad(param, value, local=True)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Replace this rank's part of an optimizer state, flat."""
    param_states.set_local_state(param, value, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace whole gradients by a function of (gradient, parameter), the same on every rank.
    Collective.
    """
    with torch.no_grad():
        for param in param_list:
            grad = full_grad(param)
            if grad is not None:
                param_states.set_grad(param, update_func(grad, param), local=False)
