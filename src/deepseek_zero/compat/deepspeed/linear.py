"""DeepSpeed's `deepspeed.runtime.zero.linear`: a linear layer and its function.

The layer saves views of its weight for backward. Engines do not need it, because units gather
weights for backward. It is for programs that call it. Backward uses the autocast state of forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """Compute `input @ weight.T + bias`, also under torch.func transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `input @ weight.T + bias`.

        Args:
            input: Shape ``(..., in_features)``.
            weight: Shape ``(out_features, in_features)``.
            bias: Shape ``(out_features,)``.

        Returns:
            The output, shape ``(..., out_features)``.
        """
        product = input.matmul(weight.t())
        # Under autocast the product may have a lower precision than the bias.
        return product if bias is None else product + bias.to(product.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors for backward and the autocast state.

        Args:
            ctx: Context of the autograd function.
            inputs: Arguments of `forward`.
            output: Result of `forward`.
        """
        kind = output.device.type
        ctx._dtype = torch.get_autocast_dtype(kind)
        ctx._fwd_used_autocast = torch.is_autocast_enabled(kind)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compute the gradients of the forward's arguments.

        Args:
            ctx: Context in which `setup_context` has saved the tensors.
            *grads: The gradient of the output.

        Returns:
            The gradients of input, weight and bias, each None if it is not required.
        """
        (grad,) = grads
        input, weight, *rest = ctx.saved_tensors
        bias = rest[0] if rest else None
        with torch.autocast(grad.device.type, enabled=ctx._fwd_used_autocast, dtype=ctx._dtype):
            rows = grad.reshape(-1, grad.shape[-1])
            columns = input.reshape(-1, input.shape[-1])
            of_input = grad.matmul(weight) if ctx.needs_input_grad[0] else None
            of_weight = rows.t().matmul(columns) if ctx.needs_input_grad[1] else None
            of_bias = rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`.

    Args:
        input: Shape ``(..., in_features)``.
        weight: Shape ``(out_features, in_features)``.
        bias: Shape ``(out_features,)``.

    Returns:
        The output, shape ``(..., out_features)``.
    """
    result: Tensor = LinearFunctionForZeroStage3.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


class LinearModuleForZeroStage3(nn.Linear):
    """`nn.Linear` that computes with `LinearFunctionForZeroStage3`, DeepSpeed's name for it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`."""
        return zero3_linear_wrap(input, self.weight, self.bias)
