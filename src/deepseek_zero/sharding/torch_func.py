"""Forwards of units that transforms of torch.func (grad, vjp, jvp, jacrev) differentiate.

A transform computes its own derivatives, but none of a parameter, so no hook is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.device import outside_torch_func
from ..base.errors import NotBuiltError
from .unit import Unit


def begin_in_torch_func(unit: Unit, begin: Callable[..., object]) -> None:
    """Begin the forward of a unit that a transform differentiates.

    Args:
        unit: The unit whose forward begins.
        begin: The function that begins an ordinary forward of the unit.

    Raises:
        NotBuiltError: The weights of the unit are sharded.
    """
    if unit.sharded:
        raise NotBuiltError(
            f"torch.func differentiates the forward of '{unit.name}', whose weights are sharded.",
            "What it keeps for its backward are the weights themselves, which are released before.",
            "use loss.backward() or torch.autograd.grad at stage 3, or stages 0 to 2.",
        )
    with outside_torch_func(), torch.no_grad():
        begin(unit, (), {})


def end_in_torch_func(unit: Unit, end: Callable[..., object]) -> None:
    """End the forward of a unit that a transform differentiates.

    Args:
        unit: The unit whose forward ends.
        end: The function that ends an ordinary forward of the unit.
    """
    if not unit.sharded:  # otherwise `begin_in_torch_func` raised
        with outside_torch_func(), torch.no_grad():
            end(unit, (), ())
