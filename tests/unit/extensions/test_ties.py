"""Models that cannot be wrapped are refused before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is not supported")
def test_a_scripted_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    weight = model[0].weight.clone()
    with pytest.raises(UsageError, match=r"'1' was compiled by torch.jit.script"):
        deepseek_zero.initialize(model=model, config=CONFIG)
    assert torch.equal(model[0].weight, weight)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_without_shapes_is_named_and_one_with_shapes_trains() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"(?s)'0.weight' of a lazy module.*once with a batch"):
        deepseek_zero.initialize(model=model, config=CONFIG)
    model(torch.ones(1, 2))
    engine = deepseek_zero.initialize(model=model, config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.was_step_applied()
