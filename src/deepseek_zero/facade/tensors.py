"""DeepSpeed's `safe_get_*` and `safe_set_*`: weights, gradients and optimizer state of sharded parameters, in fp32.

`full`: the whole value; collective, every rank calls it with the same parameter.  `local`: this rank's part, flat.
Each is one call of the rooms below; re-exported by `deepseek_zero.utils`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..optim import access
from ..sharding.access import full_grad, full_master


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole fp32 master of a parameter; None for frozen ones.  Collective."""
    found = full_master(param)
    return found.float() if found is not None else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole reduced gradient, between backward and step; None otherwise.  Collective.

    Under fp16 it is still multiplied by the loss scale, as it is held.
    """
    return full_grad(param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A whole element-wise optimizer state ("exp_avg"); None before the first step.  Collective."""
    return access.full_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's master and weight; every rank passes the same whole value."""
    access.set_full_master(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's reduced gradient; every rank passes the same whole value."""
    access.set_grad(param, value, local=False)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace an element-wise optimizer state; every rank passes the same whole value."""
    access.set_full_state(param, value, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the fp32 master, flat; None for frozen parameters."""
    found = access.local_master(param)
    return found.float() if found is not None else None


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the reduced gradient, flat, between backward and step; None otherwise."""
    return access.local_grad(param)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of an optimizer state, flat; None where it has none."""
    return access.local_state(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of master and weight, flat.  Collective: other ranks' copies follow."""
    access.set_local_master(param, value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the reduced gradient, flat."""
    access.set_grad(param, value, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of an optimizer state, flat."""
    access.set_local_state(param, value, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace whole gradients by a function of (gradient, parameter), the same on every rank.  Collective."""
    with torch.no_grad():
        for param in param_list:
            grad = full_grad(param)
            if grad is not None:
                access.set_grad(param, update_func(grad, param), local=False)
