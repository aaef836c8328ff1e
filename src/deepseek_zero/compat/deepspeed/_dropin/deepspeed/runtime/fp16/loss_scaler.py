"""`deepspeed.runtime.fp16.loss_scaler`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.loss_scaler": (
            "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT DynamicLossScaler INITIAL_LOSS_SCALE "
            "LossScaler LossScalerBase MIN_LOSS_SCALE SCALE_WINDOW"
        ),
    },
)
