"""Build the optional features of an engine that its configuration enables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .. import activations, engine
from ..activations.recompute import RecomputeSettings, configure_for, release_with
from ..base.mesh import Mesh
from ..checkpoint.catalogue import Retention
from ..comm.agreement import AllRanks
from ..comm.collectives import Comm
from ..extensions.ties import refuse_modules, refuse_owned, tie_shared
from .changes import refuse_changes_on
from .determinism import Determinism
from .parts import Parts
from .pieces import Stages, plan_layers, refuse_auto_on
from .saving import Saver

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


def add_features(
    parts: Parts,
    config: Config,
    comm: Comm,
    mesh: Mesh,
    stages: Stages | None,
    recomputing: RecomputeSettings,
) -> None:
    """Add the features that the configuration enables to the parts of an engine.

    Args:
        parts: The parts of the engine, in which the features are recorded.
        config: The run's configuration.
        comm: The communicator of all ranks.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        stages: The stages of the pipeline; None without them.
        recomputing: The settings of activation checkpointing.

    Note:
        Collective: every rank must call it.
    """
    runtime = parts.runtime
    parts.saver = Saver(Retention(config.checkpoint.keep_last, config.checkpoint.keep_every))
    if config.scheduler.type is not None:
        parts.schedule = (config.scheduler.type, config.scheduler.params)
    if config.checkpoint.save_on_signal.path is not None:
        parts.preemption = engine.Preemption(config.checkpoint.save_on_signal)
    if config.integrity.mode != "off" and parts.optimizer:
        parts.integrity = engine.Integrity(runtime, parts.optimizer, mesh, config.integrity)
    if stages is not None:
        parts.loop = stages.connect(comm, mesh, runtime)
        parts.pipeline = parts.loop.pipeline
    parts.recompute = configure_for(
        recomputing, comm, shards_tokens=bool(config.tensor_parallel.sequence)
    )
    if parts.recompute is not None:
        release_with(runtime, parts.recompute)
    if parts.plan_settings.layerwise_micro_batches > 1:
        parts.vertical = activations.LayerwiseAccumulation(runtime)
    if config.deterministic:
        with AllRanks(comm, "deterministic algorithms"):
            parts.determinism = Determinism(mesh.device)
