"""Test the configuration classes of DeepSpeed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deepseek_zero.compat.deepspeed import config_classes as classes


def test_a_configuration_completes_its_batch_sizes_and_refuses_contradictions() -> None:
    config = classes.DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2})
    assert config.train_micro_batch_size_per_gpu == 4 and config.gradient_clipping == 1.0
    assert config.zero_config.overlap_comm is False and config.zero_optimization_stage == 0
    with pytest.raises(AssertionError, match="8 != 3"):
        classes.DeepSpeedConfig({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3})
    with pytest.raises(ValueError, match="not supported with ZeRO stage 3"):
        classes.DeepSpeedConfig(
            {
                "train_batch_size": 1,
                "gradient_allreduce_op": "sum",
                "zero_optimization": {"stage": 3},
            }
        )


def test_sections_have_deepspeeds_names_and_pydantics_errors() -> None:
    zero = classes.DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, cpu_offload=True)
    assert zero.prefetch_bucket_size == 7 and zero.overlap_comm is True
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    with pytest.raises(ValidationError):
        classes.DeepSpeedZeroConfig(stag=3)
    with pytest.raises(AssertionError, match="together"):
        classes.DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})
    with pytest.raises(ValidationError, match="must be a number"):
        classes.DeepSpeedFP16Config(loss_scale=[])
    assert (
        classes.DeepSpeedFP16Config(
            enabled=True, loss_scale=2, loss_scale_window=0
        ).loss_scale_window
        == 0
    )
