"""The only reader of the configuration: settings in, working parts out.

Nothing below ever sees a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..activations.layerwise_accumulation import LayerwiseAccumulation
from ..activations.recompute import Recompute, RecomputeSettings, configure, release_with
from ..base import memory
from ..base.capabilities import Capabilities, Capability, as_text
from ..base.device import has_fast_bf16
from ..base.errors import UsageError, shown
from ..base.log import log_first, log_once
from ..base.mesh import Mesh
from ..checkpoint.catalogue import Retention
from ..comm.agreement import agree, run_on_all_ranks
from ..comm.collectives import Comm
from ..optim.prefetch import PrefetchSettings
from ..optim.registry import granularity_of, resolve_optimizer
from ..optim.sharded import TILE_ALIGNMENT, TILE_NUMEL, ShardedOptimizer, StepSettings
from ..planner.spec import PlanSettings
from ..precision.loss_scale import LossScaler, LossScaleSettings
from ..precision.policy import Policy
from ..report.flops import FlopsSettings
from ..report.monitor import CometSettings, FileSettings, MonitorSettings, WandbSettings
from ..sharding.runtime import Runtime
from ..sharding.ties import refuse_complex, tie_shared, without_twins
from ..sharding.tuning import KEYS as TUNED
from ..sharding.wrap import refuse_wrapped, wrap_model
from .determinism import Determinism
from .observe import ObserverSettings
from .preemption import Preemption, PreemptionSettings
from .saving import Saver
from .tiers import (
    TIERS,
    PlacementSettings,
    admit,
    device_bytes_of,
    placement_settings_of,
    recompute_settings_of,
    tiers_of,
    with_places,
)

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


NEXT_TO_NOTHING = 0.1  # of a model's parameters


@dataclass(frozen=True)
class DataSettings:
    """What a loader made by the engine is told."""

    micro_batch: int = 1
    drop_last: bool = False


@dataclass(frozen=True)
class SavingSettings:
    """What saving is told.

    gather_16bit: save_16bit_model may gather a sharded model.  keep: which older ones stay.  layout: of the files;
    "auto" asks which name the library goes by.
    """

    tag_validation: str = "Warn"
    snapshot_bytes: int = 1 << 30
    gather_16bit: bool = False
    keep: Retention = field(default_factory=Retention)
    on_signal: PreemptionSettings | None = None
    layout: str = "auto"


@dataclass
class Parts:
    """What one engine is made of; the settings are all that anything below was told."""

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    scaler: LossScaler | None
    plan_settings: PlanSettings
    step_settings: StepSettings
    observer_settings: ObserverSettings
    data_settings: DataSettings
    saving_settings: SavingSettings
    placement_settings: PlacementSettings
    schedule: tuple[str, Any] | None = None
    recompute: Recompute | None = None
    vertical: LayerwiseAccumulation | None = None
    saver: Saver = field(default_factory=Saver)
    preemption: Preemption | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    determinism: Determinism | None = None
    told: dict[str, Any] = field(default_factory=dict)  # what DeepSeekZeRO3 heard of its optimizer, to compare with it

    def describe(self) -> list[str]:
        """One line per part: what `dump_state` logs, and what the contract compares to find keys without effect."""
        units = [f"{unit.name}: {[group.plan for group in unit.groups]}" for unit in self.runtime.units]
        inner = self.optimizer.inner if self.optimizer is not None else None
        return [
            str(self.plan_settings),
            str(self.step_settings),
            str(self.observer_settings),
            str(self.data_settings),
            str(self.saving_settings),
            str(self.placement_settings),
            f"loss scale {self.scaler}",
            f"optimizer {type(inner).__name__} {inner.defaults if inner is not None else ''}",
            f"schedule {self.schedule}",
            f"recomputation {self.recompute.settings if self.recompute is not None else None}",
            f"deterministic algorithms: {self.determinism is not None}",
            f"micro-batches in vertical order: {self.vertical.micro_batches if self.vertical is not None else 1}",
            *units,
            str(self.runtime.gatherer.schedule),
        ]


def policy_of(config: Config) -> Policy:
    """Number formats: fp16 and bf16 sections, autocast, reduce and accumulate dtypes."""
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    auto_cast = config.fp16.auto_cast if config.fp16.enabled else config.auto_cast
    return Policy(
        compute=compute,
        reduce=DTYPES[config.communication_data_type] if config.communication_data_type else None,
        accumulate=DTYPES[config.data_types.grad_accum_dtype or "fp32"],
        master="none" if config.bf16.bf16_master_weights_and_grads else config.bf16.master,
        moments="bf16" if config.bf16.bf16_optimizer_states else config.optimizer.moments,
        autocast=DTYPES[config.torch_autocast.dtype or "bf16"] if config.torch_autocast.enabled else None,
        auto_cast=auto_cast,
    )


def is_open(config: Config, key: str) -> bool:
    """Whether nobody stated this key of `zero_optimization`: left out, or "auto"."""
    decided = {decision.key for decision in config.decisions}
    return key not in config.zero_optimization.model_fields_set or f"zero_optimization.{key}" in decided


def plan_settings_of(config: Config) -> PlanSettings:
    """Everything about sharding and its schedule."""
    zero = config.zero_optimization
    return PlanSettings(
        stage=zero.stage,
        policy=policy_of(config),
        accumulation=config.gradient_accumulation_steps,
        persistence_numel=zero.stage3_param_persistence_threshold,
        persistence_total_numel=zero.stage3_model_persistence_threshold,
        window_numel=zero.stage3_max_live_parameters,
        keep_numel=zero.stage3_max_reuse_distance,
        ahead_numel=zero.stage3_prefetch_bucket_size,
        bucket_numel=zero.reduce_bucket_size,
        overlap=bool(zero.overlap_comm),
        mean=config.gradient_allreduce_op == "mean",
        prescale=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
        transport=config.transport,
        weight_tier=TIERS[zero.offload_param.device],
        state_tier=TIERS[zero.offload_optimizer.device],
        device_bytes=device_bytes_of(config),
        delayed_update=zero.offload_optimizer.delayed_update_after is not None,
        unused_is_error=not zero.ignore_unused_parameters,
        tunes=tuple(name for name, key in TUNED.items() if is_open(config, key)),
        unit_names=tuple(config.units),
        leaf_classes=tuple(str(name).rpartition(".")[2] for name in zero.leaf_module.classes),
        leaf_names=tuple(zero.leaf_module.names),
        leaf_suffixes=tuple(zero.leaf_module.name_suffixes),
        fuse_numel=zero.stage3_module_granularity_threshold,
    )


def scaler_of(config: Config) -> LossScaler | None:
    """Loss scaling belongs to fp16 alone."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    return LossScaler(
        LossScaleSettings(
            loss_scale=fp16.loss_scale,
            initial_scale_power=fp16.initial_scale_power,
            loss_scale_window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_loss_scale=fp16.min_loss_scale,
        )
    )


def step_settings_of(config: Config, granularity: tuple[str, ...], device: torch.device) -> StepSettings:
    zero, offload = config.zero_optimization, config.zero_optimization.offload_optimizer
    tile_numel = min(zero.sub_group_size, TILE_NUMEL.on(device))
    return StepSettings(
        max_norm=config.gradient_clipping,
        tile_numel=max(1, tile_numel // TILE_ALIGNMENT) * TILE_ALIGNMENT,
        pipelined=offload.pipeline,
        speculates=offload.super_offload,
        undo_bytes=offload.undo_bytes,
        delay_after=offload.delayed_update_after,
        flow=PrefetchSettings(
            ahead=offload.buffer_count if offload.pipeline_read else 0,
            behind=offload.buffer_count if offload.pipeline_write else 0,
        ),
        granularity=granularity,
        check_finite=config.bf16.check_grad_overflow if config.bf16.enabled else config.check_grad_overflow,
        precision_fallback=config.precision == "auto",
    )


def observer_settings_of(config: Config) -> ObserverSettings:
    """What an engine tells while it trains, and where."""
    return ObserverSettings(
        steps_per_print=config.steps_per_print,
        wall_clock_breakdown=config.wall_clock_breakdown,
        memory_breakdown=config.memory_breakdown,
        dump_state=config.dump_state,
        log_level=config.log_level,
        records_path=config.records.path,
        records_every=config.records.every,
        monitor=MonitorSettings(
            FileSettings(**config.tensorboard.model_dump()),
            FileSettings(**config.csv_monitor.model_dump()),
            WandbSettings(**config.wandb.model_dump()),
            CometSettings(**config.comet.model_dump()),
        ),
        flops=flops_settings_of(config),
    )


def data_settings_of(config: Config) -> DataSettings:
    """What a loader made by the engine is told."""
    return DataSettings(config.train_micro_batch_size_per_gpu, config.dataloader_drop_last)


def flops_settings_of(config: Config) -> FlopsSettings | None:
    """Which forward's operations are counted; None for none."""
    chosen = config.flops_profiler
    if not chosen.enabled:
        return None
    return FlopsSettings(
        chosen.profile_step, chosen.recompute_fwd_factor, chosen.module_depth, chosen.detailed, chosen.output_file
    )


def saving_settings_of(config: Config) -> SavingSettings:
    """Checkpoints: which older ones stay, and whether a signal saves one."""
    section = config.checkpoint
    asked = section.save_on_signal
    return SavingSettings(
        tag_validation=section.tag_validation,
        snapshot_bytes=section.snapshot_bytes,
        gather_16bit=config.zero_optimization.stage3_gather_16bit_weights_on_model_save,
        keep=Retention(section.keep_last, section.keep_every),
        layout=section.layout,
        on_signal=PreemptionSettings(asked.path, asked.signals) if asked.path is not None else None,
    )


Client = Optimizer | Callable[[list[Any]], Optimizer] | None


def assemble(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    client: Client,
    params: Sequence[Any] | None,
    leaf_modules: tuple[str, ...] = (),
) -> Parts:
    """Shard the model and build its optimizer.  Collective.

    client: an optimizer, a callable that makes one from parameters, or None (then the configuration's, if it names
    one). params: parameters or parameter groups to train; None = all that require gradients.
    leaf_modules: full names of modules that travel as one piece, beside those that the configuration names.
    """
    settings = plan_settings_of(config)
    settings = replace(settings, leaf_names=settings.leaf_names + leaf_modules)
    refuse_wrapped(model)
    comm = Comm(mesh.device, transport=settings.transport)
    run_on_all_ranks(comm, "looking at the model's parameters", lambda: _look_at(model))
    groups, make, granularity = _optimizer_parts(config, model, client, params)
    step_settings = step_settings_of(config, granularity, mesh.device)
    placement = placement_settings_of(config)
    settings = with_places(settings, placement, model, comm, _optimizer_name(config, client), mesh.device)
    capabilities = comm.capabilities() + number_formats(settings.policy, mesh.device)
    if mesh.device.type == "cpu":
        capabilities += memory.capabilities(keeps_freed=memory.keep_freed_memory())
    tiers = tiers_of(config, settings, comm, mesh.device, step_settings.tile_numel)
    admit(tiers, model, settings, comm, _optimizer_name(config, client))
    runtime = wrap_model(model, settings, comm, mesh.device, tiers)
    _tell_what_stays_whole(runtime, settings)
    scaler = scaler_of(config)
    optimizer = ShardedOptimizer(runtime, groups, make, step_settings, scaler) if make is not None else None
    runtime.loss_factor.scaler = scaler
    slices, saving = config.zero_optimization.vertical_micro_batches, saving_settings_of(config)
    parts = Parts(
        runtime,
        optimizer,
        scaler,
        settings,
        step_settings,
        observer_settings_of(config),
        data_settings_of(config),
        saving,
        placement,
        (config.scheduler.type, config.scheduler.params) if config.scheduler.type is not None else None,
        preemption=Preemption(saving.on_signal) if saving.on_signal is not None else None,
        saver=Saver(saving.keep),
    )
    agree(
        comm,
        [
            f"{parts.data_settings}",
            f"schedule {parts.schedule}",
            f"vertical {slices}",
            f"save on signal {saving.on_signal}",
            f"deterministic {config.deterministic}",
        ],
        "the configuration",
        "Ranks take their batches and their learning rates in step, and save in step.",
        "pass the same configuration on every rank.",
    )
    parts.recompute = _recompute_for(recompute_settings_of(config), comm, runtime)
    parts.vertical = LayerwiseAccumulation(runtime, slices) if slices > 1 else None
    if config.deterministic:
        parts.determinism = run_on_all_ranks(
            comm, "deterministic algorithms", lambda: Determinism(runtime, mesh.device)
        )
    capabilities += tiers.capabilities() + (parts.recompute.capabilities() if parts.recompute is not None else [])
    parts.capabilities = Capabilities.of_ranks(
        comm.all_gather_text(as_text(capabilities), "what each rank's machine grants")
    )
    if parts.capabilities.fallbacks:
        log_first("\n  ".join(["this run makes do with slower ways:", *parts.capabilities.fallbacks]))
    return parts


def number_formats(policy: Policy, device: torch.device) -> list[Capability]:
    """Whether the device computes in the run's 16 bits, or converts."""
    if policy.compute is not torch.bfloat16:
        return []
    if has_fast_bf16(device):
        return [Capability("bf16 arithmetic", "in hardware")]
    return [Capability("bf16 arithmetic", "by conversion", f"this {device.type.upper()} has no units for it")]


def _look_at(model: nn.Module) -> None:
    refuse_complex(model)
    tie_shared(model)


def _tell_what_stays_whole(runtime: Runtime, settings: PlanSettings) -> None:
    """One line where stage 3 shards next to nothing: the threshold's default is made for large models."""
    total = sum(member.slot.numel for group in runtime.groups for member in group.members)
    whole = sum(member.slot.numel for group in runtime.groups if not group.is_sharded for member in group.members)
    if settings.stage == 3 and whole > (1 - NEXT_TO_NOTHING) * total:
        told = f"all {total}" if whole == total else f"{whole} of {total}"
        log_once(
            f"stage 3 shards next to nothing: {told} parameters stay whole on every rank, in tensors of at most "
            f"zero_optimization.stage3_param_persistence_threshold = {settings.persistence_numel}; 0 shards them all."
        )


def _recompute_for(settings: RecomputeSettings, comm: Comm, runtime: Runtime) -> Recompute | None:
    """What this configuration makes of `checkpointing.checkpoint` while the model is driven by this runtime; one that
    says nothing of it changes nothing.
    """
    if settings == RecomputeSettings():
        return None
    recompute = run_on_all_ranks(comm, "opening the nvme_path of activations", lambda: configure(settings))
    release_with(runtime, recompute)
    return recompute


def _optimizer_name(config: Config, client: Client) -> str | None:
    return type(client).__name__ if isinstance(client, Optimizer) else config.optimizer.type


Make = Callable[[list[dict[str, Any]]], Optimizer]


def _optimizer_parts(
    config: Config, model: nn.Module, client: Client, params: Sequence[Any] | None
) -> tuple[list[dict[str, Any]], Make | None, tuple[str, ...]]:
    """Parameter groups, how to build the optimizer over their slices, and how finely its state may be cut."""
    if callable(client) and not isinstance(client, Optimizer):
        made = client(_groups(model, params))
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"the callable given as optimizer made {shown(made)}, which is no torch.optim.Optimizer.",
                "It is called with parameter groups, and what it returns is stepped over slices of them.",
                "return an optimizer, for example torch.optim.AdamW(groups, lr=0.001).",
            )
        client = made
    if isinstance(client, Optimizer):
        return list(client.param_groups), adopting(client), granularities(client, client.param_groups)
    if config.optimizer.type is None:
        return [], None, ()
    spec = resolve_optimizer(config.optimizer.type, config.optimizer.params)
    # Of all parameters, the frozen ones too: they are updated once they are unfrozen.
    groups = spec.parameter_groups(model, _groups(model, params if params is not None else list(model.parameters())))
    if not any(group["params"] for group in groups):
        raise UsageError(
            f"optimizer {config.optimizer.type} has nothing to train.",
            "No parameter of the model requires a gradient." if params is None else "model_parameters is empty.",
            "leave the optimizer out of the configuration to run the model alone, or let parameters require gradients.",
        )
    return groups, spec.build, granularities(spec.cls, groups)


def granularities(optimizer: Optimizer | type[Optimizer], groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """How finely each group's state may be cut."""
    return tuple(granularity_of(optimizer, group) for group in groups)


def adopting(client: Optimizer) -> Make:
    """Keep the client's own object: its groups get slices for parameters, so schedulers bound to it keep working."""

    def adopt(groups: list[dict[str, Any]]) -> Optimizer:
        if any(float(entry.get("step", 1)) > 0 for entry in client.state.values()):
            raise UsageError(
                "the optimizer has already taken a step, so it holds state for whole parameters.",
                "Its state would have to be cut into slices.",
                "pass a fresh optimizer and load its state from a checkpoint afterwards.",
            )
        if client.state:  # made at construction (Adagrad): made again over the slices
            client.state = cast("Any", type(client))(groups).state
        for mine, sliced in zip(client.param_groups, groups, strict=True):
            mine["params"] = sliced["params"]
        return client

    return adopt


def _groups(model: nn.Module, params: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Parameters or groups, as groups."""
    found: list[Any] = (
        list(params) if params is not None else [param for param in model.parameters() if param.requires_grad]
    )
    if found and isinstance(found[0], dict):
        return without_twins({**dict(group), "params": list(group["params"])} for group in found)
    return without_twins([{"params": [item[1] if isinstance(item, tuple) else item for item in found]}])
