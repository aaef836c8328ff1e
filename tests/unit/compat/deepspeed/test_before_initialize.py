"""Settings passed before `deepspeed.initialize` must agree with its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import ConfigError
from deepseek_zero.compat.deepspeed.before_initialize import (
    tensor_parallel_statement,
    tp_model_init,
)
from deepseek_zero.config.load import load
from deepseek_zero.engine.mesh_statements import MeshStatement


def test_tp_model_init_records_and_initialize_compares() -> None:
    model = nn.Linear(2, 2)
    assert tp_model_init(model, 2, torch.bfloat16, config={"x": 1}) is model
    assert tensor_parallel_statement(nn.Linear(2, 2), load({}), has_mpu=False) is None

    def statement(config: dict[str, Any], has_mpu: bool = False) -> MeshStatement:
        found = tensor_parallel_statement(model, load(config), has_mpu)
        assert found is not None
        return found

    assert statement({"bf16": {"enabled": True}}).axes == {"tp": 2}
    assert statement({"tensor_parallel": {"autotp_size": 2}}, has_mpu=True).axes == {"tp": 2}
    with pytest.raises(
        ValueError,
        match=r"Conflicting tensor_parallel.autotp_size in config \(4\) and tp_model_init \(2\)\.",
    ):
        statement({"tensor_parallel": {"autotp_size": 4}})
    with pytest.raises(ConfigError, match="Conflicting dtype"):
        statement({"fp16": {"enabled": True}})
    with pytest.raises(ValueError, match=r"Conflicting tensor_parallel\.autotp_size"):
        deepseek_zero.initialize(model=model, config={"tensor_parallel": {"autotp_size": 4}})
