"""DeepSpeed's engine: its methods and attributes, most of them rows of tables.

GETTERS (the rows of KEYS, DISABLED and COMPUTED) are methods in DeepSpeed, ATTRIBUTES are
attributes. For every other name of DeepSpeed's engine, missing.py has the reason why it is missing.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial, reduce
from importlib import import_module
from operator import attrgetter, getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ... import checkpoint, parallel
from ...api.engine import ZeroEngine
from ...api.leaves import get_z3_leaf_modules
from ...base.device import run_last
from ...base.errors import BatchMismatchError, NotBuiltError, UsageError
from ...base.given import refuse, whole_number
from ...base.log import log_once, logger
from ...base.mesh import Mesh
from ...base.nested import tensors_in
from ...checkpoint.contents import SaveSettings
from ...checkpoint.lockstep import run_and_gather, run_on_first_rank
from ...comm.context import local_rank
from ...engine.data import Collate, ShardedLoader
from ...engine.engine import Engine
from ...engine.parts import Parts
from ...engine.pieces import refuse_shared_loader
from ...engine.request import Request
from ...engine.saving import Restore
from ...sharding.hooks import Hook
from . import groups
from .autotp import set_autotp_mode
from .before_initialize import asked_tp_size
from .missing import ENGINE, engine_name_missing, missing_names
from .module_copies import refuse_copies
from .moe import has_moe_layers
from .moe_layers import MoE
from .parameters import show_ds_names

# Imported for type checking only, because importing pydantic is slow.
if TYPE_CHECKING:
    from ...config import Config

__all__ = ["DeepSpeedEngine"]


def _groups(engine: Engine) -> list[dict[str, Any]]:
    return engine.optimizer.param_groups if engine.optimizer is not None else []


def _offload(section: Any) -> Any:
    """Return the section, or None if it offloads nothing, as DeepSpeed does."""
    return section if section.device != "none" else None


def _scale_arguments(engine: Engine) -> dict[str, Any] | None:
    fp16 = engine.config.fp16
    if not fp16.enabled or fp16.loss_scale:
        return None
    return {
        "init_scale": 2.0**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "min_scale": fp16.min_loss_scale,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
    }


def _autotp_size(engine: Engine) -> int:
    if engine.mesh.tp > 1:
        return engine.mesh.tp
    return engine.config.tensor_parallel.autotp_size or asked_tp_size(engine.module)


def _optimizer_name(engine: Engine) -> str | None:
    configured: str | None = engine.config.optimizer.type
    if configured is None and engine.optimizer is not None:
        return type(engine.optimizer.inner).__name__
    return configured


def _loaded_size(axis: str, engine: Engine) -> int | None:
    """Return the size of an axis in the run that saved the loaded checkpoint, or None."""
    ranks = engine.parts.saver.loaded_ranks
    return None if ranks is None else ranks[axis]


_CURRICULUM = ("data_sampling", "curriculum_learning")


def data_efficiency(config: Config, *path: str) -> dict[str, Any]:
    """Return the section `data_efficiency` with its defaults, or a section inside it.

    Args:
        config: Checked configuration of the run.
        *path: Keys from `data_efficiency` to the inner section.
    """
    # Imported here because most runs never read this section
    complete = import_module(".data_pipeline.config", __package__).get_data_efficiency_config
    asked = config.data_efficiency
    given = {"seed": asked.seed, "data_sampling": asked.data_sampling}
    return reduce(getitem, path, complete({"data_efficiency": given}))


def _refuse_loader_arguments(batch_size: Any, data_sampler: Any, collate_fn: Any) -> None:
    """Raise `UsageError` if an argument of `deepspeed_io` cannot be used."""
    call = "deepspeed_io"
    if batch_size is not None:
        whole_number(call, "batch_size", batch_size, 1)
    if data_sampler is not None and not hasattr(data_sampler, "__iter__"):
        wanted = "an iterable of sample indices"
        fix = "pass a torch.utils.data.Sampler, or leave it out."
        raise refuse(call, "data_sampler", data_sampler, wanted, fix)
    if collate_fn is not None and not callable(collate_fn):
        fix = "pass a function, or leave it out."
        raise refuse(call, "collate_fn", collate_fn, "a function of a list of samples", fix)


def curriculum_loader(
    config: Config,
    mesh: Mesh,
    model: nn.Module,
    dataset: Any,
    collate_fn: Collate | None,
    batch_size: int | None = None,
) -> ShardedLoader | None:
    """Return a loader that follows the configured curriculum, or None without one.

    Args:
        config: Checked configuration, which has the batch size.
        mesh: Mesh of ranks, which gives this rank's position along the data axis.
        model: Model to train, which may be a `PipelineModule`.
        dataset: Dataset with `__len__` and `__getitem__`.
        collate_fn: Function that makes a batch of samples.
        batch_size: Samples of a micro-batch of one rank; None for the configured size.

    Returns:
        The loader, or None if the configuration has no curriculum.
    """
    settings = data_efficiency(config)
    if not data_efficiency(config, *_CURRICULUM)["enabled"]:
        return None
    kind = import_module(".data_pipeline.loader", __package__).CurriculumLoader
    made: ShardedLoader = kind(
        dataset,
        batch_size or config.train_micro_batch_size_per_gpu,
        mesh,
        settings,
        config.gradient_accumulation_steps,
        collate_fn,
        config.dataloader_drop_last,
        _own_part(mesh, model),
    )
    return made


def _own_part(mesh: Mesh, model: nn.Module) -> Callable[[Any], Any] | None:
    """Return the function that takes this rank's part of a batch; None for the whole batch."""
    return partial(parallel.own_part, model) if mesh.sp > 1 else None


def _flops_profiler(engine: Engine) -> Any:
    """Return a view of the profiled forward pass; None if profiling is disabled."""
    asked = engine.config.flops_profiler
    kind = import_module(".profiling", __package__).FlopsProfiler
    found = kind(engine.module, engine, asked.recompute_fwd_factor, engine.observer.profile)
    return found if asked.enabled else None


# DeepSpeed's getter -> the configuration key whose value it returns
KEYS = {
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "dataloader_drop_last": "dataloader_drop_last",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_legacy_stage1": "zero_optimization.legacy_stage1",
    "zero_module_granularity_threshold": "zero_optimization.stage3_module_granularity_threshold",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "aio_config": "aio",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "loss_scale": "fp16.loss_scale",
    "bfloat16_enabled": "bf16.enabled",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "prescale_gradients": "prescale_gradients",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "tensorboard_enabled": "tensorboard.enabled",
    "wandb_enabled": "wandb.enabled",
    "csv_monitor_enabled": "csv_monitor.enabled",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "zero_partial_offload": "zero_optimization.offload_optimizer.ratio",
}

# DeepSpeed's getter -> the feature that it reports as disabled, because it does not exist here
DISABLED = {
    "amp_enabled": "Apex AMP",
    "use_node_local_storage": "node-local storage of checkpoints",
    "pld_enabled": "progressive layer drop",
    "curriculum_enabled_legacy": "the section `curriculum_learning`",
    "random_ltd_enabled": "random layerwise token dropping",
    "eigenvalue_enabled": "the section `eigenvalue`",
    "autotuning_enabled": "the autotuner",
    "elasticity_enabled": "the section `elasticity`",
    "sparse_gradients_enabled": "sparse gradients",
    "is_deepcompile_enabled": "DeepCompile",
    "is_deepcompile_active": "DeepCompile",
}

# DeepSpeed's other getters -> (function of the engine, docstring)
COMPUTED: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "get_batch_info": (
        lambda e: (
            e.train_batch_size(),
            e.train_micro_batch_size_per_gpu(),
            e.gradient_accumulation_steps(),
        ),
        "Return (train batch size, micro-batch size per rank, gradient accumulation steps).",
    ),
    "zero_optimization": (
        lambda e: e._config.zero_optimization.stage > 0,
        "Return whether the ZeRO stage is 1 or higher.",
    ),
    "zero_optimization_partition_gradients": (
        lambda e: e._config.zero_optimization.stage >= 2,
        "Return whether gradients are sharded (stage 2 or 3).",
    ),
    "zero_optimization_partition_weights": (
        lambda e: e._config.zero_optimization.stage >= 3,
        "Return whether weights are sharded (stage 3).",
    ),
    "zero_offload_optimizer": (
        lambda e: _offload(e._config.zero_optimization.offload_optimizer),
        "Return the section `zero_optimization.offload_optimizer`, or None if it is off.",
    ),
    "zero_offload_param": (
        lambda e: _offload(e._config.zero_optimization.offload_param),
        "Return the section `zero_optimization.offload_param`, or None if it is off.",
    ),
    "zero_cpu_offload": (
        lambda e: e._config.zero_optimization.offload_optimizer.device == "cpu",
        'Return whether `zero_optimization.offload_optimizer.device` is configured as "cpu".',
    ),
    "zero_use_cpu_optimizer": (
        lambda e: e._config.zero_optimization.offload_optimizer.device != "none",
        "Return whether `zero_optimization.offload_optimizer` is enabled.",
    ),
    "postscale_gradients": (
        lambda e: not e._config.prescale_gradients,
        "Return whether gradients are divided after their reduction.",
    ),
    "torch_autocast_dtype": (
        lambda e: e.runtime.settings.policy.autocast,
        "Return the dtype of `torch.autocast`, or None if it is off.",
    ),
    "get_data_types": (
        lambda e: (
            e.runtime.settings.policy.compute or torch.float32,
            e.runtime.settings.policy.accumulate,
        ),
        "Return the dtypes of computation and of gradient accumulation.",
    ),
    "dynamic_loss_scale": (
        lambda e: e.parts.scaler is not None and e.parts.scaler.dynamic,
        "Return whether the loss scale is dynamic.",
    ),
    "dynamic_loss_scale_args": (
        _scale_arguments,
        "Return the arguments of the dynamic loss scale, or None without one.",
    ),
    "initial_dynamic_scale": (
        lambda e: 2.0**e._config.fp16.initial_scale_power,
        "Return the initial value of the dynamic loss scale.",
    ),
    "autotp_size": (
        _autotp_size,
        "Return the number of tensor-parallel ranks, or the requested number; 0 without one.",
    ),
    "get_sequence_parallel_group": (
        lambda e: groups.group_of(*groups.SEQUENCE, over=e.mesh),
        "Return the process group of the sequence-parallel ranks; None without a process group.",
    ),
    "optimizer_name": (
        _optimizer_name,
        "Return the configured name of the optimizer, or else its class name, or None without an "
        "optimizer.",
    ),
    "get_mom": (
        lambda e: [group.get("momentum", group.get("betas", 0.0)) for group in _groups(e)],
        "Return the momentum or betas of each parameter group.",
    ),
    "get_type": (
        lambda e: [group.get("type") for group in _groups(e)],
        "Return the entry `type` of each parameter group, None where there is none.",
    ),
    "data_efficiency_config": (
        lambda e: data_efficiency(e.config),
        "Return the section `data_efficiency` with its defaults, as a dict.",
    ),
    "data_sampling_enabled": (
        lambda e: data_efficiency(e.config, "data_sampling")["enabled"],
        "Return whether `data_efficiency.data_sampling` is enabled.",
    ),
    "data_sampling_config": (
        lambda e: data_efficiency(e.config, "data_sampling"),
        "Return the section `data_efficiency.data_sampling`, as a dict.",
    ),
    "curriculum_learning_enabled": (
        lambda e: data_efficiency(e.config, *_CURRICULUM)["enabled"],
        "Return whether `data_efficiency.data_sampling.curriculum_learning` is enabled.",
    ),
    "curriculum_learning_config": (
        lambda e: data_efficiency(e.config, *_CURRICULUM),
        "Return `data_efficiency.data_sampling.curriculum_learning` with defaults, as a dict.",
    ),
    "random_ltd_config": (
        lambda e: data_efficiency(e.config, "data_routing", "random_ltd"),
        "Return `data_efficiency.data_routing.random_ltd` with its defaults, as a dict.",
    ),
    "log_level": (
        lambda e: e._config.log_level and e._config.log_level.upper(),
        "Return the configured log level in upper case, or None.",
    ),
    "checkpoint_tag_validation_enabled": (
        lambda e: e._config.checkpoint.tag_validation != "Ignore",
        "Return whether checkpoint tags are compared across ranks.",
    ),
    "checkpoint_tag_validation_fail": (
        lambda e: e._config.checkpoint.tag_validation == "Fail",
        "Return whether different checkpoint tags are an error.",
    ),
}


def _key_getter(key: str) -> Callable[[Engine], Any]:
    read = attrgetter(f"_config.{key}")
    return lambda engine: read(engine)


GETTERS = COMPUTED | {
    name: (_key_getter(key), f"Return the value of the configuration key `{key}`.")
    for name, key in KEYS.items()
}
GETTERS |= {
    name: (lambda engine: False, f"Return False: {feature} is not supported.")
    for name, feature in DISABLED.items()
}

# DeepSpeed's names of sections and keys -> paths in the configuration
SECTIONS = {
    "zero_config": "zero_optimization",
    "zero_optimization_stage": "zero_optimization.stage",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "data_types_config": "data_types",
    "checkpoint_config": "checkpoint",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "load_universal_checkpoint": "checkpoint.load_universal",
}


class GivenConfig(dict[str, Any]):
    """The configuration that a program passed, as in DeepSpeed; attributes read the checked one."""

    config: Config

    def __init__(self, given: Mapping[str, Any], config: Config) -> None:
        super().__init__(given)
        object.__setattr__(self, "config", config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks for `__deepcopy__`
            raise AttributeError(name)
        return getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.config, name, value)  # raises, because a configuration is frozen

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # copies are plain dicts

    def model_copy(self, *, update: Mapping[str, Any]) -> GivenConfig:
        """Return a copy with other checked values. The values that the program passed stay."""
        return GivenConfig(self, self.config.model_copy(update=update))


class ConfigNames:
    """Reads an engine's configuration, also under the names of DeepSpeed's DeepSpeedConfig."""

    config: Config

    def __init__(self, config: Config) -> None:
        object.__setattr__(self, "config", config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # copy reads them before `__init__`
            raise AttributeError(name)
        if name == "_param_dict":
            return self.config
        if name == "zero_enabled":
            return self.config.zero_optimization.stage > 0
        return attrgetter(SECTIONS.get(name, name))(self.config)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.config, name, value)  # raises, because a configuration is frozen


# DeepSpeed's attribute -> the attribute of the engine that has its value
PATHS = {
    "_is_gradient_accumulation_boundary": "_boundary",
    "global_rank": "mesh.rank",
    "world_size": "mesh.world_size",
    "dp_world_size": "mesh.data_size",
    "seq_dp_world_size": "mesh.reduce_size",
    "mp_world_size": "mesh.tp",
    "sequence_parallel_size": "mesh.sp",
    "mpu": "client_mpu",
    "monitor": "observer.monitor",
}

ATTRIBUTES: dict[str, Callable[[Engine], Any]] = {
    name: attrgetter(path) for name, path in PATHS.items()
}
ATTRIBUTES |= {
    "_config": lambda e: ConfigNames(e.config),
    "local_rank": lambda e: local_rank(),
    "data_parallel_group": lambda e: groups.group_of(*groups.DATA, over=e.mesh),
    "seq_parallel_group": lambda e: groups.group_of(*groups.SEQUENCE, over=e.mesh),
    "flops_profiler": _flops_profiler,
    "basic_optimizer": lambda e: e.optimizer.optimizer if e.optimizer is not None else None,
    "communication_data_type": lambda e: (
        e.runtime.settings.policy.reduce or e.runtime.settings.policy.compute
    ),
    "has_moe_layers": lambda e: has_moe_layers(e.module)[0],
    "sparse_tensor_module_names": lambda e: set(),
    "warn_unscaled_loss": lambda e: False,
    "dist_backend": lambda e: dist.get_backend() if dist.is_initialized() else None,
    "param_names": lambda e: {param: name for name, param in e.module.named_parameters()},
    "num_experts": lambda e: [
        each.num_experts for each in e.module.modules() if isinstance(each, MoE)
    ],
    "gradient_average": lambda e: True,
    "enable_backward_allreduce": lambda e: True,
    "expert_parallel_group": lambda e: {},
    "expert_data_parallel_group": lambda e: {},
    "_global_grad_norm": lambda e: e.get_global_grad_norm(),
    "loaded_checkpoint_dp_world_size": partial(_loaded_size, "data"),
    "loaded_checkpoint_mp_world_size": partial(_loaded_size, "model"),
}

METHODS = (
    "forward backward step train_batch eval_batch zero_grad scale no_sync coalesce_grad_reduction "
    "save_checkpoint load_checkpoint save_16bit_model module_state_dict export load_weights "
    "set_train_batch_size set_gradient_accumulation_boundary deepspeed_io compile explain "
    "offload_states reload_states memory_report destroy set_data_post_process_func "
    "set_custom_curriculum_learning_schedule train_batch_size train_micro_batch_size_per_gpu "
    "gradient_accumulation_steps get_global_grad_norm get_lr"
).split()


class DeepSpeedEngine(ZeroEngine):
    """A training engine with most methods and attributes of DeepSpeed's engine.

    Attributes:
        pipeline_parallelism: Whether the model is split into pipeline stages.
        client_optimizer: The `optimizer` that was passed to `initialize`.
        client_lr_scheduler: The `lr_scheduler` that was passed to `initialize`.
        client_mpu: The `mpu` that was passed to `initialize`.

    Args:
        config: The configuration of the run, in which every "auto" has been replaced by a value.
        mesh: The mesh of ranks over which the model is sharded.
        parts: The objects that the engine uses, such as the wrapped model and the optimizer.
        lr_scheduler: The learning-rate schedule that `step` advances, or None.
        training_dataloader: The loader of the training data, or None.
        request: The arguments of `initialize`, from which the `client_` attributes are set.
        is_dropin: Whether the program has imported `deepspeed`. If true, the engine raises the
            errors that DeepSpeed's engine raises.
    """

    pipeline_parallelism = False  # True for pipeline engines
    client_optimizer: Any = None
    client_lr_scheduler: Any = None
    client_mpu: Any = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
        request: Request | None = None,
        *,
        is_dropin: bool = False,
    ) -> None:
        super().__init__(config, mesh, parts, lr_scheduler, training_dataloader)
        if request is not None:
            self.client_optimizer = request.optimizer
            self.client_lr_scheduler = request.lr_scheduler
            self.client_mpu = request.mpu
        self._is_dropin = is_dropin
        # Clients of the drop-in may look for DeepSpeed's files.
        self.preferred_layout = "deepspeed" if is_dropin else ""
        self._leaf_hooks: list[Any] = []
        self._trained = [param for param in self.module.parameters() if param.requires_grad]
        if self.runtime.settings.stage == 3:
            show_ds_names(self.runtime)
            if is_dropin:
                self._leaf_hooks = self._graphless_leaf_hooks()
        if mesh.tp > 1:
            set_autotp_mode(training=True)
            # Imported here because a run without this axis needs none of its layers
            import_module(".tensor_layers", __package__).show_names(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass on this rank's micro-batch.

        With pipeline stages, a forward in training also runs the backward.

        Args:
            *args: The positional arguments of the model's forward.
            **kwargs: The keyword arguments of the model's forward.

        Returns:
            The output of the model.

        Raises:
            BatchMismatchError: Tensor-parallel ranks received different inputs. If the program
                imported `deepspeed`, the message is DeepSpeed's, because programs compare it.

        Note:
            Collective: every rank must call it.
        """
        if self._is_dropin:
            for param in self._trained:
                run_last(param, Hook)
        if not self._is_dropin or self.mesh.tp == 1:
            return super().forward(*args, **kwargs)
        try:
            return super().forward(*args, **kwargs)
        except BatchMismatchError as error:
            raise BatchMismatchError(f"{error.what.partition(': ')[0]}.") from error

    @cached_property
    def timers(self) -> Any:
        """Return the timers of this engine by DeepSpeed's names, for example `timers("fwd")`.

        The engine measures only with `wall_clock_breakdown`, and resets its timers when it logs
        them.
        """
        return import_module(".profiling", __package__).MeasuredTimers(self.observer.timers)

    @cached_property
    def tput_timer(self) -> Any:
        """Return a throughput timer for programs that time their steps.

        `engine.observer.record` has the engine's own measurements.
        """
        kind = import_module(".profiling", __package__).ThroughputTimer
        return kind(None, self.config.train_batch_size)

    # -- batch

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> ShardedLoader:
        """Create a loader of this rank's samples.

        Without a `data_sampler`, the loader shuffles the samples for the route "train", and keeps
        their order for "eval" and "predict". It does not shuffle an IterableDataset. As in
        DeepSpeed, samples are distributed to ranks round-robin, and every rank gets the same number
        of samples. The number of samples in an epoch therefore depends on the number of ranks. This
        is not the case for the loader that `initialize` returns. A configured curriculum selects
        the samples of the route "train", and `data_sampler` is then ignored.

        Args:
            dataset: Dataset from which the loader reads this rank's samples.
            batch_size: Samples of a micro-batch of one rank; None for the configured size.
            route: "train", "eval" or "predict"; determines whether the samples are shuffled. As in
                DeepSpeed, the samples of any other route are shuffled.
            pin_memory: Ignored; memory is pinned if the device is a GPU.
            data_sampler: Sampler to use instead of a DistributedSampler.
            collate_fn: Function that makes a batch of samples.
            num_local_io_workers: Ignored, with a warning if it is not 0 or None.

        Returns:
            The loader, which yields one micro-batch at a time.

        Raises:
            UsageError: The ranks of a pipeline need different samples (`pipeline.rows` is "own"),
                or a curriculum is configured and `dataset` is an IterableDataset. Also if
                `batch_size`, `data_sampler` or `collate_fn` cannot be used.
        """
        _refuse_loader_arguments(batch_size, data_sampler, collate_fn)
        if num_local_io_workers:
            log_once(
                f"deepspeed_io(num_local_io_workers={num_local_io_workers}) has no effect: batches "
                "are made in this process, one ahead of the step. Pass the batches of your own "
                "DataLoader, with any number of workers, to the engine.",
                logging.WARNING,
            )
        refuse_shared_loader(self.config, self.mesh, "deepspeed_io")
        if route == "train":
            found = curriculum_loader(
                self.config, self.mesh, self.module, dataset, collate_fn, batch_size
            )
            if found is not None:
                return found
        sampler = data_sampler
        drop_last = self.config.dataloader_drop_last
        size = batch_size or self.config.train_micro_batch_size_per_gpu
        take = _own_part(self.mesh, self.module)
        if sampler is None and not isinstance(dataset, IterableDataset):
            shares = self.mesh.data_size, self.mesh.data_index
            is_training = route not in ("eval", "predict")
            sampler = DistributedSampler(
                dataset, *shares, shuffle=is_training, drop_last=drop_last and is_training
            )
        return ShardedLoader(dataset, size, self.mesh, collate_fn, drop_last, sampler, take)

    def set_data_post_process_func(
        self, post_process_func: Callable[[Any, dict[str, Any]], Any]
    ) -> None:
        """Set a function that is applied to every batch of the curriculum.

        The call has no effect if no curriculum is configured, as in DeepSpeed, or if the engine has
        no `training_dataloader`.

        Args:
            post_process_func: Function that is called with a batch and the state dict of the
                curriculum's sampler, and that returns the batch to train on.
        """
        if self.curriculum_learning_enabled() and self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], Any]]
    ) -> None:
        """Set the difficulty functions of curriculum metrics that have a custom schedule.

        The call has no effect if no curriculum is configured, as in DeepSpeed, or if the engine has
        no `training_dataloader`.

        Args:
            schedule_func_dict: A dict from the name of a metric to a function, which maps the
                number of a step to a difficulty. Names of unknown metrics are ignored.
        """
        if self.curriculum_learning_enabled() and self.training_dataloader is not None:
            self.training_dataloader.data_sampler.set_custom_curriculum_learning_schedule(
                schedule_func_dict
            )

    # -- accumulation

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context manager for several backward passes of one step.

        Call `step` after the block, because it raises UsageError inside. DeepSpeed reduces the
        gradients once, after the last backward pass. This library reduces sharded gradients in each
        backward pass, with the same result.

        Raises:
            NotBuiltError: The stage is 0, or the engine has pipeline parallelism.
            UsageError: The configuration key `managed_gradient_accumulation` is false, or the block
                is inside another one or inside `no_sync`.
        """
        if self.runtime.settings.stage == 0 or self.pipeline_parallelism:
            what = "pipeline parallelism" if self.pipeline_parallelism else "stage 0"
            raise NotBuiltError(
                f"coalesce_grad_reduction is not supported with {what}.",
                "It is for gradients that are sharded.",
                "use gradient_accumulation_steps or no_sync().",
            )
        if not self.config.managed_gradient_accumulation:
            raise UsageError(
                "coalesce_grad_reduction and managed_gradient_accumulation=false both own the "
                "accumulation boundary.",
                fix="leave one of the two out.",
            )
        with self.held_reductions.inside("coalesce_grad_reduction"):
            yield

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing, because `backward` already reduces the gradients.

        Args:
            bucket_size: Accepted and ignored.
        """

    def _backward_epilogue(self) -> None:
        """Do nothing: the last gradient's reduction ends a backward pass of the program."""

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the whole state dict on rank 0, None on other ranks.

        Note:
            Collective: every rank must call it.
        """
        settings = checkpoint.ExportSettings(exclude_frozen=exclude_frozen_parameters)
        return checkpoint.consolidated(self.runtime, settings)

    # DeepSpeed's name with tensor parallelism
    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _change_recovery_script_permissions(self, dst: str | Path) -> None:
        """Make a script executable for its owner, or log that the file system cannot."""
        try:
            Path(dst).chmod(0o700)
        except OSError as error:
            logger.info(f"permissions of {dst} stay as they are ({error}).")

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Return the path at which DeepSpeed stores this rank's optimizer states."""
        prefix = "bf16_" if self.bfloat16_enabled() else ""
        name = f"{prefix}zero_pp_rank_{self.mesh.rank}_mp_rank_00_optim_states.pt"
        return os.path.join(checkpoints_path, str(tag), name)

    @property
    def offloaded_states(self) -> set[Any]:
        """Return the kinds of state that are offloaded now, as `OffloadStateTypeEnum` members."""
        kinds: Any = import_module(".config_classes", __package__).OffloadStateTypeEnum
        return {kinds(kind) for kind in super().offloaded_states}

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute the gradients of the loss and reduce them over the ranks.

        A loss that does not depend on the model contributes gradients of zero.

        Args:
            loss: Scalar loss of this rank's micro-batch.
            retain_graph: Whether to keep the autograd graph for another backward.
            scale_wrt_gas: Whether to divide the loss by the number of accumulation steps.

        Returns:
            The loss, divided by the number of accumulation steps if `scale_wrt_gas` is true.

        Raises:
            UsageError: The engine has no optimizer, in a program that has imported `deepspeed`. It
                is also raised, here or by `step`, if no rank's loss requires a gradient.
            PeerError: Another rank failed.

        Note:
            Collective: every rank must call it once per micro-batch.
        """
        if self.optimizer is None and self._is_dropin:
            raise UsageError(
                "must provide optimizer during init in order to use backward.",
                "The engine serves inference only.",
                "pass an optimizer to initialize, or name one in the configuration.",
            )
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def _save(self, folder: Path, tag: Any, client: dict[Any, Any], settings: SaveSettings) -> None:
        """Save a checkpoint. In a program that has imported `deepspeed`, a tag may contain "/".

        A checkpoint with such a tag is not written in the background.
        """
        nested_tags = import_module(".checkpoint.nested_tags", __package__)
        directory, name = nested_tags.split_tag(folder, tag) if self._is_dropin else (folder, tag)
        if directory == folder:
            super()._save(folder, tag, client, settings)
            return
        super()._save(directory, name, client, replace(settings, latest=False, wait=True))
        move = partial(nested_tags.complete, folder, tag, latest=settings.latest)
        run_on_first_rank(self.runtime.comm.whole, "saving: `latest`", move)

    def _load(self, folder: Path, tag: Any, restore: Restore) -> tuple[str | None, Any]:
        if self._is_dropin:
            nested_tags = import_module(".checkpoint.nested_tags", __package__)
            if tag is None:
                read = partial(nested_tags.nested_latest, folder)
                tag = run_and_gather(self.runtime.comm.whole, "loading: `latest`", read)[0]
            folder, tag = nested_tags.split_tag(folder, tag)
        return super()._load(folder, tag, restore)

    def _graphless_leaf_hooks(self) -> list[Any]:
        """Register hooks that raise if no input of a trained leaf requires a gradient.

        DeepSpeed raises in this case, too. Returns the handles of the hooks.
        """
        leaves = [
            leaf
            for leaf in get_z3_leaf_modules(self.module)
            if any(param.requires_grad for param in leaf.parameters())
        ]
        refuse = partial(_refuse_graphless, weakref.ref(self))
        return [leaf.register_forward_pre_hook(refuse, with_kwargs=True) for leaf in leaves]

    def destroy(self) -> None:
        """Remove all hooks from the model, undo `compile` and close the engine's monitors.

        Offloaded states are restored first. Rank 0 logs the time of each part of its steps if
        `steps_per_print` is set and the engine has taken several steps. A second call has no
        effect.

        Note:
            Collective if a checkpoint is being written, because that is completed first.
        """
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks = []
        refuse_copies(self.module)
        super().destroy()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *ATTRIBUTES})  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return ATTRIBUTES[name](self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in missing_names(ENGINE):
                raise engine_name_missing(name, [*METHODS, *GETTERS, *ATTRIBUTES]) from None
            raise


# DeepSpeed has these as methods of the class, so a program may call
# DeepSpeedEngine.gradient_clipping(engine).
for _name, (_getter, _doc) in GETTERS.items():
    _getter.__doc__ = _doc
    setattr(DeepSpeedEngine, _name, _getter)


def _refuse_graphless(engine: Any, leaf: nn.Module, args: Any, kwargs: Any) -> None:
    # While reductions are held back, a leaf's gradients are not reduced.
    if not torch.is_grad_enabled() or engine().held_reductions.name:
        return
    if not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        raise UsageError(
            f"the leaf module {type(leaf).__name__} got no input that requires a gradient.",
            "DeepSpeed reduces a leaf's gradients when backward reaches its inputs, and refuses "
            "this.",
            "make an input require a gradient, or call unset_z3_leaf_modules: this library does "
            "not need leaf modules.",
        )
