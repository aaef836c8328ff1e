"""`DeepSpeedCPUAdam` computes the update of `torch.optim.Adam`, also by subgroups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.compat.deepspeed.ops import DeepSpeedCPUAdam, FusedAdam
from deepseek_zero.kernels.rules import known_rule
from deepseek_zero.optimizers.registry import resolve_optimizer


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_adam_steps_as_torch_and_pieces_step_back(decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(100).to(dtype)
    whole, piece = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    reference = nn.Parameter(start.float())
    by_torch = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [reference], lr=0.01, weight_decay=0.1
    )
    ours: Any = DeepSpeedCPUAdam([whole], 0.01, weight_decay=0.1, adamw_mode=decoupled)
    pieces: Any = DeepSpeedCPUAdam([piece], lr=0.01, weight_decay=0.1, adamw_mode=decoupled)
    before = []
    for _ in range(3):
        grad = torch.randn(100).to(dtype)
        before.append((piece.detach().clone(), grad))
        whole.grad, piece.grad, reference.grad = grad.clone(), grad.clone(), grad.float()
        for step in (ours.step, by_torch.step, lambda: pieces.step_subgroup(3)):
            step()
    near = {"atol": 1e-6 if dtype is torch.float32 else 0.03, "rtol": 0.0}
    torch.testing.assert_close(whole.detach().float(), reference.detach(), **near)
    torch.testing.assert_close(piece.detach().float(), whole.detach().float(), **near)
    assert ours.state[whole]["exp_avg"].dtype is torch.float32 and pieces.state[3]["step"] == 3
    for weight, grad in reversed(before):
        piece.grad = grad
        pieces.rollback_subgroup(3)
        torch.testing.assert_close(
            piece.detach().float(), weight.float(), atol=1e-5 + near["atol"], rtol=0
        )
    with pytest.raises(RuntimeError, match="step count is 0"):
        pieces.rollback_subgroup(3)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        pieces.rollback_subgroup(4)


def test_cpu_adam_stores_moments_in_the_requested_dtype_with_optional_bias_correction() -> None:
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer: Any = DeepSpeedCPUAdam([param], fp32_optimizer_states=False)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype is torch.bfloat16
    plain = nn.Parameter(torch.zeros(2))
    uncorrected: Any = DeepSpeedCPUAdam([plain], 1.0, False, (0.5, 0.75), 0.0)
    plain.grad = torch.ones(2)
    uncorrected.step()
    torch.testing.assert_close(plain.detach(), torch.full((2,), -1.0))  # 0.5 / sqrt(0.25)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        DeepSpeedCPUAdam([plain], amsgrad=True)
    assert FusedAdam([plain], 0.5, True, (0.8, 0.9)).defaults["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("off", [False, 0])
def test_uncorrected_adam_of_a_configuration_maximizes(off: Any) -> None:
    spec = resolve_optimizer("Adam", {"lr": 1, "bias_correction": off, "maximize": True})
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    spec.build([param]).step()
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.1 / 0.001**0.5))


def test_no_kernel_updates_for_an_adam_without_bias_correction() -> None:
    for is_corrected in (True, False):
        adam: Any = DeepSpeedCPUAdam([nn.Parameter(torch.ones(2))], bias_correction=is_corrected)
        assert (known_rule(adam, adam.param_groups[0]) is not None) is is_corrected


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_adam_of_a_configuration_may_leave_out_the_bias_correction(
    decoupled: bool, stage: int
) -> None:
    params = {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": decoupled, "bias_correction": False}
    model = nn.Linear(3, 2)
    starts = [param.detach().clone() for param in model.parameters()]
    engine = dz.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": params},
            "zero_optimization": {"stage": stage},
        },
    )[0]
    engine.backward(engine(torch.ones(1, 3)).sum())  # every gradient is 1
    engine.step()
    for start, found in zip(starts, engine.module_state_dict().values(), strict=True):
        grad = torch.ones_like(start) if decoupled else 1 + 0.5 * start
        kept = start * (1 - 0.1 * 0.5) if decoupled else start
        expected = kept - 0.1 * (0.1 * grad) / ((0.001 * grad.square()).sqrt() + 1e-8)
        torch.testing.assert_close(found, expected)
