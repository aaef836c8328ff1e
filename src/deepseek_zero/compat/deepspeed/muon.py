"""DeepSpeed's functions for Muon: updates of a matrix, choice of parameters.

The iteration and the optimizer are in optimizers/muon.py. All of DeepSpeed's classes are aliases of
that optimizer.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.log import log_first
from ...optimizers.muon import Muon, as_matrices, factor_of, orthogonalize

__all__ = [
    "NS_METHODS",
    "Muon",
    "MuonWithAuxAdam",
    "SingleDeviceMuon",
    "SingleDeviceMuonWithAuxAdam",
    "adam_update",
    "mark_parameters",
    "muon_update",
    "zeropower_via_gram_newtonschulz",
    "zeropower_via_newtonschulz5",
]

NS_METHODS = {"standard", "gram"}
MuonWithAuxAdam = SingleDeviceMuon = SingleDeviceMuonWithAuxAdam = Muon


def mark_parameters(model: nn.Module) -> None:
    """Set the attribute `use_muon` of each parameter, as DeepSpeed does.

    The attribute is True for a parameter with two or more dimensions whose lower-case name contains
    neither "embed" nor "lm_head". It is False for all others. If a parameter has several names,
    only the first one counts. `Muon.divide_groups` reads the attribute.

    Args:
        model: The model whose parameters get the attribute.
    """
    for name, param in model.named_parameters():
        is_outer = any(word in name.lower() for word in ("embed", "lm_head"))
        param.use_muon = param.ndim >= 2 and not is_outer  # type: ignore[attr-defined]


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Orthogonalize matrices by Newton-Schulz iterations.

    The result has the singular vectors of `G`. After five steps, its singular values are about 0.7
    to 1.2, except those that are very small in `G`. A zero matrix stays zero.

    Args:
        G: Shape ``(..., rows, columns)``.
        steps: Number of Newton-Schulz iterations.

    Returns:
        The orthogonalized matrices, with the shape and dtype of `G`. On a device other than the
        CPU, they are computed in bf16.
    """
    return orthogonalize(G, "standard", steps)


def zeropower_via_gram_newtonschulz(G: Tensor, steps: int) -> Tensor:
    """Orthogonalize matrices by Newton-Schulz iterations on their Gram matrices.

    The result has the singular vectors of `G`. After five steps, its singular values are about 0.7
    to 1.2, except those that are very small in `G`. A zero matrix stays zero. Unless one side of
    the matrices is at least twice as long as the other, the function iterates on `G` itself, as
    `zeropower_via_newtonschulz5` does.

    Args:
        G: Shape ``(..., rows, columns)``.
        steps: Number of Newton-Schulz iterations.

    Returns:
        The orthogonalized matrices, with the shape and dtype of `G`. On a device other than the
        CPU, they are computed in fp16, or in bf16 if the function iterates on `G` itself.
    """
    return orthogonalize(G, "gram", steps)


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """Return Muon's update direction for one step, in the dtype of the gradient.

    `momentum` is changed in place, and so is `grad` if `nesterov` is true. If an element of the
    gradient is not finite, the function returns `grad` itself and changes neither tensor.

    Args:
        grad: Gradient of a matrix (two dimensions) or of a batch of matrices (three). A tensor with
            more dimensions is treated as one matrix, whose rows are the first dimension.
        momentum: Momentum buffer with the shape and dtype of `grad`.
        beta: Decay rate of the momentum.
        ns_steps: Number of Newton-Schulz iterations.
        nesterov: Whether to use Nesterov momentum.
        ns_method: "standard" or "gram". As in DeepSpeed, any other value means "standard", and
            a warning is logged once.
        is_expert_group: Ignored; a tensor with three dimensions is always a batch of matrices.
        num_heads: Number of attention heads into which the rows are divided. The rows of each head
            are orthogonalized separately. None orthogonalizes the whole matrix.

    Returns:
        The direction, multiplied by ``sqrt(max(1, rows / columns))`` of the orthogonalized
        matrices. It has the shape of `grad`, or two dimensions if `grad` has more than three. The
        optimizer multiplies it by the learning rate and subtracts the product from the weight.

    Raises:
        ConfigError: `num_heads` is less than 1 or does not divide the number of rows, or it is
            given for a batch of matrices. No tensor is then changed.
    """
    if not bool(torch.isfinite(grad).all()):
        return grad
    whole = as_matrices(grad)
    if num_heads is not None and (whole.ndim != 2 or num_heads < 1 or len(whole) % num_heads):
        raise ConfigError(
            f"Per-head Muon cannot divide a weight of shape {tuple(grad.shape)} into "
            f"{num_heads} heads.",
            fix="pass a matrix with a multiple of num_heads rows.",
        )
    if ns_method not in NS_METHODS:
        log_first(f"muon_update: ns_method {ns_method!r} means 'standard'.", logging.WARNING)
        ns_method = "standard"
    momentum.lerp_(grad, 1 - beta)
    matrices = as_matrices(grad.lerp_(momentum, beta) if nesterov else momentum)
    if num_heads is not None:
        matrices = matrices.reshape(num_heads, -1, matrices.shape[-1])
    direction = orthogonalize(matrices, ns_method, ns_steps) * factor_of(matrices)
    return direction.reshape(whole.shape).to(grad.dtype)


def adam_update(
    grad: Tensor, buf1: Tensor, buf2: Tensor, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """Return Adam's update direction for one step.

    The moments `buf1` and `buf2` are changed in place.

    Args:
        grad: Gradient of the parameter.
        buf1: First moment, an exponential moving average of gradients. Like `buf2`, it has the
            shape and dtype of `grad`.
        buf2: Second moment, an exponential moving average of squared gradients.
        step: Number of the step, counted from 1.
        betas: Decay rates of the first and the second moment.
        eps: Small number that is added to the root of the second moment.

    Returns:
        The direction, with the shape of `grad`. It is not multiplied by the learning rate.
    """
    buf1.lerp_(grad, 1 - betas[0])
    buf2.lerp_(grad.square(), 1 - betas[1])
    direction: Tensor = (buf1 / (1 - betas[0] ** step)) / (
        (buf2 / (1 - betas[1] ** step)).sqrt() + eps
    )
    return direction
