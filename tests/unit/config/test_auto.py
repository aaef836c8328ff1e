"""Each "auto" in a configuration is resolved to a value, with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from deepseek_zero.base.errors import ConfigError, NotBuiltError
from deepseek_zero.config import AutoDecision, Config, Facts, resolve
from deepseek_zero.config.fields import AUTO
from deepseek_zero.config.load import load
from deepseek_zero.config.problems import lookup, put
from tests.config_keys import NOT_BUILT_KEYS, ROWS

KEYS = [key.path for key in (*ROWS, *NOT_BUILT_KEYS)]


def resolved(given: dict[str, Any], facts: Facts | None = None) -> Config:
    return resolve(load(given), facts or Facts())


def reason(config: Config, key: str) -> AutoDecision:
    return next(decision for decision in config.decisions if decision.key == key)


def test_all_keys_may_be_auto_together() -> None:
    given: dict[str, Any] = {}
    for key in KEYS:
        # These sections exist only if they are given, so their keys cannot be "auto".
        if key not in ("optimizer.params", "scheduler.params") and not key.startswith(
            (*_GIVEN_ONLY, *_GIVEN)
        ):
            put(given, key, AUTO)
    plain, auto = resolved({}), resolved(given)
    # "auto" enables these sections; without it they are off
    changed = {"bf16", "precision", "optimizer", "zero_optimization", "tensor_parallel"}
    assert auto.model_dump(exclude=changed) == plain.model_dump(exclude=changed)
    assert (auto.bf16.enabled, auto.precision, auto.optimizer.type) == (True, "auto", "AdamW")
    assert auto.tensor_parallel.model_copy(update={"sequence": None}) == plain.tensor_parallel
    assert auto.tensor_parallel.sequence == "auto"
    places = {"offload_optimizer", "offload_param"}
    assert auto.zero_optimization.model_dump(exclude=places) == plain.zero_optimization.model_dump(
        exclude=places
    )
    assert all(getattr(auto.zero_optimization, name).device == "auto" for name in places)


DECIDED_LATER = (
    "precision",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.device",
    "checkpoint.layout",
    "optimizer.kernels",
    "sequence_parallel.attention",
    "tensor_parallel.sequence",
)


_GIVEN = ("zero_optimization.zeropp_loco_param.", "sparse_attention.")


_GIVEN_ONLY = (
    "zero_optimization.zenflow.",
    "checkpoint.writer.",
)


@pytest.mark.parametrize("key", KEYS)
def test_each_single_key_may_be_auto(key: str) -> None:
    given: dict[str, Any] = {}
    put(given, key, AUTO)
    if key.startswith(_GIVEN_ONLY):
        with pytest.raises(NotBuiltError):
            load(given)
        return
    config = resolved(given)
    assert lookup(config.model_dump(), key) != AUTO or key in DECIDED_LATER


def test_a_resolved_auto_is_recorded_with_its_reason() -> None:
    config = resolved(
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": AUTO}}, Facts(hidden_size=16)
    )
    decision = reason(config, "zero_optimization.reduce_bucket_size")
    assert (decision.value, decision.asked) == (256, True)
    assert str(decision) == "zero_optimization.reduce_bucket_size = 256: hidden size squared (16)"
    assert not reason(config, "train_batch_size").asked


def test_a_stated_size_is_kept_although_the_hidden_size_is_known() -> None:
    config = resolved({"zero_optimization": {"reduce_bucket_size": 7}}, Facts(hidden_size=16))
    assert config.zero_optimization.reduce_bucket_size == 7


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_overlap_is_on_at_every_stage_unless_stated(stage: int) -> None:
    for stated, overlaps in (
        ({}, True),
        ({"overlap_comm": "auto"}, True),
        ({"overlap_comm": False}, False),
    ):
        assert (
            resolved(
                {"zero_optimization": {"stage": stage, **stated}}
            ).zero_optimization.overlap_comm
            is overlaps
        )


# Precision
# --------------------------------------------------------------------------------------------------

CPU, OLD_GPU, NEW_GPU = (
    Facts(),
    Facts(device_type="cuda", has_bf16=False),
    Facts(device_type="cuda"),
)


BOTH = {"fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}}


@pytest.mark.parametrize(
    "given, facts, expected",
    [
        ({}, CPU, (False, False)),
        (BOTH, CPU, (False, True)),
        (BOTH, NEW_GPU, (False, True)),
        (BOTH, OLD_GPU, (True, False)),
        (BOTH, Facts(has_bf16=False), (False, False)),
        ({"fp16": {"enabled": AUTO}}, NEW_GPU, (False, False)),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": AUTO}}, NEW_GPU, (True, False)),
        ({"torch_autocast": {"enabled": True}, **BOTH}, NEW_GPU, (False, False)),
        ({"precision": "fp32", **BOTH}, NEW_GPU, (False, False)),
        ({"precision": "auto"}, NEW_GPU, (False, True)),
        ({"precision": "auto"}, OLD_GPU, (True, False)),
        ({"precision": "auto", "fp16": {"enabled": True}}, NEW_GPU, (True, False)),
        ({"precision": "bf16"}, CPU, (False, True)),
        ({"precision": "fp16"}, CPU, (True, False)),
    ],
)
def test_the_precision_follows_the_configuration_then_the_hardware(
    given: dict[str, Any], facts: Facts, expected: tuple[bool, bool]
) -> None:
    config = resolved(given, facts)
    assert (config.fp16.enabled, config.bf16.enabled) == expected


@pytest.mark.parametrize(
    "top, inner, expected", [(True, None, True), (False, None, False), (True, False, False)]
)
def test_fp16_casts_inputs_by_the_top_level_key_unless_its_section_has_one(
    top: bool, inner: bool | None, expected: bool
) -> None:
    config = resolved({"auto_cast": top, "fp16": {"enabled": True, "auto_cast": inner}})
    assert config.fp16.auto_cast is expected


def test_autocast_uses_a_dtype_that_the_hardware_supports() -> None:
    given = {"torch_autocast": {"enabled": True}}
    assert resolved(given, NEW_GPU).torch_autocast.dtype == "bf16"
    assert resolved(given, OLD_GPU).torch_autocast.dtype == "fp16"


# Optimizer and schedule
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("AdamW", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}),
        ("Lion", {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0}),
        ("Adagrad", {"lr": 1e-2, "eps": 1e-10}),
    ],
)
def test_auto_arguments_get_the_usual_values_of_the_optimizer(
    kind: str, expected: dict[str, Any]
) -> None:
    params = dict.fromkeys(expected, AUTO)
    assert resolved({"optimizer": {"type": kind, "params": params}}).optimizer.params == expected


def test_an_auto_optimizer_is_the_programs_own_or_adamw() -> None:
    given = {"optimizer": {"type": AUTO, "params": {"lr": AUTO}}}
    assert resolved(given).optimizer.model_dump(include={"type", "params"}) == {
        "type": "AdamW",
        "params": {"lr": 1e-3},
    }
    assert resolved(given, Facts(client_optimizer={"lr": 0.5})).optimizer.type is None


def test_an_unknown_argument_is_passed_to_the_optimizer() -> None:
    config = resolved({"optimizer": {"type": "AdamW", "params": {"amsgrad": AUTO}}})
    assert config.optimizer.params == {}
    assert reason(config, "optimizer.params.amsgrad").why == "not set: its owner's default is used"


def test_an_auto_schedule_uses_the_optimizers_rate_as_its_peak() -> None:
    given = {
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO),
        },
    }
    config = resolved(given)
    assert config.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 5e-4,
        "warmup_num_steps": 1000,
    }


def test_an_auto_total_without_a_number_of_steps_raises_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler\.params\.total_num_steps = 'auto'.*not known"
    ):
        resolved({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": AUTO}}})


# Ranks and batch
# --------------------------------------------------------------------------------------------------


def test_the_degree_is_the_world_unless_stated() -> None:
    assert resolved({}, Facts(world_size=3)).dp_degree == 3
    assert resolved({"dp_degree": 3}, Facts(world_size=3)).dp_degree == 3


def test_a_degree_that_differs_from_the_world_is_an_error_with_the_command() -> None:
    with pytest.raises(ConfigError, match=r"the run has 3 data-parallel ranks") as error:
        resolved({"dp_degree": 2}, Facts(world_size=3))
    assert "deepseek-zero run --nproc 2" in str(error.value)


def test_a_lone_process_only_warns_about_the_degree(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolved({"dp_degree": 2}, Facts(launched=False))
    assert config.dp_degree == 1
    assert "deepseek-zero run --nproc 2 script.py" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_the_ranks_is_reported_with_the_rest() -> None:
    with pytest.raises(ConfigError, match="Check batch related parameters") as error:
        resolved({"train_batch_size": 5, "dp_degree": 4}, Facts(world_size=2))
    assert "2 problems" in str(error.value)


def test_a_batch_is_divided_by_the_data_parallel_size() -> None:
    facts = Facts(world_size=8, data_size=2, stages=2, tensor_size=2)
    config = resolved({"train_batch_size": 12, "gradient_accumulation_steps": 3}, facts)
    assert (config.batch.micro, config.dp_degree, config.pp_degree, config.mp_degree) == (
        2,
        2,
        2,
        2,
    )
    assert resolved({"dp_degree": 2, "data_parallel_size": 2}, facts).train_batch_size == 2
    with pytest.raises(ConfigError, match="the run has 2 data-parallel ranks") as error:
        resolved({"dp_degree": 4}, facts)
    assert "deepseek-zero run --nproc 16" in str(error.value)


def test_ranks_of_one_copy_that_a_client_counted_are_taken_out_of_its_batch() -> None:
    facts = Facts(world_size=8, data_size=2, stages=2, tensor_size=2)
    stated = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="Check batch related parameters"):
        resolved({**stated, "train_batch_size": 48}, facts)
    counting = replace(facts, counts_model_ranks=True)
    config = resolved({**stated, "train_batch_size": 48}, counting)
    assert config.train_batch_size == 12
    assert reason(config, "train_batch_size").why.startswith("48 counts the 4 ranks")
    assert resolved({**stated, "train_batch_size": 12}, counting).train_batch_size == 12
    with pytest.raises(ConfigError, match="Check batch related parameters"):
        resolved({**stated, "train_batch_size": 24}, counting)


def test_a_stated_batch_size_logs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved({"train_batch_size": 6}, Facts(world_size=2)).batch.micro == 3
    assert capsys.readouterr().err == ""


# The result
# --------------------------------------------------------------------------------------------------


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        resolved({}).zero_optimization.stage = 2


def test_resolving_does_not_change_the_raw_configuration() -> None:
    raw = load(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": AUTO,
                "offload_param": {"device": "cpu"},
            }
        }
    )
    resolve(raw, Facts(hidden_size=8))
    assert raw.values == {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert raw.autos == {"zero_optimization.reduce_bucket_size"}


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


def resolved_text(text: str, facts: Facts) -> Config:
    return resolve(load(text), facts)


def test_seed_001_loads_and_resolves_unchanged() -> None:
    config = resolved_text(SEED_001, Facts(world_size=2, hidden_size=64, loader_micro_batch=4))
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


def test_the_lr_of_seed_001_is_that_of_the_program_if_it_has_one() -> None:
    config = resolved_text(SEED_001, Facts(client_optimizer={"lr": 3e-4}))
    assert config.optimizer.params["lr"] == 3e-4


def test_seed_002_loads_and_resolves_without_any_batch_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolved_text(SEED_002, Facts(world_size=8, loader_micro_batch=128))
    assert (config.batch.train, config.batch.micro, config.batch.accumulation) == (1024, 128, 1)
    assert capsys.readouterr().err.count("no batch size is stated") == 1


def test_seed_002_keeps_the_documented_sizes_without_a_hidden_size() -> None:
    zero = resolved_text(SEED_002, Facts()).zero_optimization
    sizes = (
        zero.reduce_bucket_size,
        zero.stage3_prefetch_bucket_size,
        zero.stage3_param_persistence_threshold,
    )
    assert sizes == (500_000_000, 50_000_000, 100_000)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_seeds_offload_to_the_host(device_type: str) -> None:
    config = resolved_text(SEED_001, Facts(device_type=device_type))
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.zero_optimization.offload_param.device == "cpu"
