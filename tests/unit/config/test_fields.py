"""Test the configuration sections that programs for DeepSpeed read."""

from __future__ import annotations

import pytest

from deepseek_zero.config import Config


def test_a_configuration_is_read_as_a_dict() -> None:
    given = {"offload_optimizer": {"device": "cpu"}}
    config = Config.model_validate({"zero_optimization": given})
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["train_batch_size"] == config.get("train_batch_size") == 1
    assert "zero_optimization" in config and "train_batch_size" not in config
    with pytest.raises(KeyError):
        config["stage"]
