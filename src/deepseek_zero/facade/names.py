"""DeepSpeed's names for what an engine knows: tables, no logic.

GETTERS are methods in DeepSpeed, ATTRIBUTES are attributes; absent.py says of every other name why it is missing.
Read by facade/deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.context import local_rank
from ..engine.engine import Engine


def _groups(engine: Engine) -> list[dict[str, Any]]:
    return engine.optimizer.param_groups if engine.optimizer is not None else []


def _mom(engine: Engine) -> list[Any]:
    return [group.get("momentum", group.get("betas", 0.0)) for group in _groups(engine)]


def _norm(engine: Engine) -> float | None:
    last = engine.optimizer.last if engine.optimizer is not None else None
    return last.norm if last is not None else None


def _offload(section: Any) -> Any:
    """The section, None where nothing is offloaded; as DeepSpeed answers."""
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


GETTERS: dict[str, Callable[[Engine], Any]] = {
    # Batch
    "train_batch_size": lambda e: e.config.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda e: e.config.train_micro_batch_size_per_gpu,
    "gradient_accumulation_steps": lambda e: e.config.gradient_accumulation_steps,
    "get_batch_info": lambda e: (
        e.config.train_batch_size,
        e.config.train_micro_batch_size_per_gpu,
        e.config.gradient_accumulation_steps,
    ),
    "managed_gradient_accumulation": lambda e: e.config.managed_gradient_accumulation,
    "dataloader_drop_last": lambda e: e.config.dataloader_drop_last,
    # ZeRO
    "zero_optimization": lambda e: e.config.zero_optimization.stage > 0,
    "zero_optimization_stage": lambda e: e.config.zero_optimization.stage,
    "zero_optimization_partition_gradients": lambda e: e.config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda e: e.config.zero_optimization.stage >= 3,
    "zero_gather_16bit_weights_on_model_save": (
        lambda e: e.config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    ),
    "zero_overlap_comm": lambda e: e.config.zero_optimization.overlap_comm,
    "zero_reduce_bucket_size": lambda e: e.config.zero_optimization.reduce_bucket_size,
    "zero_sub_group_size": lambda e: e.config.zero_optimization.sub_group_size,
    "zero_prefetch_bucket_size": lambda e: e.config.zero_optimization.stage3_prefetch_bucket_size,
    "zero_param_persistence_threshold": lambda e: e.config.zero_optimization.stage3_param_persistence_threshold,
    "zero_model_persistence_threshold": lambda e: e.config.zero_optimization.stage3_model_persistence_threshold,
    "zero_max_live_parameters": lambda e: e.config.zero_optimization.stage3_max_live_parameters,
    "zero_max_reuse_distance": lambda e: e.config.zero_optimization.stage3_max_reuse_distance,
    "zero_ignore_unused_parameters": lambda e: e.config.zero_optimization.ignore_unused_parameters,
    "zero_allow_untested_optimizer": lambda e: e.config.zero_allow_untested_optimizer,
    "zero_offload_optimizer": lambda e: _offload(e.config.zero_optimization.offload_optimizer),
    "zero_offload_param": lambda e: _offload(e.config.zero_optimization.offload_param),
    "zero_cpu_offload": lambda e: e.config.zero_optimization.offload_optimizer.device == "cpu",
    # Precision
    "fp16_enabled": lambda e: e.config.fp16.enabled,
    "fp16_auto_cast": lambda e: e.config.fp16.auto_cast,
    "bfloat16_enabled": lambda e: e.config.bf16.enabled,
    "torch_autocast_enabled": lambda e: e.config.torch_autocast.enabled,
    "torch_autocast_dtype": lambda e: e.runtime.settings.policy.autocast,
    "amp_enabled": lambda e: e.config.amp.enabled,
    "get_data_types": lambda e: (e.runtime.settings.policy.compute, e.runtime.settings.policy.accumulate),
    "dynamic_loss_scale": lambda e: e.parts.scaler is not None and e.parts.scaler.dynamic,
    "dynamic_loss_scale_args": _scale_arguments,
    "initial_dynamic_scale": lambda e: 2.0**e.config.fp16.initial_scale_power,
    "loss_scale": lambda e: e.config.fp16.loss_scale,
    # Optimizer and schedule
    "gradient_clipping": lambda e: e.config.gradient_clipping,
    "gradient_predivide_factor": lambda e: e.config.gradient_predivide_factor,
    "prescale_gradients": lambda e: e.config.prescale_gradients,
    "get_global_grad_norm": _norm,
    "optimizer_name": lambda e: (
        type(e.optimizer.inner).__name__ if e.config.optimizer.type is None and e.optimizer else e.config.optimizer.type
    ),
    "optimizer_params": lambda e: e.config.optimizer.params,
    "scheduler_name": lambda e: e.config.scheduler.type,
    "scheduler_params": lambda e: e.config.scheduler.params,
    "get_lr": lambda e: [group["lr"] for group in _groups(e)],
    "get_mom": _mom,
    "get_type": lambda e: [group.get("type") for group in _groups(e)],
    # Logging
    "steps_per_print": lambda e: e.config.steps_per_print,
    "wall_clock_breakdown": lambda e: e.config.wall_clock_breakdown,
    "memory_breakdown": lambda e: e.config.memory_breakdown,
    "dump_state": lambda e: e.config.dump_state,
    "log_level": lambda e: e.config.log_level,
    "tensorboard_enabled": lambda e: e.config.tensorboard.enabled,
    "wandb_enabled": lambda e: e.config.wandb.enabled,
    "csv_monitor_enabled": lambda e: e.config.csv_monitor.enabled,
    "flops_profiler_enabled": lambda e: e.config.flops_profiler.enabled,
    "flops_profiler_profile_step": lambda e: e.config.flops_profiler.profile_step,
    "flops_profiler_module_depth": lambda e: e.config.flops_profiler.module_depth,
    "flops_profiler_top_modules": lambda e: e.config.flops_profiler.top_modules,
    "flops_profiler_detailed": lambda e: e.config.flops_profiler.detailed,
    "flops_profiler_output_file": lambda e: e.config.flops_profiler.output_file,
    "flops_profiler_recompute_fwd_factor": lambda e: e.config.flops_profiler.recompute_fwd_factor,
    # Checkpoints
    "checkpoint_tag_validation_enabled": lambda e: e.config.checkpoint.tag_validation != "Ignore",
    "checkpoint_tag_validation_fail": lambda e: e.config.checkpoint.tag_validation == "Fail",
    "load_universal_checkpoint": lambda e: e.config.checkpoint.load_universal,
    "use_node_local_storage": lambda e: e.config.checkpoint.use_node_local_storage,
    # What is off because it is not built
    "pld_enabled": lambda e: False,
    "curriculum_enabled_legacy": lambda e: False,
    "curriculum_learning_enabled": lambda e: False,
    "random_ltd_enabled": lambda e: False,
    "eigenvalue_enabled": lambda e: False,
    "autotuning_enabled": lambda e: False,
    "elasticity_enabled": lambda e: False,
    "sparse_gradients_enabled": lambda e: False,
    "is_deepcompile_enabled": lambda e: False,
    "is_deepcompile_active": lambda e: False,
}

ATTRIBUTES: dict[str, Callable[[Engine], Any]] = {
    "_config": lambda e: e.config,
    "local_rank": lambda e: local_rank(),
    "global_rank": lambda e: e.mesh.rank,
    "world_size": lambda e: e.mesh.size,
    "dp_world_size": lambda e: e.mesh.size,
    "seq_dp_world_size": lambda e: e.mesh.size,
    "mp_world_size": lambda e: 1,
    "mpu": lambda e: None,
    "monitor": lambda e: e.observer.monitor,
    "timers": lambda e: e.observer.timers,
    "basic_optimizer": lambda e: e.optimizer.inner if e.optimizer is not None else None,
    "communication_data_type": lambda e: e.runtime.settings.policy.reduce or e.runtime.settings.policy.compute,
    "sparse_tensor_module_names": lambda e: set(),
    "warn_unscaled_loss": lambda e: False,
}

METHODS = (
    "forward backward step zero_grad scale no_sync save_checkpoint load_checkpoint save_16bit_model module_state_dict "
    "export load_weights set_train_batch_size set_gradient_accumulation_boundary deepspeed_io compile explain "
    "memory_report destroy"
).split()
