"""For every configuration key, a configuration that changes it from its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from deepseek_zero.config import Config
from deepseek_zero.config.fields import rows
from deepseek_zero.config.not_built import NOT_BUILT, NotBuilt
from deepseek_zero.config.problems import put

ROWS = rows(Config)
_CURRICULUM = next(row.example for row in ROWS if row.path == "data_efficiency.data_sampling")
# Pairs of required settings and the keys that take effect only with them.
_NEEDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"optimizer.type": "AdamW"}, ("optimizer.params scheduler.type")),
    ({"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}, ("scheduler.params")),
    (
        {"fp16.enabled": True},
        (
            "fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window "
            "fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale"
        ),
    ),
    (
        {"bf16.enabled": True},
        (
            "bf16.check_grad_overflow bf16.master bf16.bf16_master_weights_and_grads "
            "bf16.bf16_optimizer_states data_types.grad_accum_dtype"
        ),
    ),
    ({"torch_autocast.enabled": True}, ("torch_autocast.dtype")),
    ({"precision": "auto"}, ("precision_window")),
    ({"zero_optimization.stage": 2}, ("zero_optimization.reduce_bucket_size")),
    (
        {"zero_optimization.stage": 3},
        (
            "zero_optimization.offload_param.device "
            "zero_optimization.offload_optimizer.device "
            "zero_optimization.vertical_micro_batches zero_optimization.sub_group_size "
            "zero_optimization.stage3_max_live_parameters "
            "zero_optimization.stage3_max_reuse_distance "
            "zero_optimization.stage3_prefetch_bucket_size "
            "zero_optimization.stage3_param_persistence_threshold "
            "zero_optimization.stage3_model_persistence_threshold "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save "
            "zero_optimization.zero_hpz_partition_size "
            "zero_optimization.zero_quantized_weights "
            "zero_optimization.zero_quantized_nontrainable_weights "
            "zero_optimization.compression.weights.bits zero_optimization.compression.auto "
            "zero_optimization.leaf_module.classes zero_optimization.leaf_module.names "
            "zero_optimization.leaf_module.name_suffixes units"
        ),
    ),
    (
        {"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "nvme"},
        ("zero_optimization.offload_param.nvme_path"),
    ),
    (
        {"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "cpu"},
        ("zero_optimization.offload_param.pin_memory"),
    ),
    (
        {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "nvme"},
        ("zero_optimization.offload_optimizer.nvme_path"),
    ),
    (
        {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"},
        (
            "zero_optimization.offload_optimizer.pin_memory "
            "zero_optimization.offload_optimizer.ratio "
            "zero_optimization.offload_optimizer.super_offload "
            "zero_optimization.offload_optimizer.delayed_update_after"
        ),
    ),
    (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_optimizer.super_offload": True,
        },
        ("zero_optimization.offload_optimizer.undo_bytes"),
    ),
    (
        {"zero_optimization.stage": 3, "zero_optimization.zero_quantized_weights": True},
        ("zero_optimization.compression.weights.block"),
    ),
    (
        {"zero_optimization.zero_quantized_gradients": True},
        (
            "zero_optimization.compression.gradients.block "
            "zero_optimization.compression.gradients.inside_bits "
            "zero_optimization.compression.gradients.error_feedback "
            "zero_optimization.compression.min_numel zero_optimization.zeropp_loco_param"
        ),
    ),
    (
        {
            "zero_optimization.zero_quantized_gradients": True,
            "zero_optimization.zeropp_loco_param": {},
        },
        (
            "zero_optimization.zeropp_loco_param.err_beta "
            "zero_optimization.zeropp_loco_param.reset_T"
        ),
    ),
    (
        {"zero_optimization.offload_optimizer.device": "auto", "zero_optimization.stage": 3},
        ("memory_budget.host"),
    ),
    (
        {
            "zero_optimization.offload_optimizer.device": "auto",
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer.nvme_path": "states",
        },
        ("memory_budget.disk"),
    ),
    ({"integrity.mode": "warn"}, ("integrity.every")),
    (
        {"tensor_parallel.autotp_size": 2},
        (
            "tensor_parallel.tp.tp_grain_size tensor_parallel.tensor_parallel.tp_grain_size "
            "tensor_parallel.injection_policy_tuple tensor_parallel.partition_config "
            "tensor_parallel.preset_model tensor_parallel.sequence tensor_parallel.loss"
        ),
    ),
    (
        {"pipeline.stages": 2},
        (
            "pipeline.partition pipeline.schedule pipeline.micro_batches pipeline.rows "
            "pipeline.activation_checkpoint_interval"
        ),
    ),
    ({"pipeline.stages": 2, "pipeline.schedule": "interleaved"}, ("pipeline.virtual")),
    ({"pipeline.stages": 2, "pipeline.schedule": "breadth_first"}, ("pipeline.group")),
    ({"records.path": "runs/demo"}, ("records.every")),
    ({"tensorboard.enabled": True}, ("tensorboard.output_path tensorboard.job_name")),
    ({"csv_monitor.enabled": True}, ("csv_monitor.output_path csv_monitor.job_name")),
    ({"wandb.enabled": True}, ("wandb.group wandb.team wandb.project")),
    (
        {"comet.enabled": True},
        (
            "comet.samples_log_interval comet.project comet.workspace comet.api_key "
            "comet.experiment_name comet.experiment_key comet.online comet.mode"
        ),
    ),
    (
        {"flops_profiler.enabled": True},
        (
            "flops_profiler.profile_step flops_profiler.recompute_fwd_factor "
            "flops_profiler.module_depth flops_profiler.detailed flops_profiler.output_file"
        ),
    ),
    ({"checkpoint.keep_last": 3}, ("checkpoint.keep_every")),
    ({"checkpoint.save_on_signal.path": "checkpoints"}, ("checkpoint.save_on_signal.signals")),
    (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer.device": "nvme",
            "zero_optimization.offload_optimizer.nvme_path": "states",
        },
        ("aio.block_size aio.queue_depth"),
    ),
    (
        {"activation_checkpointing.contiguous_memory_optimization": True},
        ("activation_checkpointing.number_checkpoints"),
    ),
    ({"activation_checkpointing.device": "nvme"}, ("activation_checkpointing.nvme_path")),
    (
        {"sparse_attention.mode": "fixed"},
        (
            "sparse_attention.num_local_blocks sparse_attention.num_global_blocks "
            "sparse_attention.horizontal_global_attention"
        ),
    ),
    (
        {"sparse_attention.mode": "fixed", "sparse_attention.different_layout_per_head": True},
        ("sparse_attention.num_different_global_patterns"),
    ),
    (
        {"sparse_attention.mode": "bigbird"},
        ("sparse_attention.num_random_blocks sparse_attention.num_sliding_window_blocks"),
    ),
    ({"sparse_attention.mode": "variable"}, ("sparse_attention.local_window_blocks")),
    (
        {"sparse_attention.mode": "bslongformer"},
        ("sparse_attention.global_block_indices sparse_attention.global_block_end_indices"),
    ),
    (
        {"sparse_attention.mode": "bigbird", "sparse_attention.num_random_blocks": 1},
        ("sparse_attention.seed"),
    ),
    ({"data_efficiency.data_sampling": _CURRICULUM}, ("data_efficiency.seed")),
)
NEEDS = {path: needs for needs, paths in _NEEDS for path in paths.split()}
# Keys that verify the run and do not change it.
CHECKS = frozenset(
    (
        "sequence_parallel_size data_parallel_size zero_optimization.mics_shard_size "
        "mesh.pp mesh.dp_replicate mesh.dp_shard mesh.sp mesh.tp dp_degree pp_degree "
        "mp_degree tensor_parallel.autotp_size tensor_parallel.tp.tp_size "
        "tensor_parallel.tensor_parallel.tp_size pipeline.stages"
    ).split()
)


@dataclass(frozen=True)
class KeyNotBuilt:
    """A known key that is not implemented.

    Attributes:
        switch: The key that enables the feature.
        goes_on: The drop-in accepts the key with a warning.
    """

    path: str
    default: Any
    example: Any
    kind: Any
    switch: str
    goes_on: bool


def _keys(row: NotBuilt) -> Iterator[KeyNotBuilt]:
    goes_on = bool(row.alternative)
    if not row.switch:
        switch = row.only_above_one[0] if row.only_above_one else ""
        example = {row.keys.split()[0]: 1} if row.keys else _other_than(row.default, row.kind)
        yield KeyNotBuilt(
            row.path, row.default, example, row.kind or type(row.default), switch, goes_on
        )
    for name, default in row.defaults.items():
        path = f"{row.path}.{name}"
        switch = f"{row.path}.{row.switch}" if row.switch and name != row.switch else ""
        is_covered = goes_on and name not in row.strict
        yield KeyNotBuilt(
            path, default, _other_than(default, None), type(default), switch, is_covered
        )


def _other_than(default: Any, kind: Any) -> Any:
    """Return a valid value other than the default."""
    if kind is not None:
        return next(option for option in get_args(kind) if option != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return default + 1
    if isinstance(default, tuple):
        return ["other"]
    return {"enabled": True} if isinstance(default, dict) else "other"


NOT_BUILT_KEYS = [key for row in NOT_BUILT.values() for key in _keys(row)]


def off_default_config(path: str) -> dict[str, Any]:
    """Return a configuration that sets one key to a non-default value and adds what the key
    requires.
    """
    config: dict[str, Any] = {}
    key = next((key for key in (*ROWS, *NOT_BUILT_KEYS) if key.path == path), None)
    if key is None:
        raise KeyError(path)
    if not isinstance(key, KeyNotBuilt):
        for other, value in NEEDS.get(path, {}).items():
            put(config, other, value)
    elif key.switch:
        put(config, key.switch, 2 if key.switch.endswith("size") else True)
    put(config, path, key.example)
    return config
