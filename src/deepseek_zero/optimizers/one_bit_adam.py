"""1-bit Adam: Adam until its second moment is settled, then momenta sent as signs.

The source is Tang et al., arXiv 2102.02888. For `freeze_step` steps the update is AdamW's, bit for
bit. From then on the second moment is constant, and momenta are exchanged::

    every rank      c = e + beta1 m + (1 - beta1) g        sends signs of c, keeps e = c - signs(c)
    owner of each   a = f + mean over ranks of signs(c)    sends signs of a, keeps f = a - signs(a)
    every rank      m = signs(a)

Each message has one scale. The exchange (`extensions/momentum_exchange.py`) stores m in place of
the gradient and sets `takes_momenta`. A single rank has m = beta1 m + (1 - beta1) g. The update
is::

    p = p - lr (weight_decay p + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^freeze_step)) + eps))

An element with v = 0 never had a gradient, and is not updated: for it, too, every sign would be a
step, and nothing would bound that step.
"""

from __future__ import annotations

import inspect
import math
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import AdamW

from ..base.errors import ConfigError, shown
from .common import Closure, adam_state, evaluated


class OneBitAdam(AdamW):
    """1-bit Adam: AdamW whose second moment is constant after `freeze_step` steps.

    After these steps, the ranks of an engine exchange the signs of their momenta instead of
    reducing gradients. An element whose second moment is 0 is then changed only by weight decay.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate of all groups that specify none.
        freeze_step: The number of steps with the AdamW update, after which the second moment is
            constant.
        betas: The decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: The coefficient of the decoupled weight decay.

    Attributes:
        takes_momenta: Whether `.grad` of the parameters holds the exchanged momentum instead of the
            gradient. An engine sets it to True when the exchange starts, and to False when the
            exchange ends.

    Raises:
        ConfigError: `freeze_step` is less than 1, or parameter groups have different ones.
        ValueError: Another argument is out of range.
    """

    granularity: ClassVar[Literal["element"]] = "element"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _refuse_few_steps(freeze_step)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults["freeze_step"] = freeze_step
        for group in self.param_groups:
            _refuse_few_steps(group.setdefault("freeze_step", freeze_step))
        steps = [group["freeze_step"] for group in self.param_groups]
        if len(set(steps)) > 1:
            raise ConfigError(
                f"OneBitAdam: parameter groups have different values of freeze_step, {steps}.",
                "The ranks start to exchange all momenta in the same step.",
                "state freeze_step once, as an argument of the optimizer.",
            )
        self.takes_momenta = False

    @property
    def freeze_step(self) -> int:
        """The number of steps after which the second moments are constant.

        The value is read from the first parameter group.
        """
        return int(self.param_groups[0]["freeze_step"])

    @property
    def beta1(self) -> float:
        """The decay rate of the first moment, read from the first parameter group."""
        return float(self.param_groups[0]["betas"][0])

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
        held = [group["params"] for group in self.param_groups]
        frozen = [[param for param in params if self._is_frozen(param)] for params in held]
        try:
            for group, params, late in zip(self.param_groups, held, frozen, strict=True):
                later = set(map(id, late))
                group["params"] = [param for param in params if id(param) not in later]
            if any(group["params"] for group in self.param_groups):
                inspect.unwrap(AdamW.step)(self)
        finally:
            for group, params in zip(self.param_groups, held, strict=True):
                group["params"] = params
        for group, late in zip(self.param_groups, frozen, strict=True):
            for param in late:
                self._update(param, group)
        return loss

    def _is_frozen(self, param: Tensor) -> bool:
        """Return whether a parameter has a gradient and a frozen second moment."""
        steps = self.state[param]["step"] if self.state.get(param) else 0
        return param.grad is not None and (self.takes_momenta or float(steps) >= self.freeze_step)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        adam_state(state, param, param.device)
        grad = param.grad
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        assert grad is not None
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        if self.takes_momenta:
            mean.copy_(grad)
        else:
            mean.lerp_(grad, 1 - beta1)
        scale = (
            torch.sqrt(square).div_(math.sqrt(1 - beta2 ** group["freeze_step"])).add_(group["eps"])
        )
        update = torch.div(mean, scale, out=scale).masked_fill_(square == 0, 0.0)
        param.mul_(1 - lr * group["weight_decay"]).sub_(
            update.mul_(lr / (1 - beta1 ** float(state["step"])))
        )


def _refuse_few_steps(freeze_step: Any) -> None:
    if not isinstance(freeze_step, Real) or freeze_step < 1:
        raise ConfigError(
            f"OneBitAdam: freeze_step is {shown(freeze_step)}.",
            "Its second moment comes from the gradients of the first steps.",
            "give about a fifth of all steps, at least 1.",
        )
