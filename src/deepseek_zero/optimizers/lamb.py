"""LAMB: Adam with one trust ratio per tensor.

The source is You et al., arXiv 1904.00962, algorithm 2. The ratio needs the norm of a whole tensor,
so this optimizer must receive whole tensors (granularity "tensor").
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepseek_zero.base.errors import ConfigError

from .common import Closure, adam_state, evaluated


@dataclasses.dataclass(frozen=True)
class LambSettings:
    """The arguments of `Lamb`, with DeepSpeed's names.

    Attributes:
        lr: The learning rate, which also multiplies the trust ratio.
        betas: The decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: The coefficient of the decay, which is part of the update.
        bias_correction: Whether to correct the bias of the moments.
        max_coeff: The upper bound of the trust ratio.
        min_coeff: The lower bound of the trust ratio.

    Raises:
        ConfigError: A value is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    max_coeff: float = 10.0
    min_coeff: float = 0.01

    def __post_init__(self) -> None:
        sound = (
            self.lr >= 0
            and self.eps >= 0
            and self.weight_decay >= 0
            and len(self.betas) == 2
            and all(0 <= b < 1 for b in self.betas)
        )
        if not sound or not 0 < self.min_coeff <= self.max_coeff:
            raise ConfigError(
                f"Lamb cannot use {self}.",
                fix=(
                    "give lr, eps, weight_decay >= 0, both betas in [0, 1) and 0 < min_coeff <= "
                    "max_coeff."
                ),
            )


class Lamb(Optimizer):
    """LAMB, a variant of Adam with one trust ratio per parameter, for large batches.

    For a parameter p with the moments m and v of Adam (corrected for their bias if
    `bias_correction` is true), the update is ``r = m / (sqrt(v) + eps) + weight_decay * p`` and ``p
    = p - lr * clamp(|p| / |r|, min_coeff, max_coeff) * r``. The clamped ratio of the two L2 norms
    is the trust ratio. Norms are computed over the whole parameter. If either norm is 0, the trust
    ratio is 1. The state of a parameter consists of `step`, `exp_avg` and `exp_avg_sq`.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate, by which the trust ratio is multiplied.
        settings: The other fields of `LambSettings`, as keyword arguments.

    Raises:
        ConfigError: A value is out of range.
        TypeError: `LambSettings` has no field of the name of a keyword argument.
    """

    granularity: ClassVar[Literal["tensor"]] = "tensor"
    Settings: ClassVar[type[LambSettings]] = LambSettings

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        chosen = LambSettings(lr=lr, **settings)
        super().__init__(params, {**dataclasses.asdict(chosen), "betas": tuple(chosen.betas)})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        The gradients are not changed.

        Args:
            closure: A function that computes the gradients and returns the loss. None uses the
                current gradients.

        Returns:
            The loss that `closure` returned; None if `closure` is None.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            scratch = _Scratch(used)
            for parameter in used:
                self._update(parameter, group, scratch.like(parameter))
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], ratio: Tensor) -> None:
        state = self.state[parameter]
        # `step` is on the CPU, so that reading it never waits for the device
        adam_state(state, parameter, torch.device("cpu"))
        grad = parameter.grad
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        assert grad is not None
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correct1 = 1.0
        correct2 = 1.0
        if group["bias_correction"]:
            step = float(state["step"])
            correct1 = 1 - beta1**step
            correct2 = 1 - beta2**step
        torch.sqrt(square, out=ratio)
        ratio.div_(math.sqrt(correct2)).add_(group["eps"])
        torch.div(mean, ratio, out=ratio)
        ratio.div_(correct1).add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(ratio.mul_(_trust(parameter, ratio, group) * group["lr"]))


class _Scratch:
    """One buffer of the largest tensor, used for each tensor in turn during a step."""

    def __init__(self, tensors: list[Tensor]) -> None:
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for tensor in tensors:
            key = tensor.device, tensor.dtype
            sizes[key] = max(sizes.get(key, 0), tensor.numel())
        self._flat = {
            key: torch.empty(numel, device=key[0], dtype=key[1]) for key, numel in sizes.items()
        }

    def like(self, tensor: Tensor) -> Tensor:
        return self._flat[tensor.device, tensor.dtype][: tensor.numel()].view(tensor.shape)


def _trust(weight: Tensor, update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the clamped ratio of norms as a 0-dim tensor, without a device sync."""
    weight_norm = torch.linalg.vector_norm(weight)
    update_norm = torch.linalg.vector_norm(update)
    bounded = (weight_norm / update_norm).clamp_(group["min_coeff"], group["max_coeff"])
    return torch.where((weight_norm > 0) & (update_norm > 0), bounded, torch.ones_like(bounded))
