"""DeepSpeed's configuration classes, for programs that build or read them.

They have DeepSpeed's field names, defaults and pydantic errors. No engine reads them: `initialize`
reads the configuration itself (config/schema.py). A program may build a DeepSpeedConfig from the
same file to inspect it. Keys of features that this library does not have are ordinary fields.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ...base.errors import ConfigError, DeepSpeedConfigError
from ...base.log import logger
from ...config.batch import BatchRequest, solve
from ...config.problems import Problem
from ...config.schema import MOE_BLOCKS
from ...config.text import read
from . import comm
from .constants import OffloadDeviceEnum, ZeroStageEnum

Given = Mapping[str, Any]  # a configuration, or a section of it
Fields = dict[str, Any]  # keys and their values
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
DEFAULT_LEAF_CLASSES = list(MOE_BLOCKS)


class DeepSpeedConfigModel(BaseModel):
    """Base class of a section of the configuration.

    Unknown keys are errors. The value "auto" is the same as leaving the key out.

    A field is deprecated if its json_schema_extra has {"deprecated": True, "new_param": name}. Its
    value is assigned to the new field, after "new_param_fn" if there is one. Setting both raises
    AssertionError.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            about = field.json_schema_extra
            if (
                isinstance(about, dict)
                and about.get("deprecated")
                and name in self.model_fields_set
            ):
                self._hand_over(name, about)

    def _hand_over(self, name: str, about: Mapping[str, Any]) -> None:
        target = about.get("new_param", "")
        hint = f" use {target} instead" if target else ""
        logger.warning("Config parameter %s is deprecated%s", name, hint)
        if not target or not about.get("set_new_param", True):
            return
        value = about.get("new_param_fn", lambda given: given)(getattr(self, name))
        delattr(self, name)
        *path, last = target.split(".")
        section = reduce(getattr, path, self)
        assert last not in section.model_fields_set, (
            f"Cannot provide deprecated parameter '{name}' and replacing parameter '{target}' "
            "together"
        )
        setattr(section, last, value)


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """Offload of weights (section `zero_optimization.offload_param`)."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Offload of optimizer states (section `zero_optimization.offload_optimizer`)."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Share = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Share = 0.8

    @property
    def pipeline(self) -> bool:
        """Return whether reads or writes overlap with the update."""
        return self.pipeline_read or self.pipeline_write


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state that DeepSpeed's `offload_states` distinguishes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """ZeRO-3 leaf modules (section `zero_optimization.leaf_module`).

    A string is the same as a list with one element.
    """

    classes: list[str] = DEFAULT_LEAF_CLASSES
    names: list[str] = []
    name_suffixes: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        if not isinstance(given, Mapping | None):
            raise TypeError("leaf_module configuration must be a mapping of fields to values")
        return {
            key: [value] if isinstance(value, str) else value
            for key, value in (given or {}).items()
        }

    @field_validator("classes", "names", "name_suffixes")
    @classmethod
    def _each_once(cls, given: list[str]) -> list[str]:
        return list(dict.fromkeys(given))


class ZenFlowConfig(DeepSpeedConfigModel):
    """Settings for ZenFlow (section `zero_optimization.zenflow`)."""

    topk_ratio: float = Field(0.1, gt=0.0, lt=1.0)
    select_strategy: str = "auto"
    select_interval: str | int = "auto"
    update_interval: str | int = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: Share = 0.99
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: Share = 0.5
    steps_per_epoch: int | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _choices(self) -> ZenFlowConfig:
        if self.select_strategy not in ("auto", "step", "epoch"):
            raise ValueError('select_strategy must be one of "auto", "step", or "epoch"')
        for name in ("select_interval", "update_interval"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "auto":
                raise ValueError(f'If {name} is a string, it must be "auto"')
        if isinstance(self.update_interval, int) and self.update_interval < 1:
            raise ValueError("If update_interval is a number, it must be at least 1")
        return self


def _replaced(name: str, make: Callable[[Any], Any] | None = None, sets: bool = True) -> Any:
    """Declare a deprecated field and its replacement."""
    about: Fields = {"deprecated": True, "new_param": name, "set_new_param": sets}
    if make is not None:
        about["new_param_fn"] = make
    return Field(None, json_schema_extra=about)


def _on_the_host(is_on: bool | None) -> Fields | None:
    """Return the section that replaces `cpu_offload` or `cpu_offload_param`."""
    return {"device": "cpu"} if is_on else None


# Fields of DeepSpeedZeroConfig whose names may have the prefix "stage3_"
_STAGE_3 = frozenset(
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
    "max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save "
    "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential".split()
)


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """Settings for ZeRO (section `zero_optimization`).

    Fields of stage 3 accept names with and without the prefix "stage3_".
    """

    model_config = ConfigDict(
        alias_generator=lambda name: f"stage3_{name}" if name in _STAGE_3 else name
    )

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(500_000_000, gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: ZenFlowConfig | None = None
    sub_group_size: Count = 1_000_000_000
    cpu_offload_param: bool | None = _replaced("offload_param", _on_the_host)
    cpu_offload_use_pin_memory: bool | None = _replaced(
        "offload_param or offload_optimizer", sets=False
    )
    cpu_offload: bool | None = _replaced("offload_optimizer", _on_the_host)
    prefetch_bucket_size: Count = 50_000_000
    param_persistence_threshold: Count = 100_000
    model_persistence_threshold: Count = sys.maxsize
    max_live_parameters: Count = 1_000_000_000
    max_reuse_distance: Count = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    stage3_gather_fp16_weights_on_model_save: bool | None = _replaced(
        "gather_16bit_weights_on_model_save"
    )
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = DeepSpeedZeroLeafModuleConfig()

    @model_validator(mode="after")
    def _together(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        if self.elastic_checkpoint and self.stage == ZeroStageEnum.weights:
            logger.warning(
                "Elastic checkpointing is deprecated: a checkpoint loads at any number of ranks."
            )
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError("compute_grad_norm=false is supported only with ZeRO Stage 1 or 2")
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1.0:
            assert self.stage == ZeroStageEnum.weights, (
                "Partial offloading only supported for ZeRO Stage 3."
            )
        return self


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """Settings for bf16 training (section `bf16`)."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """Settings for fp16 training and loss scaling (section `fp16`).

    The window and the minimum scale are validated only if the scale is dynamic.
    """

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _numbers(cls, given: Any, info: ValidationInfo) -> Any:
        name = f"fp16.{info.field_name}"
        kind = "a number" if info.field_name == "loss_scale" else "an integer"
        try:
            value = math.nan if isinstance(given, bool) else float(given)
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            raise ValueError(f"{name} must be {kind}")
        if math.isinf(value) or (value < 0 and kind == "a number"):
            raise ValueError(
                f"{name} must be finite, and a loss scale at least 0, which means a dynamic one"
            )
        return given

    @model_validator(mode="after")
    def _dynamic(self) -> DeepSpeedFP16Config:
        for name in (
            ("loss_scale_window", "min_loss_scale") if self.enabled and self.loss_scale == 0 else ()
        ):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"fp16.{name} must be > 0 when dynamic loss scaling is enabled (loss_scale=0)"
                )
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the initial scale of dynamic loss scaling."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> Fields:
        """Return the arguments for a DynamicLossScaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class TensorBoardConfig(DeepSpeedConfigModel):
    """Settings for TensorBoard files (section `tensorboard`)."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(TensorBoardConfig):
    """Settings for CSV files (section `csv_monitor`)."""


class WandbConfig(DeepSpeedConfigModel):
    """Settings for Weights & Biases (section `wandb`)."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(DeepSpeedConfigModel):
    """Settings for Comet (section `comet`)."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """Settings for the four monitors, one field per section."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    comet: CometConfig = CometConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CSVConfig = CSVConfig()

    @property
    def enabled(self) -> bool:
        """Return whether any monitor is enabled."""
        return any(getattr(self, name).enabled for name in type(self).model_fields)


class CommsLoggerConfig(DeepSpeedConfigModel):
    """Settings for logs of collectives (section `comms_logger`)."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = []
    verbose: bool = False
    debug: bool = False


class DeepSpeedCommsConfig:
    """The section `comms_logger`, and whether the configuration has it."""

    def __init__(self, ds_config: Given) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config["comms_logger"])


class _PlainSection:
    """A section that DeepSpeed does not validate. Its keys are attributes."""

    name: ClassVar[str]
    defaults: ClassVar[Given]

    def __init__(self, param_dict: Given) -> None:
        given = param_dict.get(self.name, {})
        vars(self).update({key: given.get(key, default) for key, default in self.defaults.items()})

    def __repr__(self) -> str:
        return repr(vars(self))


class DeepSpeedFlopsProfilerConfig(_PlainSection):
    """Settings for the FLOPS profiler (section `flops_profiler`)."""

    name = "flops_profiler"
    defaults: ClassVar[Given] = {
        "enabled": False,
        "recompute_fwd_factor": 0.0,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    }


class DeepSpeedActivationCheckpointingConfig(_PlainSection):
    """Settings for activation checkpointing (section `activation_checkpointing`)."""

    name = "activation_checkpointing"
    defaults: ClassVar[Given] = {
        "partition_activations": False,
        "number_checkpoints": None,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
        "cpu_checkpointing": False,
        "profile": False,
    }


class CompileConfig(DeepSpeedConfigModel):
    """Settings for compilation (section `compile`); keys of DeepCompile are kept as fields."""

    model_config = ConfigDict(extra="allow")

    deepcompile: bool = False


class HybridEngineConfig(DeepSpeedConfigModel):
    """Settings for the hybrid engine (section `hybrid_engine`)."""

    enabled: bool = False
    max_out_tokens: int = 512
    inference_tp_size: int = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: int = 8


class ValidationMode:
    """Whether ranks that save under different tags log a warning, raise, or do neither."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class DtypeEnum(Enum):
    """Dtypes, with all of DeepSpeed's spellings."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        text = str(value).removeprefix("torch.")
        spellings = {
            "float16": "fp16",
            "half": "fp16",
            "float32": "fp32",
            "float": "fp32",
            "bfloat16": "bf16",
        }
        return cls.__members__.get(spellings.get(text, text))


# -- readers of single keys


def get_scalar_param(
    param_dict: Mapping[str, Any], param_name: str, param_default_value: Any
) -> Any:
    """Return the value of a key, or the default if it is missing.

    Args:
        param_dict: Section of the configuration to read.
        param_name: Key to look up in the section.
        param_default_value: Value to return if the key is missing.

    Returns:
        The value in `param_dict`, or `param_default_value`.
    """
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> Fields:
    """Return a dict of the pairs of a JSON object; for `object_pairs_hook`.

    Raises:
        ValueError: A key occurs twice.
    """
    names = [name for name, _ in ordered_pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Duplicate keys in the configuration: {twice}")
    return dict(ordered_pairs)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Return the default of a field of a section.

    Args:
        config: Class of the section.
        field_name: Name of the field, which must not be required.

    Returns:
        The default value of the field.
    """
    assert field_name in config.model_fields, f"'{field_name}' is not a field in {config}"
    field = config.model_fields[field_name]
    assert not field.is_required(), (
        f"'{field_name}' is a required field and does not have a default value"
    )
    return field.get_default(call_default_factory=True)


# Keys of the configuration and their defaults. The function `get_a_b` reads the key `a.b`.
KEYS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "managed_gradient_accumulation": True,
    "steps_per_print": None,
    "dump_state": False,
    "disable_python_gc": False,
    "disable_allgather": False,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_clipping": 1.0,
    "torch_autocast.enabled": False,
    "torch_autocast.lower_precision_safe_modules": None,
    "optimizer.type": None,
    "optimizer.params": None,
    "optimizer.params.max_grad_norm": None,
    "optimizer.legacy_fusion": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "scheduler.type": None,
    "scheduler.params": None,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "use_data_before_expert_parallelism": False,
    "dataloader_drop_last": False,
    "log_level": None,
    "checkpoint": {},
    "data_types": {},
    "aio": {},
    "timers": {},
    "tensor_parallel": {},
    "expert_parallel": {},
    "data_efficiency": {},
    "data_efficiency.enabled": False,
}
# Keys whose function has another name
NAMES = {
    "torch_autocast.lower_precision_safe_modules": "lower_precision_safe_modules",
    "optimizer.type": "optimizer_name",
    "optimizer.params.max_grad_norm": "optimizer_gradient_clipping",
    "scheduler.type": "scheduler_name",
    "use_data_before_expert_parallelism": "expert_data_topo_config",
    "checkpoint": "checkpoint_params",
    "data_types": "data_types_params",
    "aio": "aio_config",
    "timers": "timers_config",
    "tensor_parallel": "tensor_parallel_config",
    "expert_parallel": "expert_parallel_config",
    "data_efficiency": "data_efficiency_config",
}


def _key(path: str, default: Any, param_dict: Given) -> Any:
    found: Any = param_dict
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return default
        found = found[name]
    return found


_FUNCTIONS = {
    f"get_{NAMES.get(path) or path.replace('.', '_')}": partial(_key, path, default)
    for path, default in KEYS.items()
}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_gradient_allreduce_op(param_dict: Given) -> str:
    """Return how gradients are reduced over the ranks: "mean" or "sum".

    Raises:
        ValueError: The value is neither.
    """
    value = param_dict.get("gradient_allreduce_op", "mean")
    value = value.lower() if isinstance(value, str) else value
    if value not in ("mean", "sum"):
        raise ValueError(
            f"Invalid gradient_allreduce_op. Supported operations: ['mean', 'sum']. Got: {value!r}"
        )
    return str(value)


def get_communication_data_type(
    param_dict: Given,
    comm_type: str = "communication_data_type",
    comm_data_type_default: Any = None,
) -> torch.dtype | None:
    """Return the dtype of gradient reductions, or None if the engine chooses.

    Args:
        param_dict: Whole configuration, of which one key is read.
        comm_type: Key to read.
        comm_data_type_default: Default for a missing key.

    Returns:
        The dtype, or None if neither the key nor a default is set.
    """
    value = param_dict.get(comm_type, comm_data_type_default)
    if value is None or isinstance(value, torch.dtype):
        return value
    found: torch.dtype = DtypeEnum(str(value).lower()).value
    return found


def get_torch_autocast_dtype(param_dict: Given) -> torch.dtype | None:
    """Return the dtype of `torch_autocast.dtype`, or None."""
    return get_communication_data_type(param_dict.get("torch_autocast", {}), "dtype")


def get_zero_config(param_dict: Given) -> DeepSpeedZeroConfig:
    """Return the section `zero_optimization`. The value true means stage 1."""
    section = param_dict.get("zero_optimization", {})
    if isinstance(section, bool):
        section = {"stage": int(section)}
    return DeepSpeedZeroConfig(**section)


def get_bfloat16_config(param_dict: Given) -> DeepSpeedBF16Config:
    """Return the section `bf16` (or `bfloat16`) of a configuration with its defaults."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Given) -> DeepSpeedFP16Config:
    """Return the section `fp16` of a configuration with its defaults."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_monitor_config(param_dict: Given) -> DeepSpeedMonitorConfig:
    """Return the sections of the four monitors of a configuration with their defaults."""
    return DeepSpeedMonitorConfig(
        **{name: param_dict.get(name, {}) for name in DeepSpeedMonitorConfig.model_fields}
    )


def get_hybrid_engine_config(param_dict: Given) -> HybridEngineConfig:
    """Return the section `hybrid_engine` of a configuration with its defaults."""
    return HybridEngineConfig(**param_dict.get("hybrid_engine", {}))


def get_pipeline_config(param_dict: Given) -> Fields:
    """Return the section `pipeline` with its defaults."""
    defaults: Fields = {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
    }
    return {**defaults, **param_dict.get("pipeline", {})}


def get_checkpoint_tag_validation_mode(checkpoint_params: Given) -> str:
    """Return the validation mode of checkpoint tags: "WARN", "IGNORE" or "FAIL".

    Raises:
        DeepSpeedConfigError: The value is none of them.
    """
    mode = str(checkpoint_params.get("tag_validation", ValidationMode.WARN)).upper()
    if mode not in (ValidationMode.WARN, ValidationMode.IGNORE, ValidationMode.FAIL):
        raise DeepSpeedConfigError(
            f"Checkpoint config contains invalid tag_validation value of {mode}"
        )
    return mode


# Keys of earlier versions of DeepSpeed that 0.19.8 refuses, because it does not have these features
# any more
REMOVED = (
    "nebula compression_training amp quantize_training sparse_gradients eigenvalue "
    "sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop "
    "zero_optimization.mics_shard_size zero_optimization.mics_hierarchical_params_gather "
    "zero_optimization.zeropp_loco_param"
).split()


# Attributes of DeepSpeedConfig, in addition to those of KEYS, and the functions that read them
_SECTIONS: dict[str, Callable[[Given], Any]] = {
    "gradient_allreduce_op": get_gradient_allreduce_op,
    "communication_data_type": get_communication_data_type,
    "seq_parallel_communication_data_type": partial(
        get_communication_data_type,
        comm_type="seq_parallel_communication_data_type",
        comm_data_type_default=torch.float32,
    ),
    "zero_config": get_zero_config,
    "activation_checkpointing_config": DeepSpeedActivationCheckpointingConfig,
    "comms_config": DeepSpeedCommsConfig,
    "monitor_config": get_monitor_config,
    "float16_config": get_float16_config,
    "bfloat16_config": get_bfloat16_config,
    "torch_autocast_dtype": get_torch_autocast_dtype,
    "torch_autocast_lower_precision_safe_modules": _FUNCTIONS["get_lower_precision_safe_modules"],
    "flops_profiler_config": DeepSpeedFlopsProfilerConfig,
    "hybrid_engine": get_hybrid_engine_config,
    "pipeline": get_pipeline_config,
    "compile_config": lambda given: CompileConfig(**given.get("compile", {})),
    "load_universal_checkpoint": partial(_key, "checkpoint.load_universal", False),
    "use_node_local_storage": partial(_key, "checkpoint.use_node_local_storage", False),
    "checkpoint_config": _FUNCTIONS["get_checkpoint_params"],
    "grad_accum_dtype": partial(_key, "data_types.grad_accum_dtype", None),
    "param_dtype": partial(_key, "data_types.param_dtype", None),
    "buffer_dtype": partial(_key, "data_types.buffer_dtype", None),
    "use_data_before_expert_parallel_": _FUNCTIONS["get_expert_data_topo_config"],
}


class DeepSpeedConfig:
    """The whole configuration, with all batch sizes resolved and its sections as objects.

    Args:
        config: A dict, a path, or URL-safe base64 of JSON. JSON may contain comments and trailing
            commas.
        mpu: Model-parallel unit that gives the number of data-parallel ranks.
        mesh_device: DeviceMesh that gives the number of data-parallel ranks. Without both, the
            world size divided by the sequence-parallel size is used.

    Raises:
        ConfigError: The configuration cannot be read.
        DeepSpeedConfigError: It has a removed key.
        AssertionError: The batch sizes are inconsistent.
    """

    train_batch_size: Any
    train_micro_batch_size_per_gpu: Any
    gradient_accumulation_steps: Any
    gradient_allreduce_op: str
    wall_clock_breakdown: bool
    zero_config: DeepSpeedZeroConfig
    float16_config: DeepSpeedFP16Config
    bfloat16_config: DeepSpeedBF16Config
    compile_config: CompileConfig
    flops_profiler_config: Any

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict: Fields = _read(config)
        for path in REMOVED:
            if _key(path, None, self._param_dict) is not None:
                raise DeepSpeedConfigError(
                    f"'{path}' has been removed from DeepSpeed.",
                    fix=f"remove {path} from the configuration",
                )
        self.global_rank = comm.get_rank()
        self.world_size = _data_ranks(self._param_dict, mpu, mesh_device)
        self._read_sections(self._param_dict)
        self._configure_train_batch_size()
        self._refuse_contradictions()

    def _read_sections(self, given: Given) -> None:
        for name, function in (_FUNCTIONS | _SECTIONS).items():
            setattr(self, name.removeprefix("get_"), function(given))
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.wall_clock_breakdown = self.wall_clock_breakdown or self.flops_profiler_config.enabled
        mode = get_checkpoint_tag_validation_mode(given.get("checkpoint", {}))
        self.checkpoint_tag_validation_enabled = mode != ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail = mode == ValidationMode.FAIL
        self.checkpoint_parallel_write_pipeline = False
        self.eigenvalue_enabled = self.eigenvalue_verbose = False

    def _configure_train_batch_size(self) -> None:
        """Compute the missing batch sizes.

        Raises:
            AssertionError: The batch sizes do not fit the number of ranks.
        """
        batch = self.train_batch_size
        micro = self.train_micro_batch_size_per_gpu
        assert batch is not None or micro is not None, (
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"
        )
        steps = self.gradient_accumulation_steps
        found = solve(BatchRequest(self.world_size, batch, micro, steps))
        assert not isinstance(found, Problem), found.what
        self.train_batch_size = found.train
        self.train_micro_batch_size_per_gpu = found.micro
        self.gradient_accumulation_steps = found.accumulation

    def _refuse_contradictions(self) -> None:
        assert not (self.float16_config.enabled and self.bfloat16_config.enabled), (
            "bfloat16 and fp16 modes cannot be simultaneously enabled"
        )
        for found, what in (
            (self.zero_optimization_stage == 3, "ZeRO stage 3"),
            (self.zero_config.zenflow is not None, "ZenFlow"),
            (self.compile_config.deepcompile, "DeepCompile"),
        ):
            if found and self.gradient_allreduce_op == "sum":
                raise ValueError(f"gradient_allreduce_op='sum' is not supported with {what}")
        assert self.zero_enabled or not (
            self.float16_config.fp16_master_weights_and_grads
            or self.bfloat16_config.bf16_master_weights_and_grads
        ), "16-bit master weights and gradients are only supported with ZeRO Stage 1, 2, or 3."
        assert (
            self.bfloat16_config.bf16_master_weights_and_grads
            or not self.bfloat16_config.bf16_optimizer_states
        ), "bf16_optimizer_states requires bf16_master_weights_and_grads to be enabled."

    def print_user_config(self) -> None:
        """Log the configuration as the program passed it."""
        logger.info("  json = %s", self._param_dict)

    def print(self, name: str) -> None:
        """Log the name and value of every field of this configuration."""
        logger.info("%s:", name)
        for field, value in sorted(vars(self).items()):
            logger.info("  %s %s %s", field, "." * (29 - len(field)), value)


def _read(config: Any) -> Fields:
    """Return the configuration's keys.

    Raises:
        ConfigError: It cannot be read. The class is a ValueError.
    """
    source = dict(config) if isinstance(config, Mapping) else os.fspath(config)
    document = read(source, lenient=True)
    if document.duplicates:
        raise ConfigError(
            f"Duplicate keys in the configuration: {list(document.duplicates)}",
            fix="keep one of each",
        )
    return dict(document.values)


def _data_ranks(given: Given, mpu: Any, mesh_device: Any) -> int:
    """Return the number of data-parallel ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    if mesh_device is not None:
        return dist.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    shared = (
        mpu.get_sequence_parallel_world_size()
        if mpu is not None
        else given.get("sequence_parallel_size", 1)
    )
    return dist.get_world_size() // int(shared)
