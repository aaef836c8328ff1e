"""Parts of the root unit that a program calls by themselves."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.extensions import loss_factor
from deepseek_zero.extensions.loss_factor import loss_factor_of


def test_a_model_does_not_keep_the_loss_factor_of_an_engine_that_is_gone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    engine: Any = deepseek_zero.initialize(model=model, config=config)[0]
    factor = weakref.ref(loss_factor_of(engine.runtime))
    assert factor() is not None
    del engine
    assert factor() is None
    assert torch.isfinite(model[0].weight).all()


def test_a_backward_looks_for_parameters_of_an_engine_until_it_is_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD"},
    }
    engine: Any = deepseek_zero.initialize(model=nn.Linear(2, 2), config=config)[0]
    alone = weakref.WeakKeyDictionary({engine.runtime: loss_factor_of(engine.runtime)})
    monkeypatch.setattr(loss_factor, "_FACTORS", alone)  # without engines of other tests
    seen: list[Tensor] = []
    monkeypatch.setattr(loss_factor, "owner_of", seen.append)
    other = torch.ones(2, requires_grad=True)
    other.sum().backward()
    assert len(seen) == 1
    assert seen[0] is other
    engine.destroy()
    other.sum().backward()
    assert len(seen) == 1
