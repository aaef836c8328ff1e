"""DeepSpeed's loss scalers, for programs that scale a loss themselves.

An engine has its own scaler. The rule of the dynamic scaler is in precision/loss_scale.py. The
drop-in provides this module as `deepspeed.runtime.fp16.loss_scaler`, where pickles of DeepSpeed's
checkpoints look for these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...precision.loss_scale import LossScaler as Rule
from ...precision.loss_scale import LossScaleSettings

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScalerBase:
    """Base class of loss scalers.

    Call `update_scale` after each step, with whether its gradients overflowed.
    """

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """Return the factor by which losses are multiplied."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self.cur_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of the scaled loss.

        Args:
            loss: Scalar loss.
            retain_graph: Whether to keep the autograd graph.
        """
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: this scale is constant."""


class LossScaler(LossScalerBase):
    """Multiply losses by a constant scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Any) -> bool:
        """Return False: a constant scale does not react to overflows."""
        return False


class DynamicLossScaler(LossScalerBase):
    """Multiply losses by a scale that halves after overflows and doubles after enough good steps.

    Args:
        init_scale: First scale.
        scale_window: Number of steps without overflow before the scale is doubled.
        min_scale: Smallest scale.
        delayed_shift: Number of overflows before the scale is halved.
        consecutive_hysteresis: Whether a good step resets the count of overflows.
        raise_error_at_min_scale: Whether an overflow at the smallest scale raises.
        dtype: Dtype of the gradients.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0

    def has_overflow_serial(self, params: Any) -> bool:
        """Return whether a gradient on this rank is not finite."""
        return any(
            param.grad is not None and not bool(torch.isfinite(param.grad).all())
            for param in params
        )

    has_overflow = has_overflow_serial

    def update_scale(self, overflow: bool) -> None:
        """Halve the scale after an overflow, or double it after `scale_window` steps without one.

        Raises:
            LossScaleError: The gradients overflowed at the smallest scale, and
                `raise_error_at_min_scale` is true.
        """
        settings = LossScaleSettings(
            initial_scale_power=127,  # unused, because the scale is set below
            loss_scale_window=self.scale_window,
            hysteresis=self.delayed_shift,
            consecutive_hysteresis=self.consecutive_hysteresis,
            min_loss_scale=self.min_scale,
            gives_up=self.raise_error_at_min_scale,
        )
        rule = Rule(settings)
        rule.scale = self.cur_scale
        rule.cur_hysteresis = self.cur_hysteresis
        rule.cur_iter = self.cur_iter
        rule.last_overflow_iter = self.last_overflow_iter
        rule.update(overflow)
        self.cur_scale = rule.scale
        self.cur_hysteresis = rule.cur_hysteresis
        self.cur_iter = rule.cur_iter
        self.last_overflow_iter = rule.last_overflow_iter


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return a loss scaler for a dtype. Dtypes other than fp16 get a scale of 1.

    Args:
        dtype: Dtype of the computation.
        static_loss_scale: Scale if `dynamic_scaling` is false.
        dynamic_scaling: Whether the scale is dynamic.
        dynamic_loss_args: Arguments of the DynamicLossScaler.

    Returns:
        A dynamic scaler if `dtype` is fp16 and `dynamic_scaling` is true, else a scaler with a
        constant scale.
    """
    if dtype is torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    scale = static_loss_scale if dtype is torch.half else 1.0
    return LossScaler(scale)
