"""Test the dynamic loss scaler of DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.compat.deepspeed import (
    loss_scaler,
)


def test_the_dynamic_scaler_follows_the_rule() -> None:
    scaler = loss_scaler.CreateLossScaler(
        torch.half,
        0,
        True,
        {
            "init_scale": 16,
            "scale_window": 2,
            "min_scale": 4,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
        },
    )
    seen = []
    for overflow in (True, True, False, False, False, True, True):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    # Hysteresis absorbs the first overflow. Two good steps after the last overflow double the scale
    # and restore the hysteresis.
    assert seen == [16, 8, 8, 8, 16, 16, 8]
    with pytest.raises(RuntimeError, match="already at minimum"):
        for _ in range(4):
            scaler.update_scale(True)
    assert loss_scaler.CreateLossScaler(torch.bfloat16, 128, True, None).loss_scale == 1.0
    value = torch.ones((), requires_grad=True)
    loss_scaler.LossScaler(8).backward(value * 2)
    assert value.grad == 16
