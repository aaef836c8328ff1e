"""DeepSpeed's words for Muon: its functions over one matrix, and which parameters it takes.

The iteration and the optimizer are in optimizers/muon.py; every class of DeepSpeed's stands for
that one.
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
    """Say on each parameter whether Muon takes it (`use_muon`), as DeepSpeed does: matrices but
    embeddings and `lm_head`.  `Muon.divide_groups` follows the marks.
    """
    for name, param in model.named_parameters():
        is_outer = any(word in name.lower() for word in ("embed", "lm_head"))
        param.use_muon = param.ndim >= 2 and not is_outer  # type: ignore[attr-defined]


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Return a matrix, or a stack of them, with singular values near 1."""
    return orthogonalize(G, "standard", steps)


def zeropower_via_gram_newtonschulz(G: Tensor, steps: int) -> Tensor:
    """Return the same by products of rows, where that is less work."""
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
    """Return the direction of a step, in the gradient's dtype; `grad` and `momentum` are changed.

    num_heads: the rows are so many heads, orthogonalised one by one.  is_expert_group: the first of
    three dims counts matrices, as three dims always do here.  A gradient that is not finite is
    returned, and `momentum` stays.
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
                fix="give a matrix whose rows are a multiple of num_heads.",
            )
        matrices = matrices.reshape(num_heads, -1, matrices.shape[-1])
    direction = orthogonalize(matrices, ns_method, ns_steps) * factor_of(matrices)
    return direction.reshape(whole.shape).to(grad.dtype)


def adam_update(
    grad: Tensor, buf1: Tensor, buf2: Tensor, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """Return Adam's direction after so many steps; the two moments are changed."""
    buf1.lerp_(grad, 1 - betas[0])
    buf2.lerp_(grad.square(), 1 - betas[1])
    direction: Tensor = (buf1 / (1 - betas[0] ** step)) / (
        (buf2 / (1 - betas[1] ** step)).sqrt() + eps
    )
    return direction
