"""Loading a configuration: types, aliases, unknown keys, conflicts, unsupported features."""

from __future__ import annotations

import math
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepseek_zero.base.errors import ConfigError, DeepSeekZeroError, NotBuiltError
from deepseek_zero.config import Config, Facts, RawConfig, choose_source, resolve
from deepseek_zero.config import load as checks_room
from deepseek_zero.config.layer_specs import layer_rules
from deepseek_zero.config.load import load
from tests.config_keys import NOT_BUILT_KEYS, off_default_config


def config_of(**given: Any) -> Config:
    return resolve(load(given), Facts())


def complaint(given: dict[str, Any], kind: type[DeepSeekZeroError] = ConfigError) -> str:
    with pytest.raises(DeepSeekZeroError) as error:
        load(given)
    assert type(error.value) is kind
    return str(error.value)


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


# Types
# --------------------------------------------------------------------------------------------------


def test_whole_floats_are_integers() -> None:
    found = config_of(
        **zero(stage=3.0, reduce_bucket_size=5e8, sub_group_size=1e9)
    ).zero_optimization
    assert (found.stage, found.reduce_bucket_size, found.sub_group_size) == (
        3,
        500_000_000,
        1_000_000_000,
    )
    assert isinstance(found.reduce_bucket_size, int)


def test_other_floats_are_not() -> None:
    assert (
        "zero_optimization.reduce_bucket_size = 1.5 (from dict): must be a whole number"
        in complaint(zero(reduce_bucket_size=1.5))
    )


def test_quoted_numbers_and_booleans_are_read_with_a_note() -> None:
    raw = load({"train_batch_size": "8", "gradient_clipping": "1e-1", "fp16": {"enabled": "false"}})
    assert raw.values == {
        "train_batch_size": 8,
        "gradient_clipping": 0.1,
        "fp16": {"enabled": False},
    }
    assert len(raw.notes) == 3
    assert all("remove the quotes" in note for note in raw.notes)


def test_quoted_numbers_among_optimizer_arguments_are_read_too() -> None:
    raw = load({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "name": "x"}}})
    assert raw.get("optimizer.params") == {"lr": 1e-4, "name": "x"}


@pytest.mark.parametrize("never", [math.inf, "inf", None, "none"])
def test_steps_per_print_may_be_never(never: Any) -> None:
    assert config_of(steps_per_print=never).steps_per_print is None


def test_infinite_sizes_are_the_largest_integer() -> None:
    assert config_of(
        **zero(stage3_max_live_parameters=math.inf)
    ).zero_optimization.stage3_max_live_parameters == (sys.maxsize)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_elsewhere_is_refused(value: float) -> None:
    assert "must be finite" in complaint({"train_batch_size": value})


def test_null_means_the_default() -> None:
    config = config_of(
        fp16=None,
        gradient_clipping=None,
        zero_optimization={
            "stage": None,
            "offload_param": None,
            "offload_optimizer": {"device": None},
        },
    )
    assert not config.fp16.enabled
    assert config.gradient_clipping == 0.0
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.offload_optimizer.device == "none"


def test_the_plugin_default_of_accelerate_loads() -> None:
    offload = {"device": "none", "nvme_path": None}
    raw = load(
        {
            **zero(stage=2, offload_optimizer=offload, offload_param=offload),
            "steps_per_print": math.inf,
        }
    )
    assert raw.get("zero_optimization.offload_param") == {"device": "none", "nvme_path": None}


@pytest.mark.parametrize(
    "spelled, dtype",
    [("bf16", "bf16"), ("torch.bfloat16", "bf16"), ("float16", "fp16"), ("FP32", "fp32")],
)
def test_dtypes_have_several_spellings(spelled: str, dtype: str) -> None:
    assert config_of(communication_data_type=spelled).communication_data_type == dtype


def test_values_are_read_case_insensitively() -> None:
    config = config_of(gradient_allreduce_op="SUM", checkpoint={"tag_validation": "FAIL"})
    assert (config.gradient_allreduce_op, config.checkpoint.tag_validation) == ("sum", "Fail")


def test_a_single_name_is_a_list_of_one() -> None:
    assert config_of(
        **zero(leaf_module={"classes": "Block"})
    ).zero_optimization.leaf_module.classes == ("Block",)


@pytest.mark.parametrize(
    "given, clause",
    [
        (zero(stage=4), "zero_optimization.stage = 4 (from dict): must be one of 0, 1, 2, 3"),
        (zero(stage=True), "must be an integer, not true or false"),
        (zero(overlap_comm="yes"), "must be true or false, not a string"),
        (zero(reduce_bucket_size=0), "must be greater than 0"),
        (zero(reduce_bucket_size="many"), "must be an integer, not the string 'many'"),
        (zero(leaf_module={"classes": 3.5}), "must be a string"),
        ({"fp16": True}, 'write {"enabled": true}'),
        ({"zero_optimization": 3}, 'write {"stage": 3}'),
        (zero(offload_optimizer="cpu"), 'write {"device": "cpu"}'),
        ({"scheduler": "WarmupLR"}, 'write {"type": "WarmupLR"}'),
        ({"optimizer": {"lr": 0.1}}, "write optimizer.params.lr if it is an option"),
        ({"optimizer": {"type": 3}}, "must be a string, not an int"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "must be an object {...}, not a list"),
        ({"communication_data_type": "int8"}, "must be one of fp32, fp16, bf16"),
        (
            {"gradient_clipping": -1},
            "gradient_clipping = -1.0 (from dict): must be greater than or equal to 0",
        ),
        ({"steps_per_print": 0}, "must be greater than or equal to 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(given: dict[str, Any], clause: str) -> None:
    assert clause in complaint(given)


@pytest.mark.parametrize("scale", [True, -1, math.inf])
def test_a_loss_scale_that_cannot_be_is_refused(scale: Any) -> None:
    assert "fp16.loss_scale = " in complaint({"fp16": {"enabled": True, "loss_scale": scale}})


# All at once
# --------------------------------------------------------------------------------------------------


def test_every_problem_is_reported_at_once_with_key_value_origin_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": "many", "zero_optimization": {"stagee": 3, "stage": 7}, '
        '"fp16": {"enabled": true},"bf16": {"enabled": true}, "optimizer": {"type": '
        '"Adam", "params": {"max_grad_norm": 1.0}},"amp": {"enabled": 1},'
        '"gradient_clipping": 1, "gradient_clipping": 2}',
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as error:
        load(path)
    text = str(error.value)
    assert text.startswith(f"7 problems in the configuration {path}:")
    for part in (
        "Duplicate keys in the configuration: ['gradient_clipping']",
        f"train_batch_size = 'many' (from {path}): must be an integer",
        f"zero_optimization.stagee = 3 (from {path}): no such key",
        "fix: did you mean zero_optimization.stage?",
        "zero_optimization.stage = 7",
        "bfloat16 and fp16 modes cannot be simultaneously enabled",
        "'max_grad_norm' is not supported as an optimizer parameter",
        'fix: remove it and write "gradient_clipping": 1.0 at the top',
        "amp.enabled = True",
    ):
        assert part in text
    assert text.count("fix: ") == 7


def test_the_origin_can_be_named() -> None:
    with pytest.raises(ConfigError, match=r"\(from args\)"):
        load({"nothing": 1}, origin="args")


# Unknown keys
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, advice",
    [
        ({"grandient_accumulation_steps": 2}, "did you mean gradient_accumulation_steps?"),
        ({"fp16": {"enable": True}}, "did you mean fp16.enabled?"),
        ({"loss_scale": 0}, "it belongs at fp16.loss_scale"),
        (
            {"stage3_max_live_parameter": 1},
            "did you mean zero_optimization.stage3_max_live_parameters?",
        ),
        (
            {"zero_optimization.reduce_bucket_size": 1},
            "put reduce_bucket_size inside the object zero_optimization",
        ),
        ({"qqqqqq": 1}, "docs/reference/config.md lists every key"),
    ],
)
def test_an_unknown_key_gets_the_nearest_spelling(given: dict[str, Any], advice: str) -> None:
    text = complaint(given)
    assert "no such key" in text
    assert advice in text


def test_an_unknown_key_can_be_a_warning_instead() -> None:
    raw = load({"zero_optimization.reduce_bucket_size": 1, "train_batch_size": 4}, unknown="warn")
    assert raw.values == {"train_batch_size": 4}
    assert "no such key, ignored" in raw.notes[0]


# Aliases
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, key, value",
    [
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True),
        (zero(stage=2, cpu_offload=True), "zero_optimization.offload_optimizer.device", "cpu"),
        (zero(stage=3, cpu_offload_param=True), "zero_optimization.offload_param.device", "cpu"),
        (zero(cpu_offload=False), "zero_optimization.offload_optimizer.device", None),
        (
            zero(stage3_gather_fp16_weights_on_model_save=True),
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
        ),
        (zero(max_live_parameters=7), "zero_optimization.stage3_max_live_parameters", 7),
        (zero(prefetch_bucket_size=7), "zero_optimization.stage3_prefetch_bucket_size", 7),
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"allgather_size": 9}, "zero_optimization.allgather_bucket_size", 9),
    ],
)
def test_a_deprecated_key_is_copied_with_one_note(
    given: dict[str, Any], key: str, value: Any
) -> None:
    before = deepcopy(given)
    raw = load(given)
    assert raw.get(key) == value
    assert len(raw.notes) == 1
    assert "deprecated" in raw.notes[0]
    assert given == before


@pytest.mark.parametrize(
    "given",
    [
        {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}},
        zero(cpu_offload=True, offload_optimizer={"device": "none"}),
        zero(max_live_parameters=1, stage3_max_live_parameters=1),
    ],
)
def test_an_old_and_a_new_key_together_are_an_error(given: dict[str, Any]) -> None:
    assert "Cannot provide deprecated parameter" in complaint(given)


def test_changed_keys_without_effect_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(zero(stage=3, reduce_scatter=False, contiguous_gradients=True, allgather_bucket_size=2e8))
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "INFO: config dict: without effect here: zero_optimization.reduce_scatter = False (stages "
        "1 to 3" in line
    )
    assert "zero_optimization.allgather_bucket_size = 200000000 (one all-gather" in line
    assert "contiguous" not in line


def test_a_disk_without_a_directory_has_no_budget() -> None:
    given = {**zero(stage=3, offload_optimizer={"device": "auto"}), "memory_budget": {"disk": 1e9}}
    assert "memory_budget.disk = 1000000000 (from dict): has no directory" in complaint(given)


def test_a_warning_is_logged_once_per_process(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        load(zero(max_reuse_distance=123), origin="test_a_warning_is_logged_once")
    assert capsys.readouterr().err.count("max_reuse_distance is deprecated") == 1


# Contradictions
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, clause",
    [
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "autocast needs it in fp32",
        ),
        ({"precision": "fp32", "bf16": {"enabled": True}}, "contradicts bf16.enabled"),
        ({"precision": "bf16", "fp16": {"enabled": True}}, "contradicts fp16.enabled"),
        (
            {"fp16": {"loss_scale_window": 0}},
            "fp16.loss_scale_window = 0 (from dict): must be greater than 0",
        ),
        ({"fp16": {"min_loss_scale": 0}}, "must be greater than 0 if the loss scale is dynamic"),
        ({"optimizer": {"params": {"lr": 1}}}, "needs optimizer.type"),
        ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "needs scheduler.type"),
    ],
)
def test_a_contradiction_is_an_error(given: dict[str, Any], clause: str) -> None:
    assert clause in complaint(given)


def test_a_fixed_loss_scale_needs_no_window() -> None:
    assert (
        load({"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}}).get(
            "fp16.loss_scale"
        )
        == 128.0
    )


def test_a_monitor_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_room, "find_spec", lambda name: None)
    assert "the package wandb is not installed" in complaint({"wandb": {"enabled": True}})
    monkeypatch.setattr(checks_room, "find_spec", lambda name: object())
    assert load({"wandb": {"enabled": True}}).get("wandb.enabled") is True


# Not built
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, key",
    [
        (zero(zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow"),
        ({"expert_parallel": {"enabled": True, "top_k": 2}}, "expert_parallel.enabled"),
        (
            {"tensor_parallel": {"autotp_size": 2, "kernel_inject": True}},
            "tensor_parallel.kernel_inject",
        ),
        (
            {"tensor_parallel": {"tp": {"tp_size": 2, "tp_group": "g"}}},
            "tensor_parallel.tp.tp_group",
        ),
        ({"autotuning": {"enabled": True, "fast": False}}, "autotuning.enabled"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "optimizer.type"),
        (
            {"compression_training": {"x": {"shared_parameters": {"enabled": True}}}},
            "compression_training",
        ),
    ],
)
def test_a_key_that_is_not_built_is_named(given: dict[str, Any], key: str) -> None:
    text = complaint(given, NotBuiltError)
    assert f"1. {key} = " in text
    assert "is not built" in text


@pytest.mark.parametrize(
    "given, words",
    [
        ({"sparse_gradients": True}, ("8504", "zero_quantized_gradients")),
        (
            {"compression_training": {"x": {"shared_parameters": {"enabled": True}}}},
            ("8489", "remove the section"),
        ),
        ({"optimizer": {"type": "ZeroOneAdam"}}, ("8489", "zero_quantized_gradients")),
        ({"optimizer": {"type": "OneBitLamb"}}, ("8489", "use Lamb")),
    ],
)
@pytest.mark.parametrize("unknown", ["error", "warn"])
def test_features_that_deepspeed_removed_are_refused_with_an_alternative(
    given: dict[str, Any], words: tuple[str, ...], unknown: Any
) -> None:
    # unknown="warn" is used under the name deepspeed; dense sums give the same result
    if unknown == "warn" and "sparse_gradients" in given:
        assert isinstance(load(given, unknown=unknown), RawConfig)
        return
    with pytest.raises(NotBuiltError, match="DeepSpeed has removed it") as caught:
        load(given, unknown=unknown)
    assert all(word in str(caught.value) for word in words)
    off = {
        "sparse_gradients": False,
        "compression_training": {"x": {"shared_parameters": {"enabled": False}}},
    }
    assert isinstance(load(off, unknown=unknown), RawConfig)


def test_error_feedback_without_coded_messages_is_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stated = {
        "compression": {"gradients": {"error_feedback": "int8"}},
        "zeropp_loco_param": {"err_beta": 0.5},
    }
    load(zero(**stated))
    said = capsys.readouterr().err
    assert (
        "zeropp_loco_param" in said
        and "compression.gradients.error_feedback" in said
        and "gradients are not quantized" in said
    )
    load(zero(**stated, zero_quantized_gradients=True))
    assert "gradients are not quantized" not in capsys.readouterr().err


GOES_ON = [key.path for key in NOT_BUILT_KEYS if key.goes_on]


@pytest.mark.parametrize("path", GOES_ON)
def test_under_deepspeeds_name_unsupported_keys_without_effect_on_results_are_accepted(
    path: str,
) -> None:
    given = off_default_config(path)
    with pytest.raises(NotBuiltError, match="is not built"):
        load(given)
    notes = load(given, unknown="warn").notes
    assert any("is not built" in note for note in notes)


def test_under_deepspeeds_name_offload_without_its_stage_is_ignored() -> None:
    given = zero(stage=2, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
    with pytest.raises(ConfigError, match="needs stage 3"):
        load(given)
    raw = load(given, unknown="warn")
    assert raw.get("zero_optimization.offload_param.device") == "none"
    assert raw.get("zero_optimization.offload_optimizer.device") == "cpu"
    assert given["zero_optimization"]["offload_param"] == {"device": "cpu"}  # unchanged


@pytest.mark.parametrize(
    "given",
    [
        {"autotuning": {"enabled": False, "fast": False}},
        {"tensor_parallel": {"autotp_size": 1, "kernel_inject": True}},
        {"compression_training": {"x": {"shared_parameters": {"enabled": False, "bits": 4}}}},
        {"pp_degree": 1, "mp_degree": 1, "sparse_attention": None},
        zero(zenflow=None, zero_hpz_partition_size=1, mics_shard_size=-1),
        {"aio": {"block_size": 262144, "thread_count": 1}, "zero_allow_untested_optimizer": True},
    ],
)
def test_unsupported_sections_are_accepted_if_disabled(given: dict[str, Any]) -> None:
    assert isinstance(load(given), RawConfig)


def test_a_mistake_and_an_unimplemented_key_are_listed_in_one_config_error() -> None:
    text = complaint({"sparse_gradients": True, "zero_optimization": {"stage": 9}})
    assert "sparse_gradients = True" in text and "zero_optimization.stage = 9" in text


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"device": "nvme"}, "activation_checkpointing.nvme_path = None (from dict): is missing"),
        (
            {"device": "nvme", "nvme_path": "/tmp", "cpu_checkpointing": True},
            "contradicts device 'nvme'",
        ),
        ({"number_checkpoints": 0}, "activation_checkpointing.number_checkpoints"),
    ],
)
def test_an_invalid_device_for_activations_is_named(section: dict[str, Any], words: str) -> None:
    assert words in complaint({"activation_checkpointing": section})


# Which source
# --------------------------------------------------------------------------------------------------


def test_the_configuration_is_read_from_every_source() -> None:
    given = {"train_batch_size": 1}
    assert choose_source(given, None, None) == (given, None)
    assert choose_source(None, given, SimpleNamespace(deepspeed_config=None)) == (given, None)
    assert choose_source(None, None, SimpleNamespace(deepspeed_config="ds.json")) == (
        "ds.json",
        None,
    )
    assert choose_source(None, None, SimpleNamespace(deepscale_config="ds.json")) == (
        "ds.json",
        None,
    )
    assert choose_source(None, None, SimpleNamespace(deepspeed_config=given)) == (given, "args")


@pytest.mark.parametrize(
    "config, args, words",
    [
        (None, None, "no configuration was given"),
        (
            {},
            SimpleNamespace(deepspeed_config="a"),
            "the argument of initialize and the flag --deepspeed_config",
        ),
        (
            None,
            SimpleNamespace(deepspeed_config="a", deepscale_config="b"),
            "--deepscale_config and --deepspeed_config",
        ),
    ],
)
def test_no_source_or_two_are_errors(config: Any, args: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_source(config, None, args)


# Rules by parameter name
# ----------------------------------------------------------------------------------------------


def specs(**spec: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [spec]}}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (specs(patterns=[".*a"], partition_type="diagonal"), "must be row, column or skip"),
        (specs(patterns=["("]), "must be a list of regular expressions"),
        (specs(patterns=".*a"), "must be a list of regular expressions"),
        (specs(patterns=[".*a"], pattern="b"), r"layer_specs\[0\].pattern = 'b' .*no such key"),
        (
            specs(patterns=[".*a"], partition_type="row", partition_dim=0),
            "partition_dim = 0 .*is not built",
        ),
        (specs(patterns=[".*a"], shape=[[8, -2, 2], -1]), "shape = .*is not built"),
        (
            specs(patterns=[".*a"], grad_allreduce=True),
            "grad_allreduce = True .*applies only to layers that are skipped",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": {"patterns": []}}}},
            "must be a list of objects",
        ),
        (
            {"tensor_parallel": {"partition_config": {"strict": True}}},
            "partition_config.strict = True .*no such key",
        ),
        (
            {"pipeline": {"stages": 2, "virtual": 2}},
            "pipeline.virtual = 2 .*must be 1 with schedule 1f1b",
        ),
        (
            {"pipeline": {"stages": 2, "group": 2, "schedule": "interleaved"}},
            "does not apply to schedule interleaved",
        ),
    ],
)
def test_a_rule_or_a_schedule_that_cannot_be_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DeepSeekZeroError, match=words):
        load(given)


def test_rules_are_those_for_the_model() -> None:
    found = {
        "layer_specs": [
            {"patterns": [".*qkv.weight$"], "partition_type": "Column", "shape": (3, -1)},
            {
                "patterns": [".*o.weight$", ".*down.weight$"],
                "partition_type": "row",
                "model_types": ["llama"],
            },
            {"patterns": [".*norm.*"], "partition_type": "skip", "grad_allreduce": True},
            {"patterns": [".*head.*"], "gather_output": True, "shape": [[8, 2, 2], 12]},
            {"patterns": [".*"], "partition_type": "skip"},
        ]
    }
    load({"tensor_parallel": {"partition_config": found}})
    assert layer_rules(found) == (
        (".*qkv.weight$", "column", 3, ()),
        (".*o.weight$", "row", 1, ("llama",)),
        (".*down.weight$", "row", 1, ("llama",)),
        (".*norm.*", "partial", 1, ()),
        (".*head.*", "column_gather", (8, 2, 2), ()),
        (".*", "skip", 1, ()),
    )
    assert layer_rules(None) == ()
