"""Parts of the root unit that a program calls by themselves."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

import deepseek_zero
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
