"""DeepSpeed's engine: its words for what is here, each a call of the engine room or a row of a
table.

GETTERS are methods in DeepSpeed, ATTRIBUTES are attributes; missing.py says of every other name why
it is missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ... import parallel
from ...base.errors import NotBuiltError, UsageError
from ...base.given import path_of, refuse
from ...base.log import log_once, logger
from ...base.mesh import Mesh
from ...base.nested import tensors_in
from ...checkpoint.contents import SaveSettings
from ...checkpoint.export import ExportSettings, consolidated, export_file
from ...checkpoint.format import LATEST, LATEST_UNIVERSAL
from ...checkpoint.hf_folder import MAX_SHARD_BYTES
from ...checkpoint.piece import frozen_names
from ...comm.context import local_rank
from ...engine import exporting, saving
from ...engine.compiling import compile_units, restore
from ...engine.data import ShardedLoader
from ...engine.engine import Engine, Parts
from ...engine.pieces import refuse_shared_loader
from ...engine.state_offload import KINDS, StateOffload
from ...sharding.runtime import Phase
from . import groups
from .before_initialize import asked_tp_size, get_z3_leaf_modules
from .checkpoint import DEEPSPEED
from .data_pipeline.config import get_data_efficiency_config
from .dropin import is_dropin_imported
from .missing import ENGINE, engine_name_missing, missing_names
from .profiling import FlopsProfiler, ThroughputTimer

if TYPE_CHECKING:  # pydantic is imported by those who read a configuration
    from ...config import Config

__all__ = ["DeepSpeedEngine"]


def _groups(engine: Engine) -> list[dict[str, Any]]:
    return engine.optimizer.param_groups if engine.optimizer is not None else []


def _mom(engine: Engine) -> list[Any]:
    return [group.get("momentum", group.get("betas", 0.0)) for group in _groups(engine)]


def _norm(engine: Engine) -> float | None:
    optimizer = engine.optimizer
    return optimizer.last_norm if optimizer is not None and optimizer.last is not None else None


def _offload(section: Any) -> Any:
    """Return the section, None where it offloads nothing, as DeepSpeed does."""
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


def _data_efficiency(engine: Engine) -> dict[str, Any]:
    asked = engine.config.data_efficiency
    return get_data_efficiency_config(
        {"data_efficiency": {"seed": asked.seed, "data_sampling": asked.data_sampling}}
    )


def _flops_profiler(engine: Engine) -> Any:
    """Return a view of the forward that was profiled; None where the configuration asks for
    none.
    """
    asked = engine.config.flops_profiler
    found = FlopsProfiler(
        engine.module, engine, asked.recompute_fwd_factor, engine.observer.profile
    )
    return found if asked.enabled else None


GETTERS: dict[str, Callable[[Engine], Any]] = {
    # Batch
    "train_batch_size": lambda e: e._config.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda e: e._config.train_micro_batch_size_per_gpu,
    "gradient_accumulation_steps": lambda e: e._config.gradient_accumulation_steps,
    "get_batch_info": lambda e: (
        e._config.train_batch_size,
        e._config.train_micro_batch_size_per_gpu,
        e._config.gradient_accumulation_steps,
    ),
    "managed_gradient_accumulation": lambda e: e._config.managed_gradient_accumulation,
    "dataloader_drop_last": lambda e: e._config.dataloader_drop_last,
    # ZeRO
    "zero_optimization": lambda e: e._config.zero_optimization.stage > 0,
    "zero_optimization_stage": lambda e: e._config.zero_optimization.stage,
    "zero_optimization_partition_gradients": lambda e: e._config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda e: e._config.zero_optimization.stage >= 3,
    "zero_gather_16bit_weights_on_model_save": (
        lambda e: e._config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    ),
    "zero_overlap_comm": lambda e: e._config.zero_optimization.overlap_comm,
    "zero_reduce_bucket_size": lambda e: e._config.zero_optimization.reduce_bucket_size,
    "zero_sub_group_size": lambda e: e._config.zero_optimization.sub_group_size,
    "zero_prefetch_bucket_size": lambda e: e._config.zero_optimization.stage3_prefetch_bucket_size,
    "zero_param_persistence_threshold": lambda e: (
        e._config.zero_optimization.stage3_param_persistence_threshold
    ),
    "zero_model_persistence_threshold": lambda e: (
        e._config.zero_optimization.stage3_model_persistence_threshold
    ),
    "zero_max_live_parameters": lambda e: e._config.zero_optimization.stage3_max_live_parameters,
    "zero_max_reuse_distance": lambda e: e._config.zero_optimization.stage3_max_reuse_distance,
    "zero_hpz_partition_size": lambda e: e._config.zero_optimization.zero_hpz_partition_size,
    "mics_shard_size": lambda e: e._config.zero_optimization.mics_shard_size,
    "zero_ignore_unused_parameters": lambda e: e._config.zero_optimization.ignore_unused_parameters,
    "zero_allow_untested_optimizer": lambda e: e._config.zero_allow_untested_optimizer,
    "zero_offload_optimizer": lambda e: _offload(e._config.zero_optimization.offload_optimizer),
    "zero_offload_param": lambda e: _offload(e._config.zero_optimization.offload_param),
    "zero_cpu_offload": lambda e: e._config.zero_optimization.offload_optimizer.device == "cpu",
    # Precision
    "fp16_enabled": lambda e: e._config.fp16.enabled,
    "fp16_auto_cast": lambda e: e._config.fp16.auto_cast,
    "bfloat16_enabled": lambda e: e._config.bf16.enabled,
    "torch_autocast_enabled": lambda e: e._config.torch_autocast.enabled,
    "torch_autocast_dtype": lambda e: e.runtime.settings.policy.autocast,
    "get_data_types": lambda e: (
        e.runtime.settings.policy.compute,
        e.runtime.settings.policy.accumulate,
    ),
    "dynamic_loss_scale": lambda e: e.parts.scaler is not None and e.parts.scaler.dynamic,
    "dynamic_loss_scale_args": _scale_arguments,
    "initial_dynamic_scale": lambda e: 2.0**e._config.fp16.initial_scale_power,
    "loss_scale": lambda e: e._config.fp16.loss_scale,
    # Axes
    "autotp_size": lambda e: (
        e.mesh.tp
        if e.mesh.tp > 1
        else e._config.tensor_parallel.autotp_size or asked_tp_size(e.module)
    ),
    "get_sequence_parallel_group": lambda e: groups.group_of(*groups.SEQUENCE, over=e.mesh),
    # Optimizer and schedule
    "gradient_clipping": lambda e: e._config.gradient_clipping,
    "gradient_predivide_factor": lambda e: e._config.gradient_predivide_factor,
    "prescale_gradients": lambda e: e._config.prescale_gradients,
    "get_global_grad_norm": _norm,
    "optimizer_name": lambda e: (
        type(e.optimizer.inner).__name__
        if e._config.optimizer.type is None and e.optimizer
        else e._config.optimizer.type
    ),
    "optimizer_params": lambda e: e._config.optimizer.params,
    "scheduler_name": lambda e: e._config.scheduler.type,
    "scheduler_params": lambda e: e._config.scheduler.params,
    "get_lr": lambda e: [group["lr"] for group in _groups(e)],
    "get_mom": _mom,
    "get_type": lambda e: [group.get("type") for group in _groups(e)],
    # Data efficiency
    "data_efficiency_enabled": lambda e: e._config.data_efficiency.enabled,
    "data_efficiency_config": _data_efficiency,
    "data_sampling_enabled": lambda e: _data_efficiency(e)["data_sampling"]["enabled"],
    "data_sampling_config": lambda e: _data_efficiency(e)["data_sampling"],
    "curriculum_learning_enabled": lambda e: _data_efficiency(e)["data_sampling"][
        "curriculum_learning"
    ]["enabled"],
    "curriculum_learning_config": lambda e: _data_efficiency(e)["data_sampling"][
        "curriculum_learning"
    ],
    "random_ltd_config": lambda e: _data_efficiency(e)["data_routing"]["random_ltd"],
    # Logging
    "steps_per_print": lambda e: e._config.steps_per_print,
    "wall_clock_breakdown": lambda e: e._config.wall_clock_breakdown,
    "memory_breakdown": lambda e: e._config.memory_breakdown,
    "dump_state": lambda e: e._config.dump_state,
    "log_level": lambda e: e._config.log_level and e._config.log_level.upper(),
    "tensorboard_enabled": lambda e: e._config.tensorboard.enabled,
    "wandb_enabled": lambda e: e._config.wandb.enabled,
    "csv_monitor_enabled": lambda e: e._config.csv_monitor.enabled,
    "flops_profiler_enabled": lambda e: e._config.flops_profiler.enabled,
    "flops_profiler_profile_step": lambda e: e._config.flops_profiler.profile_step,
    "flops_profiler_module_depth": lambda e: e._config.flops_profiler.module_depth,
    "flops_profiler_top_modules": lambda e: e._config.flops_profiler.top_modules,
    "flops_profiler_detailed": lambda e: e._config.flops_profiler.detailed,
    "flops_profiler_output_file": lambda e: e._config.flops_profiler.output_file,
    "flops_profiler_recompute_fwd_factor": lambda e: e._config.flops_profiler.recompute_fwd_factor,
    # Checkpoints
    "checkpoint_tag_validation_enabled": lambda e: e._config.checkpoint.tag_validation != "Ignore",
    "checkpoint_tag_validation_fail": lambda e: e._config.checkpoint.tag_validation == "Fail",
    "load_universal_checkpoint": lambda e: e._config.checkpoint.load_universal,
    # What is off because it is not built
    "amp_enabled": lambda e: False,
    "use_node_local_storage": lambda e: False,
    "pld_enabled": lambda e: False,
    "curriculum_enabled_legacy": lambda e: False,
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
    "_is_gradient_accumulation_boundary": lambda e: e._boundary,
    "local_rank": lambda e: local_rank(),
    "global_rank": lambda e: e.mesh.rank,
    "world_size": lambda e: e.mesh.world_size,
    "dp_world_size": lambda e: e.mesh.data_size,
    "seq_dp_world_size": lambda e: e.mesh.reduce_size,
    "mp_world_size": lambda e: e.mesh.tp,
    "sequence_parallel_size": lambda e: e.mesh.sp,
    "data_parallel_group": lambda e: groups.group_of(*groups.DATA, over=e.mesh),
    "seq_parallel_group": lambda e: groups.group_of(*groups.SEQUENCE, over=e.mesh),
    "mpu": lambda e: e.client_mpu,
    "flops_profiler": _flops_profiler,
    "monitor": lambda e: e.observer.monitor,
    "timers": lambda e: e.observer.timers,
    "basic_optimizer": lambda e: e.optimizer.inner if e.optimizer is not None else None,
    "communication_data_type": lambda e: (
        e.runtime.settings.policy.reduce or e.runtime.settings.policy.compute
    ),
    "sparse_tensor_module_names": lambda e: set(),
    "warn_unscaled_loss": lambda e: False,
}

METHODS = (
    "forward backward step train_batch eval_batch zero_grad scale no_sync coalesce_grad_reduction "
    "save_checkpoint load_checkpoint save_16bit_model module_state_dict export load_weights "
    "set_train_batch_size set_gradient_accumulation_boundary deepspeed_io compile explain "
    "offload_states reload_states memory_report destroy set_data_post_process_func "
    "set_custom_curriculum_learning_schedule"
).split()


class NoFolderError(UsageError, ValueError):
    """A checkpoint is to be saved nowhere; DeepSpeed's error is a ValueError."""


class DeepSpeedEngine(Engine):
    """The engine under DeepSpeed's names."""

    pipeline_parallelism = False  # of one kind of engines it is true
    client_optimizer: Any = None
    client_lr_scheduler: Any = None
    client_mpu: Any = None

    def __init__(self, config: Config, mesh: Mesh, parts: Parts) -> None:
        super().__init__(config, mesh, parts)
        # As in DeepSpeed, it is local behind that name. In a world of one, what is sharded is here.
        # Of stages that DeepSpeed does not know, a program would save a part and take it for the
        # whole.
        has_own_stages = "pp" in self.runtime.comm.along and not self.pipeline_parallelism
        is_local = is_dropin_imported() and mesh.world_size > 1 and not has_own_stages
        self.runtime.state_dicts.gathers = not is_local

    # -- the optimizer's words, which Lightning looks for on the engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def state(self) -> Any:
        return self.optimizer.load_states() if self.optimizer is not None else {}

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults if self.optimizer is not None else {}

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """A timer for programs that time their steps; `engine.observer.record` has the engine's own
        figures.
        """
        return ThroughputTimer(None, self.config.train_batch_size)

    # -- batch

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> ShardedLoader:
        """Make a loader of this rank's share: shuffled for route "train", in order for "eval" and
        "predict".

        As in DeepSpeed's loader, ranks take the samples in turn and the order is filled up to as
        many for each, so that an epoch's end depends on the number of ranks; with `training_data`
        of `initialize` it does not.  With a curriculum in the configuration, it deals the samples
        of route "train".
        batch_size: samples of one rank; the micro-batch size without it.  pin_memory: ignored;
        memory is pinned where the device is a GPU.
        """
        if num_local_io_workers:
            raise NotBuiltError(
                f"deepspeed_io(num_local_io_workers={num_local_io_workers}) is not built yet.",
                "Batches are made in this process, one ahead of the step.",
                "pass your own DataLoader's batches to the engine, with as many workers as you "
                "like.",
            )
        refuse_shared_loader(self.config, self.mesh, "deepspeed_io")
        sampler = data_sampler
        drop_last = self.parts.data_settings.drop_last
        size = batch_size or self.config.train_micro_batch_size_per_gpu
        take = partial(parallel.own_part, self.module) if self.mesh.sp > 1 else None
        if route == "train" and self.curriculum_learning_enabled():
            curriculum = import_module(".data_pipeline.loader", __package__).CurriculumLoader
            settings = self.data_efficiency_config()
            accumulation = self.config.gradient_accumulation_steps
            made: ShardedLoader = curriculum(
                dataset, size, self.mesh, settings, accumulation, collate_fn, drop_last, take
            )
            return made
        if sampler is None and not isinstance(dataset, IterableDataset):
            shares = self.mesh.data_size, self.mesh.data_index
            is_training = route == "train"
            sampler = DistributedSampler(
                dataset, *shares, shuffle=is_training, drop_last=drop_last and is_training
            )
        return ShardedLoader(dataset, size, self.mesh, collate_fn, drop_last, sampler, take)

    def set_data_post_process_func(
        self, post_process_func: Callable[[Any, dict[str, Any]], Any]
    ) -> None:
        """Have each batch of the curriculum go through a function: (batch, the sampler's state) ->
        batch.

        As in DeepSpeed, nothing happens where no curriculum deals the engine's batches.
        """
        if self.curriculum_learning_enabled() and self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], Any]]
    ) -> None:
        """Give the schedules of type "custom" their functions: metric -> (step -> difficulty).

        Without a curriculum nothing happens, as in DeepSpeed.
        """
        if self.curriculum_learning_enabled() and self.training_dataloader is not None:
            self.training_dataloader.data_sampler.set_custom_curriculum_learning_schedule(
                schedule_func_dict
            )

    # -- accumulation

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Hold several backwards of one step; step() comes behind the block.

        In DeepSpeed one reduction follows the last of them.  Here a unit's gradients travel
        together in any case: the values are the same, and sharded ones are reduced at each
        backward.
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
        with self._inside("coalesce_grad_reduction"):
            yield

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients of a backward: they are, when it ends.  bucket_size: the
        configuration's serves.
        """

    def _backward_epilogue(self) -> None:
        """Do nothing: a `backward` of the program's own has ended with the last gradient's
        reduction.
        """

    # -- saving

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        wait: bool = True,
    ) -> bool:
        """Write `save_dir/tag`; True.  Collective; every rank needs the same `save_dir`.

        client_state: plain values, tensors, numpy arrays, of each rank.  wait=False: write while
        training goes on; the first step after the last byte makes it visible, or raises what went
        wrong, as `finish_saving` does at once.
        """
        if save_dir is None or save_dir == "":
            raise NoFolderError(
                f"save_checkpoint(save_dir={save_dir!r}) names no folder.",
                fix="pass a folder's path.",
            )
        folder = path_of("save_checkpoint", "save_dir", save_dir)
        if not isinstance(client_state, Mapping | None):
            wanted = "a dict of plain values and tensors"
            raise refuse(
                "save_checkpoint",
                "client_state",
                client_state,
                wanted,
                "pass a dict, or leave it out.",
            )
        told = self.parts.saving_settings
        self._states.refuse()
        settings = SaveSettings(
            save_latest, exclude_frozen_parameters, told.tag_validation, wait, told.snapshot_bytes
        )
        # Behind DeepSpeed's name stand clients that may look for its files.
        preferred = DEEPSPEED if is_dropin_imported() else None
        saving.save_checkpoint(
            self, folder, tag, dict(client_state or {}), settings, preferred=preferred
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Go on from a checkpoint of any world size and stage: (path, client_state), (None, None)
        without one.

        tag: None for what `latest` names, "newest" for the newest one of which every byte is right.
        Collective.
        """
        _refuse_load_fn("load_checkpoint", custom_load_fn)
        self._states.refuse()
        folder = path_of("load_checkpoint", "load_dir", load_dir)
        restore = saving.Restore(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        if (
            tag is None
            and not (folder / LATEST).exists()
            and (converted := folder / LATEST_UNIVERSAL).exists()
        ):
            tag = converted.read_text(encoding="utf-8").strip()
        return saving.load_checkpoint(self, folder, tag, restore)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written while training goes on.  Collective where there is
        one.
        """
        self.parts.saver.finish()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the model's whole state dict, on every rank.  Collective.

        exclude_frozen_parameters: leave out parameters that no stage trains.
        """
        frozen = frozen_names(self.runtime) if exclude_frozen_parameters else frozenset()
        with self.runtime.state_dicts.gathering():
            whole = self.module.state_dict()
        return {name: value for name, value in whole.items() if name not in frozen}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the whole state dict, with "module." before each name.  Collective, also behind
        DeepSpeed's name, where `engine.module.state_dict()` is local.
        """
        with self.runtime.state_dicts.gathering():
            return super().state_dict(*args, **kwargs)

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load a whole state dict (or {"module": state dict}); every rank passes it and keeps its
        slices.
        """
        _refuse_load_fn("load_module_state_dict", custom_load_fn)
        if not isinstance(checkpoint, Mapping):
            wanted = 'a whole state dict, or {"module": state dict}'
            raise refuse(
                "load_module_state_dict",
                "checkpoint",
                checkpoint,
                wanted,
                "pass module_state_dict()'s result.",
            )
        inner = checkpoint.get("module")
        self.module.load_state_dict(
            inner if isinstance(inner, Mapping) else dict(checkpoint), strict=strict
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights, in the dtype they compute in, as one file of rank 0.
        Collective.

        A name that ends in .safetensors is written as such, tied weights once.  False at stage 3
        without stage3_gather_16bit_weights_on_model_save, as in DeepSpeed.
        """
        target = path_of("save_16bit_model", "save_dir", save_dir)
        target /= path_of("save_16bit_model", "save_filename", save_filename)
        if self.runtime.settings.stage == 3 and not self.parts.saving_settings.gather_16bit:
            log_once(
                f"Did not save the model {target} because "
                "stage3_gather_16bit_weights_on_model_save is False."
            )
            return False
        settings = ExportSettings(exclude_frozen=exclude_frozen_parameters)
        export_file(self.runtime, target, settings)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the whole state dict on rank 0, None elsewhere.  Collective: every rank must call
        it.
        """
        return consolidated(self.runtime, ExportSettings(exclude_frozen=exclude_frozen_parameters))

    _consolidated_16bit_state_dict = (
        _zero3_consolidated_16bit_state_dict  # DeepSpeed's name for ranks along tp
    )

    def export(
        self,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        exclude_frozen: bool = False,
    ) -> Path:
        """Write the whole weights for others to read: a folder that `from_pretrained` loads, or one
        file.  Collective.

        path: a folder of safetensors, or a file that ends in .safetensors, .pth, .pt or .bin.
        dtype: "fp32", "bf16", a torch.dtype; None: what the weights compute in.
        """
        return exporting.export(self.runtime, path, dtype, max_shard_bytes, exclude_frozen)

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Take weights from safetensors (Hugging Face's folder, or a file), each rank its slices
        alone.  Collective.
        """
        exporting.load_weights(self.runtime, path, strict)

    def _change_recovery_script_permissions(self, dst: str | Path) -> None:
        """Let the owner run a script; a file system without permissions is told of in the log."""
        try:
            Path(dst).chmod(0o700)
        except OSError as error:
            logger.info(f"permissions of {dst} stay as they are ({error}).")

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Return where DeepSpeed keeps this rank's optimizer states; they are found by name
        here.
        """
        return str(
            Path(
                checkpoints_path,
                str(tag),
                f"zero_pp_rank_{self.mesh.rank}_mp_rank_00_optim_states.pt",
            )
        )

    # -- memory and speed

    def empty_partition_cache(self) -> None:
        """Reshard every unit and free the buffers kept for the next gather.  Collective; between
        steps.
        """
        with torch.no_grad():
            self.runtime.executor.reshard_all()
        for group in self.runtime.groups:
            group.comm_ctx.pool.clear()

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Return the memory of states to the system until `reload_states`.  Collective, between two
        steps.

        States of an accelerator go to host memory.  States of the CPU go to a file, since there is
        no other memory: in `nvme_path` if an offload section has one, else in the folder for
        temporary files.  Whoever uses an offloaded state meanwhile gets a UsageError.

        Args:
            include: Kinds of state, as `OffloadStateTypeEnum` or its values; None: all.
                `hp_params` are the main weights, `lp_params` the weights that compute (in fp32
                these are the same, and stay unless `lp_params` are named), `lp_grads` the memory
                of gradients, `contiguous_grad_buffer` that of messages.
            device: "cpu"; "nvme" takes the file for everything; "none" does nothing.
            pin_memory: Page-lock the host memory that a GPU's states go to.
            non_blocking: Accepted; the states have been moved when this returns.

        Raises:
            UsageError: An unknown kind of state or device, or a call inside a forward or backward.
            StorageError: The file cannot be written.
        """
        asked = (
            KINDS if include is None else [str(getattr(kind, "value", kind)) for kind in include]
        )
        if unknown := sorted(set(asked) - set(KINDS)):
            wanted = f"kinds of state: {', '.join(KINDS)}"
            raise refuse(
                "offload_states",
                "include",
                unknown[0],
                wanted,
                "name some of these, or leave include out.",
            )
        where = str(getattr(device, "value", device) or "none")
        if where not in ("cpu", "nvme", "none"):
            raise refuse(
                "offload_states", "device", device, '"cpu", "nvme" or "none"', "leave it out."
            )
        if where == "none":
            return
        if self.runtime.phase is not Phase.IDLE:
            raise UsageError(
                "offload_states() was called inside a forward or backward.",
                "They use the states.",
                "call it after step().",
            )
        self.parts.saver.finish()
        zero = self.config.zero_optimization
        paths = (zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path)
        folder = next((str(path) for path in paths if path), None)
        is_pinned = pin_memory and self.device.type == "cuda"
        self._states.offload(asked, pinned=is_pinned, in_file=where == "nvme", folder=folder)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved away, with the same bits.  Collective; harmless
        without an offload.

        non_blocking: accepted; the states are there when this returns.
        """
        self._states.reload()

    @property
    def offloaded_states(self) -> set[Any]:
        """Return the kinds of state that `offload_states` has moved away."""
        kinds: Any = import_module(".config_classes", __package__).OffloadStateTypeEnum
        return {kinds(kind) for kind in self._states.offloaded}

    @property
    def _states(self) -> StateOffload:
        found: StateOffload | None = self.__dict__.get("_state_offload")
        if found is None:
            found = self.__dict__["_state_offload"] = StateOffload(self.runtime, self.optimizer)
        return found

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Differentiate the loss as `Engine.backward` does.  Behind the name deepspeed it needs an
        optimizer.

        Collective.
        """
        if self.optimizer is None and is_dropin_imported():
            raise UsageError(
                "must provide optimizer during init in order to use backward.",
                "The engine serves inference only.",
                "pass an optimizer to initialize, or name one in the configuration.",
            )
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Take a step as `Engine.step` does; refused while states are offloaded.  Collective."""
        self._states.refuse()
        super().step(lr_kwargs)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each unit's forward by torch.compile; gathering and reduction stay outside the
        graphs.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuiltError(
                "engine.compile(schedule=..., compiled_autograd_enabled=True) is not built.",
                "Those are DeepCompile's passes; units are compiled one by one here.",
                "leave both out.",
            )
        if self.parts.vertical is not None:
            raise NotBuiltError(
                "engine.compile() beside vertical_micro_batches is not built.",
                "Both stand in for the forward of a unit.",
                "leave one of the two out.",
            )
        if not self.is_compiled:
            self.__dict__["_compiled_units"] = compile_units(
                self.runtime, {"backend": backend, **(compile_kwargs or {})}
            )

    def refuse_graphless_leaves(self) -> None:
        """From now on raise, as DeepSpeed does, where a trained leaf module gets no input that
        requires a gradient.
        """
        leaves = [
            leaf
            for leaf in get_z3_leaf_modules(self.module)
            if any(p.requires_grad for p in leaf.parameters())
        ]
        refuse = partial(_refuse_graphless, weakref.ref(self))
        self.__dict__["_leaf_hooks"] = [
            leaf.register_forward_pre_hook(refuse, with_kwargs=True) for leaf in leaves
        ]

    @property
    def is_compiled(self) -> bool:
        """Whether compile() was called and not undone."""
        return bool(self.__dict__.get("_compiled_units"))

    def destroy(self) -> None:
        """Unhook the model, undo compile() and close the records; calling it twice is harmless.

        Offloaded states are restored first, without communication.
        """
        if (away := self.__dict__.pop("_state_offload", None)) is not None:
            away.release()
        for handle in self.__dict__.pop("_leaf_hooks", []):
            handle.remove()
        restore(self.__dict__.pop("_compiled_units", []))
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


# Methods of the class, as in DeepSpeed: a program may call
# DeepSpeedEngine.gradient_clipping(its_own_engine).
for _name, _getter in GETTERS.items():
    setattr(DeepSpeedEngine, _name, _getter)


def _refuse_graphless(engine: Any, leaf: nn.Module, args: Any, kwargs: Any) -> None:
    # Where reductions are held back, no leaf reduces anything
    if not torch.is_grad_enabled() or engine()._context:
        return
    if not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        raise UsageError(
            f"the leaf module {type(leaf).__name__} got no input that requires a gradient.",
            "DeepSpeed reduces a leaf's gradients when backward reaches its inputs, and refuses "
            "this.",
            "let an input require a gradient, or take the mark off (unset_z3_leaf_modules): "
            "nothing here needs it.",
        )


def _refuse_load_fn(owner: str, given: Any) -> None:
    if given is not None:
        raise NotBuiltError(
            f"{owner}(custom_load_fn=...) is not built yet.",
            "Each rank reads only its own slices, so there is no whole state dict to hand over.",
            "load with load_module_strict=False, or change weights inside zero.GatheredParameters.",
        )
