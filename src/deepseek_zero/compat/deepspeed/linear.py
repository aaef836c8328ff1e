"""DeepSpeed's `deepspeed.runtime.zero.linear`: a linear layer that keeps views of its weight, and
no copy.

Units gather a weight for backward by themselves, so that torch's own linear serves an engine; these
names are for programs that call them.  Backward runs in the autocast state of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """`input @ weight.T + bias`, also below torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product; input: (..., in), weight: (out, in), bias: (out)."""
        product = input.matmul(weight.t())
        # Autocast may have made it narrower
        return product if bias is None else product + bias.to(product.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what backward needs, and whether the forward ran under autocast."""
        kind = output.device.type
        ctx._dtype = torch.get_autocast_dtype(kind)
        ctx._fwd_used_autocast = torch.is_autocast_enabled(kind)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of input, weight and bias, those that are asked for."""
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
    """Return `input @ weight.T + bias`."""
    result: Tensor = LinearFunctionForZeroStage3.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


class LinearModuleForZeroStage3(nn.Linear):
    """A linear layer by that function."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, and the bias."""
        return zero3_linear_wrap(input, self.weight, self.bias)
