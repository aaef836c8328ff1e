"""Build the optional features of an engine that its configuration enables.

Features that change the model do so before it is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import activations, attention, engine, extensions, parallel
from ..activations.recompute import RecomputeSettings, configure_for, release_with
from ..base.mesh import Mesh
from ..checkpoint.catalogue import Retention
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..extensions.idle_memory import free_idle_memory
from ..extensions.loss_factor import LossFactor
from ..extensions.model_changes import watch_changes
from ..extensions.root_parts import gather_parts
from ..extensions.state_dicts import StateDicts
from ..extensions.ties import refuse_modules, refuse_owned, tie_shared
from ..extensions.tuning import tune_sizes
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from .changes import change_piece, change_whole, refuse_changes_on
from .determinism import Determinism
from .dialect import ModelRules
from .micro_batches import LossChecks
from .parts import Parts
from .pieces import PiecePlans, Stages, cut_along_axes, plan_layers, refuse_auto_on
from .saving import Saver
from .settings import recompute_settings_of, sparse_attention_of
from .step_fields import StepFields
from .stragglers import stragglers_of

if TYPE_CHECKING:  # as in parts.py
    from ..config import Config
    from .pieces import Layers


def inspect_model(config: Config, model: nn.Module, mesh: Mesh, world: Comm) -> Layers:
    """Check that the model can be sharded, and plan the layers that ranks split.

    Args:
        config: The run's configuration.
        model: The model, whose shared parameters are tied.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        world: The communicator of all ranks.

    Note:
        Collective: every rank must call it.
    """
    with AllRanks(world, "inspecting the model's parameters"):
        refuse_changes_on(config, mesh)
        refuse_auto_on(config, mesh)
        axis = "tp" if mesh.tp > 1 else None
        refuse_modules(model)
        refuse_owned(model, axis)
        tie_shared(model)
        return plan_layers(config, model, mesh)


@dataclass(frozen=True)
class ModelChanges:
    """How a configuration changed a model before it was planned.

    Attributes:
        pieces: The plans of the axes "pp", "tp" and "sp", along which the model was cut.
        stages: The stages of the pipeline; None without them.
        recomputing: The settings of activation checkpointing.
        sparse: The sparse attention that replaces the model's attention; None to keep it.
    """

    pieces: PiecePlans
    stages: Stages | None
    recomputing: RecomputeSettings
    sparse: attention.SparseAttention | None


def change_model(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    comm: Comm,
    example: Callable[[], Any],
    sequence: parallel.SequenceSettings | None,
    layers: Layers,
) -> ModelChanges:
    """Cut a model along the mesh axes, and make the changes that the configuration requires.

    Args:
        config: The run's configuration.
        model: The whole model, which is changed in place.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        comm: The communicator of all ranks.
        example: Returns a micro-batch, whose shapes show a pipeline the sequence of blocks.
        sequence: The settings of sequence parallelism; None without it.
        layers: The layers that ranks split, as from `inspect_model`.

    Note:
        Collective: every rank must call it.
    """
    recomputing = recompute_settings_of(config)
    sparse = sparse_attention_of(config, mesh)
    change_whole(model, comm, recomputing, sparse)
    stages, pieces = cut_along_axes(config, model, mesh, comm, example, sequence, layers)
    change_piece(model, comm, config)
    return ModelChanges(pieces, stages, recomputing, sparse)


def attach_extensions(runtime: Runtime, scaler: LossScaler | None, rules: ModelRules) -> StateDicts:
    """Attach the extensions that every engine has to its wrapped model.

    Args:
        runtime: The runtime of the wrapped model.
        scaler: The loss scaler of fp16; None if losses are not scaled.
        rules: The behavior of the model that the calling API chooses.

    Returns:
        The object that makes `state_dict()` of the model work with whole tensors.
    """
    LossFactor(runtime, scaler, is_strict=rules.requires_scaled_loss)
    gather_parts(runtime)
    watch_changes(runtime, ignores_new_params=rules.allows_unmanaged_params)
    state_dicts = StateDicts(runtime, gathers=rules.gathers_state_dict)
    if any(unit.is_layer_tile for unit in runtime.units):
        extensions.follow_tiles(runtime)
    free_idle_memory(runtime)
    tune_sizes(runtime)
    return state_dicts


def add_features(
    parts: Parts,
    config: Config,
    comm: Comm,
    mesh: Mesh,
    changes: ModelChanges,
) -> None:
    """Add the features that the configuration enables to the parts of an engine.

    Args:
        parts: The parts of the engine, in which the features are recorded.
        config: The run's configuration.
        comm: The communicator of all ranks.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        changes: The changes of the model before it was planned.

    Note:
        Collective: every rank must call it.
    """
    runtime = parts.runtime
    parts.saver = Saver(Retention(config.checkpoint.keep_last, config.checkpoint.keep_every))
    if config.scheduler.type is not None:
        parts.schedule = (config.scheduler.type, config.scheduler.params)
    if config.checkpoint.save_on_signal.path is not None:
        parts.preemption = engine.Preemption(config.checkpoint.save_on_signal)
        parts.after_steps.append(parts.preemption.act)
    if config.integrity.mode != "off" and parts.optimizer:
        parts.integrity = engine.Integrity(runtime, parts.optimizer, mesh, config.integrity)
        parts.after_steps.append(parts.integrity.after_step)
    if changes.stages is not None:
        parts.loop = changes.stages.connect(comm, mesh, runtime)
        parts.pipeline = parts.loop.pipeline
    parts.loss_checks = parts.loop or LossChecks(runtime, mesh)
    parts.step_fields = StepFields(parts.preemption, stragglers_of(mesh, comm), parts.integrity)
    parts.sparse_attention = changes.sparse
    parts.recompute = configure_for(
        changes.recomputing, comm, shards_tokens=bool(config.tensor_parallel.sequence)
    )
    if parts.recompute is not None:
        release_with(runtime, parts.recompute)
    if parts.plan_settings.layerwise_micro_batches > 1:
        parts.vertical = activations.LayerwiseAccumulation(runtime)
    if config.deterministic:
        with AllRanks(comm, "deterministic algorithms"):
            parts.determinism = Determinism(mesh.device)
