"""From a configuration to a running engine's parts: plan, then build what the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..activations.layerwise_accumulation import LayerwiseAccumulation
from ..activations.recompute import Recompute, RecomputeSettings, configure, release_with
from ..base import memory
from ..base.capabilities import Capabilities, Capability, as_text
from ..base.device import has_fast_bf16
from ..base.log import log_first, log_once
from ..base.mesh import Mesh
from ..comm.agreement import agree, run_on_all_ranks
from ..comm.collectives import Comm
from ..optim.sharded import ShardedOptimizer, StepSettings
from ..planner.plan import Plan
from ..planner.spec import PlanSettings, S
from ..planner.unit_tiers import PlacementSettings
from ..precision.loss_scale import LossScaler
from ..precision.policy import Policy
from ..sharding.runtime import Runtime
from ..sharding.wrap import check_room, open_tiers, refuse_wrapped, wrap_model
from .determinism import Determinism
from .observe import ObserverSettings
from .optimizer import Client, build_optimizer, optimizer_parts
from .planning import look_at, plan_run
from .preemption import Preemption
from .saving import Saver
from .settings import (
    DataSettings,
    SavingSettings,
    data_settings_of,
    memory_settings_of,
    observer_settings_of,
    placement_settings_of,
    recompute_settings_of,
    saving_settings_of,
    scaler_of,
    step_settings_of,
)

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

NEXT_TO_NOTHING = 0.1  # of a model's parameters


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
            str(self.runtime.executor.schedule),
        ]


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
    refuse_wrapped(model)
    comm = Comm(mesh.device, transport=config.transport).lay_out(mesh)
    run_on_all_ranks(comm, "looking at the model's parameters", lambda: look_at(model))
    chosen = optimizer_parts(config, model, client, params)
    step_settings = step_settings_of(config, chosen.granularity, mesh.device)
    plan = plan_run(config, model, comm, mesh, chosen, leaf_modules)
    capabilities = comm.capabilities() + number_formats(plan.settings.policy, mesh.device)
    if mesh.device.type == "cpu":
        capabilities += memory.capabilities(keeps_freed=memory.keep_freed_memory())
    tiers = open_tiers(plan, memory_settings_of(config), comm, step_settings.tile_numel)
    check_room(plan, tiers, comm)
    runtime = wrap_model(model, plan, comm, tiers)
    _tell_what_stays_whole(plan)
    scaler = scaler_of(config)
    optimizer = build_optimizer(chosen, runtime, plan, step_settings, scaler)
    runtime.loss_factor.scaler = scaler
    slices, saving = config.zero_optimization.vertical_micro_batches, saving_settings_of(config)
    parts = Parts(
        runtime,
        optimizer,
        scaler,
        plan.settings,
        step_settings,
        observer_settings_of(config),
        data_settings_of(config),
        saving,
        placement_settings_of(config),
        (config.scheduler.type, config.scheduler.params) if config.scheduler.type is not None else None,
        preemption=Preemption(saving.on_signal) if saving.on_signal is not None else None,
        saver=Saver(saving.retention),
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
    """Return whether the device computes in the run's 16 bits, or converts."""
    if policy.compute is not torch.bfloat16:
        return []
    if has_fast_bf16(device):
        return [Capability("bf16 arithmetic", "in hardware")]
    return [Capability("bf16 arithmetic", "by conversion", f"this {device.type.upper()} has no units for it")]


def _tell_what_stays_whole(plan: Plan) -> None:
    """One line where stage 3 shards next to nothing: the threshold's default is made for large models."""
    groups = [group for unit in plan.units for group in unit.groups]
    total, whole = plan.numel, sum(group.layout.numel for group in groups if group.plan.weight.placement is not S)
    if plan.settings.stage == 3 and whole > (1 - NEXT_TO_NOTHING) * total:
        told = f"all {total}" if whole == total else f"{whole} of {total}"
        log_once(
            f"stage 3 shards next to nothing: {told} parameters stay whole on every rank, in tensors of at most "
            f"zero_optimization.stage3_param_persistence_threshold = {plan.settings.persistence_numel}; 0 shards them "
            "all."
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
