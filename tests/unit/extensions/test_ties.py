"""Models that cannot be wrapped are refused before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError

STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is not supported")
def test_a_scripted_model_is_refused_and_scripted_submodules_train() -> None:
    blocks = [torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) for _ in range(2)]
    with pytest.raises(UsageError, match=r"the model was compiled by torch.jit.script"):
        deepseek_zero.initialize(model=blocks[0], config=CONFIG)
    model = nn.Sequential(*blocks)
    before = [param.detach().clone() for param in model.parameters()]
    engine = deepseek_zero.initialize(model=model, config={**CONFIG, **STAGE_3})[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    after = engine.module_state_dict().values()
    assert not any(map(torch.equal, before, after))


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
