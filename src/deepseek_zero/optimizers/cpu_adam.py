"""DeepSpeed's Adam and AdamW for the CPU, with updates of subgroups.

`deepspeed.ops.adam.DeepSpeedCPUAdam` creates them, and the registry creates those without bias
correction. torch's kernel is used if moments are bias-corrected and have the dtype of their
parameter.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, optim

from ..base.errors import UsageError
from .common import Closure, evaluated

Fields = dict[str, Any]  # of a parameter group, or of the state of a parameter


class _CpuSteps(optim.Optimizer):
    """Methods that DeepSpeed's CPU optimizers have and torch's do not."""

    granularity: ClassVar[Literal["element"]] = "element"
    fp32_optimizer_states = True  # if False, moments have the dtype of their parameter
    bias_correction = True

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return isinstance(self, optim.AdamW)

    def add_param_group(self, param_group: Fields) -> None:
        """Add a parameter group. Checkpoints in DeepSpeed's layout save `bias_correction` in it."""
        if not self.bias_correction:
            param_group["bias_correction"] = False
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update all parameters that have a gradient and return the closure's loss."""
        params = [param for group in self.param_groups for param in group["params"]]
        if self.bias_correction and all(self._dtype(param) == param.dtype for param in params):
            # Unwrapped because the decorators import torch's compiler
            return inspect.unwrap(optim.Adam.step)(self, closure)
        loss = evaluated(closure)
        for group, param in self._trained():
            self._update(group, param, self.state[param])
        return loss

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Closure = None) -> Any:
        """Update the parameters in the groups with the moments of one subgroup.

        A program puts one subgroup of its weights after the other into a parameter group. The
        moments are kept in `state[subgroup_id]`.

        Args:
            subgroup_id: Key of the subgroup.
            closure: Function that computes the loss again and returns it.

        Returns:
            The closure's loss, or None.
        """
        loss = evaluated(closure)
        for group, param in self._trained():
            self._update(group, param, self.state[subgroup_id])  # type: ignore[index]
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Closure = None) -> Any:
        """Undo the last `step_subgroup` of a subgroup.

        The gradient must not have changed. The result is exact except for rounding errors.

        Args:
            sub_group_id: Key of the subgroup.
            closure: Function that computes the loss again and returns it.

        Returns:
            The closure's loss, or None.

        Raises:
            UsageError: The subgroup has no step to undo. The class is a RuntimeError.
        """
        loss = evaluated(closure)
        state: Fields = self.state.get(sub_group_id, {})  # type: ignore[call-overload]
        if not state:
            raise UsageError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not "
                "been initialized.",
                fix="call step_subgroup first.",
            )
        for group, param in self._trained():
            self._undo(group, param, state, sub_group_id)
        return loss

    def _trained(self) -> list[tuple[Fields, Tensor]]:
        """Return the parameters that have a gradient, with their groups."""
        return [
            (group, param)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]

    def _dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    def _update(self, group: Fields, param: Tensor, state: Fields) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(
                    param, dtype=self._dtype(param), memory_format=torch.preserve_format
                )
        state["step"] += 1
        weight = param.float()
        (beta1, beta2) = group["betas"]
        grad = self._direction(group, param, weight)
        state["exp_avg"].lerp_(grad.to(state["exp_avg"].dtype), 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).add_(
            (grad * grad).to(state["exp_avg_sq"].dtype), alpha=1 - beta2
        )
        if self.adam_w_mode:
            weight = weight * (1 - group["lr"] * group["weight_decay"])
        param.copy_(weight - self._change(group, state))

    def _undo(self, group: Fields, param: Tensor, state: Fields, number: int) -> None:
        if state["step"] <= 0:
            raise UsageError(
                f"Cannot rollback sub_group_id {number}: step count is 0",
                fix="call step_subgroup first.",
            )
        beta1, beta2 = group["betas"]
        weight = param.float() + self._change(group, state)
        if self.adam_w_mode:
            weight = weight / (1 - group["lr"] * group["weight_decay"])
        grad = self._direction(group, param, weight)
        state["exp_avg"].sub_(grad.to(state["exp_avg"].dtype), alpha=1 - beta1).div_(beta1)
        squares = (grad * grad).to(state["exp_avg_sq"].dtype)
        state["exp_avg_sq"].sub_(squares, alpha=1 - beta2).div_(beta2).clamp_(min=0)
        state["step"] -= 1
        param.copy_(weight)

    def _direction(self, group: Fields, param: Tensor, weight: Tensor) -> Tensor:
        """Return the fp32 gradient of the loss to minimize, with the weight decay of plain Adam."""
        assert param.grad is not None
        grad = param.grad.float()
        if group["maximize"]:
            grad = -grad
        decay = 0.0 if self.adam_w_mode else group["weight_decay"]
        return grad + decay * weight if decay else grad

    def _change(self, group: Fields, state: Fields) -> Tensor:
        """Return the fp32 amount that a step with these moments subtracts from the weight."""
        (beta1, beta2), steps = group["betas"], float(state["step"])
        first, second = (1 - beta1**steps, 1 - beta2**steps) if self.bias_correction else (1.0, 1.0)
        root = (state["exp_avg_sq"].float() / second).sqrt_().add_(group["eps"])
        change: Tensor = (state["exp_avg"].float() / root).mul_(group["lr"] / first)
        return change


class Adam(_CpuSteps, optim.Adam):
    """Adam, whose weight decay is part of the gradient."""


class AdamW(_CpuSteps, optim.AdamW):
    """Adam with decoupled weight decay."""


class UncorrectedAdam(Adam):
    """Adam without bias correction of the moments."""

    bias_correction = False


class UncorrectedAdamW(AdamW):
    """AdamW without bias correction of the moments."""

    bias_correction = False
