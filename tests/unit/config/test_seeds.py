"""The configurations of seeds 001 and 002, as they stand in the articles."""

from __future__ import annotations

import pytest

from deepseek_zero.config import Config, Facts, resolve
from deepseek_zero.config.load import load

SEED_001 = """
{ "train_batch_size": "auto", "gradient_accumulation_steps": 1, "optimizer": { "type": "AdamW",
"params": { "lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01 } }, "fp16": {
"enabled": true, "loss_scale": 0, "initial_scale_power": 16 }, "zero_optimization": { "stage": 3,
"offload_optimizer": { "device": "cpu", "pin_memory": true }, "offload_param": { "device": "cpu",
"pin_memory": true }, "overlap_comm": true,
"contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
"stage3_gather_fp16_weights_on_model_save": true }, "gradient_clipping": 1.0,
"train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false }
"""

SEED_002 = """
{
"fp16": {
"enabled": true,
"loss_scale": 0,
"initial_scale_power": 16,
"loss_scale_window": 1000,
"hysteresis": 2,
"min_loss_scale": 1
},
"optimizer": {
"type": "AdamW",
"params": {
"lr": 0.0001,
"weight_decay": 0.01
}
},
"scheduler": {
"type": "WarmupLR",
"params": {
"warmup_min_lr": 0,
"warmup_max_lr": 0.0001,
"warmup_num_steps": 500
}
},
"zero_optimization": {
"stage": 3, // 启用ZeRO-3阶段
"offload_optimizer": {
"device": "cpu"
},
"overlap_comm": true,
"contiguous_gradients": true,
"sub_group_size": 1e9,
"reduce_bucket_size": "auto",
"stage3_prefetch_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto",
"stage3_max_live_parameters": 1e9,
"stage3_max_reuse_distance": 1e9,
"stage3_gather_16bit_weights_on_model_save": true
}
}
"""


def resolved(text: str, facts: Facts) -> Config:
    return resolve(load(text), facts)


def test_seed_001_loads_and_resolves_as_it_is() -> None:
    config = resolved(SEED_001, Facts(world_size=2, hidden_size=64, loader_micro_batch=4))
    assert (config.batch.train, config.batch.micro, config.batch.accumulation) == (8, 4, 1)
    assert config.optimizer.params == {
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    assert config.zero_optimization.reduce_bucket_size == 64 * 64
    assert config.zero_optimization.stage3_prefetch_bucket_size == int(0.9 * 64 * 64)
    assert config.zero_optimization.stage3_param_persistence_threshold == 640
    assert config.zero_optimization.sub_group_size == 10**9
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert config.fp16.enabled
    assert config.gradient_clipping == 1.0


def test_the_lr_of_seed_001_comes_from_the_program_where_it_has_one() -> None:
    config = resolved(SEED_001, Facts(client_optimizer={"lr": 3e-4}))
    assert config.optimizer.params["lr"] == 3e-4


def test_seed_002_loads_and_resolves_without_any_batch_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolved(SEED_002, Facts(world_size=8, loader_micro_batch=128))
    assert (config.batch.train, config.batch.micro, config.batch.accumulation) == (1024, 128, 1)
    assert capsys.readouterr().err.count("no batch size is stated") == 1


def test_seed_002_keeps_the_documented_sizes_where_the_model_has_no_hidden_size() -> None:
    zero = resolved(SEED_002, Facts()).zero_optimization
    sizes = (
        zero.reduce_bucket_size,
        zero.stage3_prefetch_bucket_size,
        zero.stage3_param_persistence_threshold,
    )
    assert sizes == (500_000_000, 50_000_000, 100_000)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_seeds_offload_to_the_host(device_type: str) -> None:
    config = resolved(SEED_001, Facts(device_type=device_type))
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.zero_optimization.offload_param.device == "cpu"
