"""DeepSpeed's functions for parameters that another module reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


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
