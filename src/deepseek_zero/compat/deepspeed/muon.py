"""DeepSpeed's functions for Muon: updates of a matrix, choice of parameters.

The iteration and the optimizer are in optimizers/muon.py. All of DeepSpeed's classes are aliases of
that optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
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

    The attribute is true for parameters with two or more dimensions, unless their name contains
    "embed" or "lm_head". `Muon.divide_groups` reads the attribute.
    """
    for name, param in model.named_parameters():
        is_outer = any(word in name.lower() for word in ("embed", "lm_head"))
        param.use_muon = param.ndim >= 2 and not is_outer  # type: ignore[attr-defined]


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Orthogonalize matrices by Newton-Schulz iterations.

    The result has the singular vectors of `G` and singular values near 1.

    Args:
        G: Shape ``(..., rows, columns)``.
        steps: Number of Newton-Schulz iterations.

    Returns:
        The orthogonalized matrices, with the shape of `G`.
    """
    return orthogonalize(G, "standard", steps)


def zeropower_via_gram_newtonschulz(G: Tensor, steps: int) -> Tensor:
    """Orthogonalize matrices by Newton-Schulz iterations on their Gram matrices.

    The result has the singular vectors of `G` and singular values near 1. If an iteration on
    ``G @ G.T`` is not cheaper, the function computes `zeropower_via_newtonschulz5` instead.

    Args:
        G: Shape ``(..., rows, columns)``.
        steps: Number of Newton-Schulz iterations.

    Returns:
        The orthogonalized matrices, with the shape of `G`.
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

    `grad` and `momentum` are changed in place. If the gradient is not finite, the function returns
    the gradient itself and does not change `momentum`.

    Args:
        grad: Gradient of a matrix, or of a batch of matrices.
        momentum: Momentum buffer in the shape of `grad`.
        beta: Decay of the momentum.
        ns_steps: Number of Newton-Schulz iterations.
        nesterov: Whether to use Nesterov momentum.
        ns_method: "standard" or "gram".
        is_expert_group: Ignored; a tensor with three dimensions is always a batch of matrices.
        num_heads: Number of attention heads into which the rows are divided. The rows of each head
            are orthogonalized separately. None orthogonalizes the whole matrix.

    Returns:
        The direction. The update subtracts it from the weight, multiplied by the learning rate.

    Raises:
        ConfigError: `num_heads` is given, and the gradient is not a matrix or its number of rows is
            not a multiple of `num_heads`.
    """
    if not bool(torch.isfinite(grad).all()):
        return grad
    momentum.lerp_(grad, 1 - beta)
    update = grad.lerp_(momentum, beta) if nesterov else momentum
    matrices = whole = as_matrices(update)
    if num_heads is not None:
        if matrices.ndim != 2 or num_heads < 1 or len(matrices) % num_heads:
            raise ConfigError(
                f"Per-head Muon cannot divide a weight of shape {tuple(update.shape)} into "
                f"{num_heads} heads.",
                fix="pass a matrix with a multiple of num_heads rows.",
            )
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
        buf1: First moment, an exponential moving average of gradients.
        buf2: Second moment, an exponential moving average of squared gradients.
        step: Number of the step, counted from 1.
        betas: Decay rates of the first and the second moment.
        eps: Small number that is added to the denominator.

    Returns:
        The direction, with the shape of `grad`. It is not multiplied by the learning rate.
    """
    buf1.lerp_(grad, 1 - betas[0])
    buf2.lerp_(grad.square(), 1 - betas[1])
    direction: Tensor = (buf1 / (1 - betas[0] ** step)) / (
        (buf2 / (1 - betas[1] ** step)).sqrt() + eps
    )
    return direction
