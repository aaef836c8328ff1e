"""Under the name deepspeed, every configuration that DeepSpeed accepts is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from deepseek_zero.base.errors import ConfigError, NotBuiltError
from deepseek_zero.config import Config, Facts, resolve
from deepseek_zero.config.fields import FieldRow, subsection
from deepseek_zero.config.load import PACKAGES, load
from deepseek_zero.config.problems import put
from tests.config_keys import NOT_BUILT_KEYS, ROWS, KeyNotBuilt, off_default_config

# Keys that DeepSpeed 0.19.8 has removed and refuses, and keys that only this library has.
REFUSED_THERE = {
    "amp",
    "elasticity",
    "sparse_attention",
    "compression_training",
    "nebula",
    "eigenvalue",
}

AUTO = "auto"
ZERO_3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
FP16: dict[str, Any] = {
    "enabled": AUTO,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BATCH: dict[str, Any] = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
}
CLIENTS: dict[str, dict[str, Any]] = {
    "Accelerate's plugin": {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    },
    "Transformers' stage 3": {
        **BATCH,
        "fp16": FP16,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
        },
        "zero_optimization": {
            **ZERO_3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "LLaMA-Factory's stage 2": {
        **BATCH,
        "zero_allow_untested_optimizer": True,
        "fp16": FP16,
        "bf16": {"enabled": AUTO},
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
    },
    "Axolotl's stage 1": {
        **BATCH,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": AUTO},
        "fp16": {**FP16, "auto_cast": False, "initial_scale_power": 32},
        "wall_clock_breakdown": False,
        "compile": {"disable": False, "backend": "inductor"},
    },
    "a post-training script's": {
        **BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {
            **ZERO_3,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "memory_efficient_linear": False,
        },
        "prescale_gradients": False,
        "steps_per_print": 1e5,
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"use_node_local_storage": False},
        "hybrid_engine": {"enabled": False},
        "weight_quantization": {"enabled": False},
    },
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clients_configuration_is_accepted(client: str) -> None:
    load(CLIENTS[client], unknown="warn")


FACTS = Facts(
    client_optimizer={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    hidden_size=16,
    loader_micro_batch=1,
)
ONE_RANK = {"data_parallel_size", "dp_degree"}  # keys for the number of ranks


def values_of(kind: Any, example: Any) -> Iterator[Any]:
    """Yield valid JSON values of a type, including those that DeepSpeed converts.

    For example, DeepSpeed accepts 1 and "true" for true.
    """
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (Union, UnionType):
        for option in get_args(kind):
            yield from values_of(option, example)
    elif kind is bool:
        yield from (True, False, 1, 0, "true", "False")
    elif kind is NoneType:
        yield None
    elif kind in (int, float) and isinstance(example, (int, float)):
        yield from (example, float(example), str(example))


def kind_of(row: FieldRow | KeyNotBuilt) -> Any:
    """Return the type of a key: its field's annotation, or the recorded kind."""
    if isinstance(row, KeyNotBuilt):
        return row.kind
    *sections, last = row.path.split(".")
    model = Config
    for name in sections:
        model = subsection(model.model_fields[name])  # type: ignore[assignment]
    return model.model_fields[last].annotation


def test_no_valid_value_of_a_key_is_refused_under_deepspeeds_name() -> None:
    refused, tried = {}, 0
    for row in (*ROWS, *NOT_BUILT_KEYS):
        if row.path.split(".")[0] in REFUSED_THERE or (
            not row.goes_on if isinstance(row, KeyNotBuilt) else row.path.split(".")[0] in PACKAGES
        ):
            continue  # the configuration page documents why it is refused
        every = [row.default, row.example, *values_of(kind_of(row), row.example)]
        for value in [1] if row.path in ONE_RANK else every:
            config, (section, _, key) = off_default_config(row.path), row.path.rpartition(".")
            put(config, row.path, value)
            if key == "device" and value == "nvme":
                put(config, f"{section}.nvme_path", "a folder")
            if key == "nvme_path" and value is None:
                put(config, f"{section}.device", "cpu")
            tried += 1
            try:
                resolve(load(config, unknown="warn"), FACTS)
            except Exception as error:
                refused[row.path, repr(value)] = str(error)
    assert not refused and tried > 1000


def test_experts_stay_on_every_rank_unless_they_would_compute_something_else() -> None:
    section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    assert any(
        "every rank has all experts" in note
        for note in load({"expert_parallel": section}, unknown="warn").notes
    )
    with pytest.raises(NotBuiltError, match=r"1\. expert_parallel\.top_k"):
        load({"expert_parallel": {**section, "top_k": 1}}, unknown="warn")


def test_configurations_that_deepspeed_reads_leniently_are_accepted() -> None:
    words = (
        "{ train_batch_size: 8  # a comment\n optimizer: { type: Adam\n params: { lr: 0.1 } }\n}"
    )
    pytest.importorskip("hjson")
    raw = load(words, unknown="warn")
    assert raw.values["train_batch_size"] == 8 and raw.values["optimizer"]["type"] == "Adam"
    assert (
        load({"a_key_of_another_program": 1, "train_batch_size": 2}, unknown="warn").values[
            "train_batch_size"
        ]
        == 2
    )


def test_keys_that_deepspeed_ignores_are_warnings_under_its_name() -> None:
    nvme = {"device": "nvme", "nvme_path": "a"}
    ignored: dict[str, dict[str, Any]] = {
        "optimizer.params": {"optimizer": {"params": {"lr": 0.1}}},
        "scheduler.params": {"scheduler": {"type": None, "params": {"warmup_num_steps": 3}}},
        "zero_optimization.offload_optimizer.ratio": {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.3}}
        },
        "zero_optimization.offload_optimizer.super_offload": {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "super_offload": True},
            }
        },
        "bfloat16": {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
        "zero_optimization.offload_param.nvme_path": {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": nvme,
                "offload_param": {**nvme, "nvme_path": "b"},
            }
        },
    }
    for key, config in ignored.items():
        raw = load(config, unknown="warn")
        assert [note for note in raw.notes if key in note and "ignored" in note], raw.notes
        resolve(raw, FACTS)
    assert raw.get("zero_optimization.offload_param.nvme_path") == "a"
    with pytest.raises(ConfigError, match=r"optimizer\.params"):
        load({"optimizer": {"params": {"lr": 0.1}}})
    load({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, unknown="warn")
