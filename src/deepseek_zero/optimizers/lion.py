"""Lion, the sign-momentum optimizer, with one moment instead of two.

The source is Chen et al., arXiv 2302.06675, program 1. It is element-wise, so a slice of a flat
buffer is updated exactly like the whole buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepseek_zero.base.device import PerDevice
from deepseek_zero.base.errors import ConfigError

from .common import Closure, evaluated

# [Note: tiles] The update needs two temporaries. Processing the slice in tiles keeps their size
# fixed. On a CPU, 2^15 elements stay in a core's cache and below the size from which torch splits
# an operation over threads; larger tiles were 3 to 9 times slower on two busy cores (20M elements).
# A GPU needs large launches.
_TILE_NUMEL = PerDevice(cpu=1 << 15, accelerator=1 << 23)


class Lion(Optimizer):
    """Lion, an optimizer whose update is the sign of an interpolated momentum.

    For a parameter p with gradient g and momentum m, the update is ``c = beta1 * m + (1 - beta1) *
    g``, ``p = p * (1 - lr * weight_decay) - lr * sign(c)`` and ``m = beta2 * m + (1 - beta2) * g``.
    The state of a parameter is `exp_avg`. The Lion paper recommends a learning rate that is 3 to 10
    times smaller than that of AdamW.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate, which is the size of each element's change without weight decay.
        betas: The interpolation factor of the update, and the decay rate of the momentum.
        weight_decay: The coefficient of the decoupled weight decay.
        maximize: Whether to maximize the objective.

    Raises:
        ConfigError: A value is out of range.
    """

    granularity: ClassVar[Literal["element"]] = "element"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        is_pair = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        if not lr >= 0 or not weight_decay >= 0 or not is_pair:
            raise ConfigError(
                f"Lion cannot use lr={lr}, betas={betas}, weight_decay={weight_decay}.",
                fix="give lr >= 0, weight_decay >= 0 and both betas in [0, 1).",
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        lr = float(group["lr"])
        (beta1, beta2) = group["betas"]
        keep = 1.0 - lr * group["weight_decay"]
        scratch: tuple[Tensor, Tensor] | None = None
        # One rounding per operation and no fused multiply-add (`alpha=`, lerp): a vectorized kernel
        # may fuse in its main loop but not in its tail, and then the result would depend on where a
        # slice is cut.
        grad = parameter.grad
        assert grad is not None
        if group.get("maximize"):
            grad = -grad
        for weight, part_of_grad, momentum in _tiles(parameter, grad, state["exp_avg"]):
            if scratch is None or scratch[0].shape != weight.shape:
                scratch = torch.empty_like(weight), torch.empty_like(weight)
            direction, part = scratch
            torch.mul(momentum, beta1, out=direction)
            torch.mul(part_of_grad, 1.0 - beta1, out=part)
            direction.add_(part).sign_()
            # lr times a sign is exact, so a fused operation gives the same result
            weight.mul_(keep).sub_(direction, alpha=lr)
            torch.mul(part_of_grad, 1.0 - beta2, out=part)
            momentum.mul_(beta2).add_(part)


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors tile by tile, or whole if one is not contiguous.

    See [Note: tiles].
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    size = _TILE_NUMEL.on(tensors[0].device)
    yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)
