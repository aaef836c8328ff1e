"""Known keys of DeepSpeed's configuration that are not implemented.

A key with its default value is accepted. Any other value raises `NotBuiltError`. If the row has an
alternative, programs that import `deepspeed` get a warning instead, and the run continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from ..base.errors import shown
from .fields import Section
from .problems import Problem, Problems, Values

_Dtype = Literal["fp32", "fp16", "bf16"]


class Milestone(StrEnum):
    """The part of the library that would have to implement a key that is not implemented."""

    TIERS = "the host and NVMe tiers (ZeRO-Offload, ZeRO-Infinity)"
    CHECKPOINTS = "durable, reshapable checkpoints"
    SPEED = "the speed work (compressed and hierarchical communication, compilation, profiling)"
    CLIENTS = "client compatibility (Hugging Face, Lightning, plain DeepSpeed scripts)"
    EXPERTS = "expert parallelism"
    UNPLANNED = "no part that is planned"


@dataclass(frozen=True)
class NotBuilt:
    """One row of the table: a key, or a section of keys.

    Attributes:
        path: The dotted key.
        what: What DeepSpeed does with it, in one sentence.
        default: The value that requests nothing. Null requests nothing either.
        keys: For a section: the names of its keys, separated by spaces.
        switch: For a section: the key that enables it. Without a switch, any object enables it.
        strict: Keys of a section that change results, so `alternative` does not cover them, with
            their defaults. The values of keys that are neither `switch` nor strict are not read.
        part: The part of the library that would add the key.
        alternative: What a run does without the key, if its result is right nevertheless.
        removed: The pull request that removed the key from DeepSpeed, with its reason.
        fix: What to do instead of using a removed key.
        only_above_one: The key is read only if one of these sizes is above 1.
        kind: The type of the value, if `default` does not determine it.
    """

    path: str
    what: str
    default: Any = None
    keys: str = ""
    switch: str = ""
    strict: Mapping[str, Any] = field(default_factory=dict)
    part: Milestone = Milestone.UNPLANNED
    alternative: str = ""
    removed: str = ""
    fix: str = "remove the key, or leave it at its default"
    only_above_one: tuple[str, ...] = ()
    kind: Any = None

    @property
    def defaults(self) -> Values:
        """Return the defaults of a section's keys; null for keys that are not read."""
        switch = {self.switch: False} if self.switch else {}
        return {**dict.fromkeys(self.keys.split()), **switch, **self.strict}

    @property
    def reason(self) -> str:
        """Return why the key is not implemented, as a clause."""
        if self.removed:
            return f"DeepSpeed has removed it ({self.removed})"
        if self.part is Milestone.UNPLANNED:
            return "it is not planned"
        return f"it comes with {self.part}"


_TP_SIZES = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "tensor_parallel.tensor_parallel.tp_size",
)

_ROWS = (
    # ZeRO and tiers
    NotBuilt(
        "zero_optimization.load_from_fp32_weights",
        "Take main weights from the checkpoint instead of the loaded weights.",
        default=True,
        part=Milestone.CHECKPOINTS,
        alternative="a checkpoint has one copy of the weights, the masters, and they are loaded",
    ),
    NotBuilt(
        "zero_optimization.zenflow",
        "Asynchronous offload by importance of gradient columns.",
        keys=(
            "topk_ratio select_strategy select_interval update_interval overlap_step offload "
            "auto_ratio full_warm_up_rounds pt_reserved_cores_perc"
        ),
        part=Milestone.TIERS,
        alternative="every column is updated at every step",
    ),
    NotBuilt(
        "aio.use_gds",
        "Transfer between disk and GPU without host memory.",
        default=False,
        alternative="states are copied through host memory",
    ),
    # Gradients and precision
    NotBuilt(
        "sparse_gradients",
        "Send embedding gradients as sparse rows.",
        default=False,
        alternative="embeddings are reduced like other matrices, with the same result",
        removed="pull request 8504: it had no users",
        fix=(
            "remove it: embeddings are reduced like other matrices, with "
            "zero_quantized_gradients in 4 bits"
        ),
    ),
    NotBuilt(
        "seq_parallel_communication_data_type",
        "Dtype in which gradients are reduced across sequence-parallel ranks.",
        default="fp32",
        kind=_Dtype,
        alternative=(
            "they are reduced with those of the data-parallel ranks, in communication_data_type"
        ),
    ),
    NotBuilt(
        "fp16.fp16_master_weights_and_grads",
        "Keep main weights and gradients in fp16.",
        default=False,
        part=Milestone.TIERS,
        alternative="they are kept in fp32",
    ),
    NotBuilt(
        "torch_autocast.lower_precision_safe_modules",
        "Module classes whose gradients are reduced in the autocast dtype.",
        default=(),
        part=Milestone.SPEED,
        alternative="gradients are sent in their own dtype",
    ),
    NotBuilt(
        "data_types.param_dtype",
        "Dtype of the weights in computation.",
        kind=_Dtype,
        part=Milestone.CLIENTS,
        alternative="the sections fp16 and bf16 decide it",
    ),
    NotBuilt(
        "data_types.buffer_dtype",
        "Dtype of the buffers.",
        kind=_Dtype,
        part=Milestone.CLIENTS,
        alternative="buffers keep their own",
    ),
    NotBuilt(
        "amp",
        "Use NVIDIA Apex AMP; torch_autocast is its successor.",
        switch="enabled",
        keys="enabled opt_level",
    ),
    # Axes
    *(
        NotBuilt(f"tensor_parallel.{section}.{name}", what, only_above_one=_TP_SIZES)
        for section in ("tp", "tensor_parallel")
        for name, what in (
            ("mpu", "Object that names the ranks: pass it to initialize as mpu."),
            ("tp_group", "Process group of tensor parallelism: pass it to tp_model_init."),
        )
    ),
    NotBuilt(
        "tensor_parallel.kernel_inject",
        "Replace layers by fused kernels.",
        default=False,
        alternative="layers keep their own kernels",
        only_above_one=_TP_SIZES,
    ),
    NotBuilt(
        "expert_parallel",
        "Spread experts over ranks automatically (AutoEP).",
        switch="enabled",
        keys=(
            "enabled autoep_size expert_tensor_parallel_size preset_model moe_layer_pattern "
            "expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm "
            "route_scale score_apply score_func combine_impl top_k num_expert_groups "
            "num_limited_groups routed_scaling_factor expert_w1 expert_w2 expert_w3 "
            "num_experts_attr top_k_attr has_shared_experts shared_experts_pattern "
            "shared_experts_gate_pattern validate_folding_routing"
        ),
        # Without one of these keys an expert layer would have another result.
        strict={
            **dict.fromkeys("route_norm score_apply score_func top_k num_expert_groups".split()),
            **dict.fromkeys("num_limited_groups routed_scaling_factor".split()),
            "route_scale": 1.0,
        },
        part=Milestone.EXPERTS,
        alternative=(
            "every rank has all experts, sharded by ZeRO like other weights: the model's own "
            "function"
        ),
    ),
    NotBuilt(
        "use_data_before_expert_parallelism",
        "Order of the axes with experts.",
        default=False,
        part=Milestone.EXPERTS,
        alternative="no axis has experts",
    ),
    # Checkpoints
    NotBuilt(
        "checkpoint.use_node_local_storage",
        "Every node writes to its own disk.",
        default=False,
        part=Milestone.CHECKPOINTS,
        alternative="all ranks write into the folder that is named, which every host must see",
    ),
    NotBuilt(
        "checkpoint.parallel_write",
        "Write the layers of a pipeline stage from all its ranks.",
        switch="pipeline_stage",
        keys="pipeline_stage",
        part=Milestone.CHECKPOINTS,
        alternative="each rank writes its slices in any case",
    ),
    NotBuilt(
        "checkpoint.writer",
        "DeepSpeed's own file writer.",
        keys=(
            "type decoupled io_buffer_size io_buffer_double io_multiplier show_statistics "
            "data_parallel"
        ),
        part=Milestone.CHECKPOINTS,
        alternative="files are written by the library's own writer",
    ),
    NotBuilt(
        "nebula",
        "Save through the Azure Nebula service.",
        switch="enabled",
        keys=(
            "enabled enable_nebula_load load_path nebula_load_path persistent_storage_path "
            "persistent_time_interval num_of_version_in_retention"
        ),
        alternative="checkpoints are saved to the folder that the program names",
    ),
    NotBuilt(
        "datastates_ckpt",
        "Save through the DataStates checkpoint engine.",
        alternative="files are written by the library's own writer",
    ),
    # Compilation, logs, search
    NotBuilt(
        "compile",
        "Insert the collectives into the compiled graph (DeepCompile).",
        switch="deepcompile",
        keys=(
            "deepcompile passes offload_parameters offload_opt_states offload_activation "
            "offload_activation_pin_memory free_activation free_activation_threshold "
            "double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce "
            "sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors"
        ),
        part=Milestone.SPEED,
        alternative="engine.compile compiles each block, collectives stay outside",
    ),
    NotBuilt(
        "comms_logger",
        "Log every collective with size and time.",
        switch="enabled",
        keys="enabled verbose prof_all debug prof_ops",
        part=Milestone.CLIENTS,
        alternative=(
            "only the program's own calls of deepspeed.comm are logged; `records` has the bytes "
            "of every step"
        ),
    ),
    NotBuilt(
        "autotuning",
        "Search for a fast configuration by experiments.",
        switch="enabled",
        keys=(
            "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step "
            "metric metric_path model_info model_info_path mp_size max_train_batch_size "
            "min_train_batch_size max_train_micro_batch_size_per_gpu "
            "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes tuner_type "
            "tuner_early_stopping tuner_num_trials arg_mappings"
        ),
        alternative="the run trains with the configuration as it stands",
    ),
    NotBuilt(
        "elasticity",
        "Choose a batch size that fits many numbers of ranks.",
        switch="enabled",
        keys=(
            "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
            "prefer_larger_batch ignore_non_elastic_batch_info version num_gpus_per_node "
            "model_parallel_size"
        ),
        part=Milestone.CLIENTS,
    ),
    # Training methods
    NotBuilt(
        "hybrid_engine",
        "Switch between training and inference kernels.",
        switch="enabled",
        keys=(
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph"
        ),
        alternative="the model generates with its own forward",
    ),
    NotBuilt(
        "progressive_layer_drop",
        "Drop layers at random, more over time.",
        switch="enabled",
        keys="enabled theta gamma",
    ),
    NotBuilt(
        "curriculum_learning",
        "Begin with easy (short) samples: the old key.",
        switch="enabled",
        keys=(
            "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config"
        ),
    ),
    NotBuilt(
        "data_efficiency.data_routing",
        "Random layer-token dropping.",
        default={},
        alternative="layers compute all tokens, like layers that no program converts",
    ),
    NotBuilt(
        "compression_training",
        "Quantise and prune during training.",
        default={},
        removed="pull request 8489: it had no users",
        fix=(
            "remove the section; torch.ao and torchao quantise and prune models, before or after "
            "training"
        ),
    ),
    NotBuilt(
        "weight_quantization",
        "Quantised weights for inference.",
        default={},
    ),
    NotBuilt("quantize_training", "Quantise during training, by a schedule.", default={}),
)

NOT_BUILT = {row.path: row for row in _ROWS}


def names_below(prefix: str) -> tuple[str, ...]:
    """Return the keys and sections directly below a section; "" is the top level."""
    return tuple(
        row.path.removeprefix(prefix)
        for row in _ROWS
        if row.path.rpartition(".")[0] == prefix.rstrip(".")
    )


def paths_not_built() -> list[str]:
    """Return every dotted key of the table; a section is replaced by its keys."""
    paths = []
    for row in _ROWS:
        paths += [f"{row.path}.{name}" for name in row.defaults] or [row.path]
    return paths


def kind_of(default: Any) -> Any:
    """Return the type annotation for a default; `Any` for null."""
    if default is None:
        return Any
    if isinstance(default, tuple):
        return tuple[str, ...]
    if isinstance(default, dict):
        return Values
    return type(default)


def refuse(stated: Mapping[str, Any], config: Section, problems: Problems) -> None:
    """Add a problem or a warning for each set key that is not implemented and not disabled.

    Args:
        stated: The values that the user set for rows of the table, by path.
        config: The other keys of the configuration.
        problems: The list that problems and warnings are added to.
    """
    for path, value in stated.items():
        row = NOT_BUILT[path]
        if row.keys:
            _refuse_section(row, value, problems)
        elif _asks(row.default, value) and _is_read(row, config):
            _refuse(row, path, value, "", problems)


def _refuse_section(row: NotBuilt, stated: Mapping[str, Any], problems: Problems) -> None:
    if not row.switch:
        _refuse(row, row.path, stated, "", problems)
        return
    value = stated.get(row.switch)
    if not _asks(False, value):
        return
    others = ", ".join(name for name in stated if name != row.switch)
    suffix = f" (with {others})" if others else ""
    _refuse(row, f"{row.path}.{row.switch}", value, suffix, problems)
    if not (problems.goes_on and row.alternative):
        return
    for name, default in row.strict.items():
        if _asks(default, stated.get(name)):
            problems.found.append(_problem(row, f"{row.path}.{name}", stated[name]))


def _refuse(row: NotBuilt, key: str, value: Any, suffix: str, problems: Problems) -> None:
    if problems.goes_on and row.alternative:
        problems.warn(key, f"{shown(value)}{suffix} is not built; {row.alternative}")
    else:
        problems.found.append(_problem(row, key, value, suffix))


def _problem(row: NotBuilt, key: str, value: Any, suffix: str = "") -> Problem:
    return Problem(key, f"is not built{suffix}: {row.reason}", row.fix, value, not_built=True)


def _is_read(row: NotBuilt, config: Section) -> bool:
    sizes = [config.stated(key) or 0 for key in row.only_above_one]
    return not sizes or max(sizes) > 1


def _asks(default: Any, value: Any) -> bool:
    if isinstance(default, dict):
        return _enables_anything(value)
    try:
        return bool(value is not None and value != default)
    # objects of other libraries (an mpu, a tensor) may not support the comparison
    except Exception:
        return True


def _enables_anything(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        inner if name.endswith("enabled") else _enables_anything(inner)
        for name, inner in value.items()
    )
