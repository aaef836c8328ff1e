"""Autograd functions of two plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

T = TypeVar("T")
Tensors = tuple[Tensor, ...]


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> Any:
        ctx.backward_of = backward
        return forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_of(*grads)


def with_backward(
    forward: Callable[..., T], backward: Callable[..., tuple[Tensor | None, ...]], *tensors: Tensor
) -> T:
    """Apply a linear function to tensors, with a given function as its backward.

    Args:
        forward: Computes a tensor, or a tuple of tensors, from `tensors`.
        backward: Computes a tuple of the gradients of `tensors` from those of the results.
        *tensors: The arguments of `forward`.

    Returns:
        The result of `forward`, which requires a gradient if one of `tensors` does.
    """
    found: T = _WithBackward.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]
    return found
