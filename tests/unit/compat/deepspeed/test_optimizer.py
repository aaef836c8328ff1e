"""Test the optimizer of a stage-0 engine under the name deepspeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepseek_zero as dz
from deepseek_zero.compat.deepspeed import defaults
from deepseek_zero.compat.deepspeed.optimizer import FP16_UnfusedOptimizer, scale_at_stage_0
from deepseek_zero.config import RawConfig
from deepseek_zero.config.load import load
from deepseek_zero.precision.loss_scale import LossScaler, LossScaleSettings


def make(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return dz.initialize(model=model, config={"train_batch_size": 1, **config}, **more)[0]


def test_the_optimizer_of_stage_0_is_of_the_given_class_and_equal_to_it() -> None:
    model = nn.Linear(4, 1)
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = make({}, model, optimizer=given)
    assert (
        isinstance(engine.optimizer, torch.optim.AdamW)
        and engine.optimizer == given == engine.optimizer
    )
    assert (
        engine.optimizer != torch.optim.AdamW(model.parameters()) and len({engine.optimizer}) == 1
    )
    engine(torch.ones(1, 4)).sum().backward()
    engine.step()
    half = make({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}})
    assert (
        isinstance(half.optimizer, FP16_UnfusedOptimizer)
        and half.optimizer.low_precision_dtype is torch.bfloat16
    )
    sharded = make({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}})
    assert not isinstance(sharded.optimizer, torch.optim.AdamW)


def test_the_loss_scale_of_stage_0_falls_at_each_overflow_and_stays_at_its_minimum() -> None:
    scaler = LossScaler(scale_at_stage_0(LossScaleSettings(initial_scale_power=2)))
    seen = []
    for _ in range(4):
        scaler.update(overflow=True)
        seen.append(scaler.scale)
    assert seen == [2.0, 1.0, 1.0, 1.0] and scaler.cur_iter == 4


@pytest.mark.parametrize(
    ("asked", "fits"), [("fp32", True), ("bf16", False), (None, True), ("auto", True)]
)
def test_other_sum_dtypes_at_stage_0_are_refused_under_deepspeeds_name(
    asked: Any, fits: bool
) -> None:
    raw: RawConfig = load({"data_types": {"grad_accum_dtype": asked}}, unknown="warn")
    staged = load(
        {"data_types": {"grad_accum_dtype": asked}, "zero_optimization": {"stage": 1}},
        unknown="warn",
    )
    defaults.refuse_other_sums(staged)
    if fits:
        defaults.refuse_other_sums(raw)
    else:
        with pytest.raises(NotImplementedError, match="unsupported mix"):
            defaults.refuse_other_sums(raw)


def test_states_without_moments_need_the_same_number_of_groups(as_deepspeed: None) -> None:
    import deepspeed  # noqa: F401  # select the drop-in

    engine = make({"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"}})
    states = engine.optimizer.optimizer.state_dict()
    states["param_groups"] *= 2
    with pytest.raises(ValueError, match="different number of parameter groups"):
        engine.optimizer.optimizer.load_state_dict(states)
    dist.destroy_process_group()  # the group of one rank that DeepSpeed starts
