"""DeepSpeed's parameter attributes exist only while an engine shards the parameters."""

from __future__ import annotations

import gc

from torch import nn

import deepseek_zero
from deepseek_zero.compat.deepspeed.parameters import VIEWS


def shown() -> list[str]:
    gc.collect()
    return [name for name in VIEWS if name in vars(nn.Parameter)]


def test_parameters_have_deepspeeds_attributes_while_sharded_ones_exist() -> None:
    assert not shown()
    with deepseek_zero.zero.Init():
        model = nn.Linear(2, 2)
        nn.Sequential(model)
    assert model.weight.ds_shape == (2, 2)
    assert shown() == list(VIEWS)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = deepseek_zero.initialize(
        model=model, config={"train_batch_size": 1, "zero_optimization": zero}
    )[0]
    assert model.weight.ds_numel == 4
    engine.destroy()
    del engine, model
    assert not shown()
