"""`deepspeed.checkpointing` recomputes layers as configured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.activations import recompute
from deepseek_zero.base.errors import UsageError
from deepseek_zero.compat.deepspeed import activation_checkpointing
from deepseek_zero.compat.deepspeed.pipe import PipelineModule


def make(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return dz.initialize(model=model, config={"train_batch_size": 1, **config}, **more)[0]


def test_layers_are_recomputed_as_configured() -> None:
    model = PipelineModule([nn.ReLU(), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1)
    assert model.is_checkpointable_results == []
    model.set_checkpoint_interval(2)
    assert model.is_checkpointable_results == [False, True]
    model.take_configured({"activation_checkpoint_interval": 1, "use_reentrant": False})
    assert model.activation_checkpoint_func is activation_checkpointing.non_reentrant_checkpoint
    assert model.is_checkpointable_results == [False, False, True, True]
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(UsageError, match="interval"):
        model.set_checkpoint_interval(-1)


def test_configure_takes_an_engines_configuration() -> None:
    asked = {"activation_checkpointing": {"number_checkpoints": 3}, "optimizer": {"type": "Adam"}}
    engine = make(asked)
    try:
        activation_checkpointing.configure(None, deepspeed_config=engine.config)
        assert activation_checkpointing.num_layers == 3
    finally:
        recompute.release(recompute.current())
        engine.destroy()


def test_configure_warns_about_unknown_keys(caplog: pytest.LogCaptureFixture) -> None:
    section = {"number_checkpoints": 5}
    asked = {"unknown_of_configure": 1, "comms_logger": {"enabled": True}}
    try:
        activation_checkpointing.configure(None, {**asked, "activation_checkpointing": section})
        assert activation_checkpointing.num_layers == 5 and "unknown_of_configure" in caplog.text
    finally:
        recompute.release(recompute.current())


def test_module_variables_show_the_configuration_of_checkpointing() -> None:
    assert activation_checkpointing.CPU_CHECKPOINT is False
    assert (
        activation_checkpointing.deepspeed_checkpointing_enabled
        is activation_checkpointing.is_configured()
    )
