"""DeepSpeed's memory estimators return the memory of this library's plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseek_zero.compat.deepspeed import (
    estimators,
)
from deepseek_zero.planner.memory import mixed_precision_adam_bytes

PARAMS = 8_000_000


def test_the_estimators_count_what_our_plans_hold() -> None:
    # bytes per parameter in bf16: weight 2, gradient 2, rest of the main weight 2, moments 8
    host, device, layer = estimators.estimate_zero3_model_states_mem_needs(
        PARAMS, 1000, 4, 2, cpu_offload=False, cpu_offload_params=False
    )
    assert layer == 4000 and device == 14 * PARAMS // 8 + layer and host == 4 * 1000 * 4
    host, device, _ = estimators.estimate_zero3_model_states_mem_needs(PARAMS, 1000, 4, 2)
    assert device == layer  # weights and optimizer states are offloaded to the host
    assert host == pytest.approx(4 * 14 * PARAMS / 8, rel=0.01)
    host, device = estimators.estimate_zero2_model_states_mem_needs(PARAMS, 4, 2, cpu_offload=False)
    assert device == 2 * PARAMS + 12 * PARAMS // 8 < mixed_precision_adam_bytes(PARAMS, 8, 2)
    assert host == 4 * PARAMS * 4  # each rank builds the model


def test_the_estimators_print_deepspeeds_table(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 2000))
    estimators.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "HW: Setup with 1 node, 8 GPUs per node."
    assert lines[2] == "SW: Model with 3M total params, 2M largest layer params."
    assert len(lines) == 10 and lines[-1].endswith(
        "| offload_param=none, offload_optimizer=none, zero_init=0"
    )
    estimators.estimate_zero2_model_states_mem_needs_all_cold(10**9)
    assert (
        capsys.readouterr().out.splitlines()[-1] == "    3.73GB |  13.04GB | offload_optimizer=none"
    )
