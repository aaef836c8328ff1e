"""Copies of a wrapped model are modules without engine if its weights are whole."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepseek_zero.base.errors import UsageError


@pytest.fixture(autouse=True)
def alone(as_deepspeed: None) -> Iterator[None]:
    """Enable the drop-in, and destroy the process group that `initialize` creates."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Tied(nn.Module):
    """Two layers that share a weight, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x)))


def trained(stage: int, dtype: torch.dtype, model: nn.Module) -> Any:
    import deepspeed

    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "bf16": {"enabled": dtype == torch.bfloat16},
        },
    )[0]
    engine.backward(engine(torch.randn(2, 4, dtype=dtype)).float().square().mean())
    engine.step()
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_copy_is_a_plain_module_with_the_current_weights(stage: int, dtype: torch.dtype) -> None:
    model = Tied()
    model.norm.register_forward_hook(hook := print_nothing)
    engine = trained(stage, dtype, model)
    average = copy.deepcopy(engine.module)
    x = torch.randn(2, 4, dtype=dtype)
    assert torch.equal(average.eval()(x), engine.eval()(x))
    assert average.first.weight is average.last.weight
    assert list(average.norm._forward_hooks.values()) == [hook]
    for own, other in zip(average.parameters(), model.parameters(), strict=True):
        assert type(own) is nn.Parameter and torch.equal(own, other)
        own.requires_grad_(False).zero_()
        assert bool(other.any())
    pickle.dumps(average)
    assert not copy.deepcopy(average.float()).first.weight.any()
    assert torch.equal(copy.deepcopy(model.first).weight, model.first.weight)
    engine.destroy()
    copy.deepcopy(model)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_saved_module_is_a_plain_module(stage: int) -> None:
    engine = trained(stage, torch.float32, nn.Sequential(nn.LSTM(4, 4), TakeOutput(), Tied()))
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.randn(2, 4)
    assert torch.equal(again.eval()(x), engine.eval()(x))
    assert again[2].first.weight is again[2].last.weight
    engine.destroy()


class TakeOutput(nn.Module):
    """Returns the first element of a tuple."""

    def forward(self, x: Any) -> Any:
        return x[0]


def print_nothing(*given: Any) -> None:
    """Do nothing, as a hook of the program."""


def test_a_model_with_sharded_weights_is_not_copied() -> None:
    engine = trained(3, torch.float32, Tied())
    with pytest.raises(UsageError, match="deepcopy of a wrapped model is not possible"):
        copy.deepcopy(engine.module)
