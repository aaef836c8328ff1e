"""Test DeepSpeed's functions for parameters that another module uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError
from deepseek_zero.zero import register_external_parameter


@pytest.fixture(autouse=True)
def alone(as_deepspeed: None) -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_constructor_may_register_an_external_parameter(is_sharded: bool) -> None:
    import deepspeed

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            deepspeed.zero.register_external_parameter(self, self.first.weight)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.last(self.first(x)), self.first.weight).square().mean()

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.Init(enabled=is_sharded):
        model = Model()
    engine = deepspeed.initialize(model=model, config=config)[0]
    deepspeed.zero.unregister_external_parameter(model, model.first.weight)
    deepspeed.zero.register_external_parameter(model, model.first.weight)
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    with pytest.raises(RuntimeError, match=r"not a torch\.nn\.Parameter"):
        deepspeed.zero.register_external_parameter(model, torch.ones(1))
    for arguments in ((model, None), (None, model.first.weight)):
        with pytest.raises(UsageError, match="register_external_parameter"):
            register_external_parameter(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("outer", [None, 0])
def test_an_inner_block_keeps_its_change_of_a_gathered_unit(outer: int | None) -> None:
    import deepspeed

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = deepspeed.initialize(model=model, config=config)[0]
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=outer):
        with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
            model[0].weight.data.fill_(5.0)
        assert bool((model[0].weight == 5).all())
    assert bool((engine.module_state_dict()["0.weight"] == 5).all())
    assert bool((deepspeed.utils.safe_get_full_fp32_param(model[0].weight) == 5).all())


def test_a_lost_change_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    import deepspeed

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    _engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(3):
        with deepspeed.zero.GatheredParameters(model[1].weight), torch.no_grad():
            model[1].weight.add_(1.0)
    lost = [each for each in caplog.messages if "The change is lost" in each]
    assert len(lost) == 1 and "1.weight" in lost[0]
