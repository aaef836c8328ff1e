"""Build the parts of an engine: read the model, plan the run, build the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import parallel
from ..base.mesh import Mesh
from ..comm.agreement import AllRanks
from ..extensions.group_parts import group_parts
from ..extensions.policies import PolicySettings, policies_of
from ..extensions.zero_init import ready_units
from ..optim.shard_set import ShardSet
from ..optim.sharded import ShardedOptimizer
from ..optim.step_settings import StepSettings
from ..planner.auto_wrap_policy import read_model
from ..planner.plan import Plan
from ..precision.loss_scale import LossScaler
from ..sharding.runtime import Runtime
from ..sharding.wrap import wrap_model
from .changes import refuse_cuts
from .connecting import compare_capabilities, compare_ranks, connect, prepare_machine
from .dialect import BuildRules
from .features import add_features, attach_extensions, change_model, inspect_model
from .memories import check_space, commit, open_tiers
from .memory_advice import MemoryAdvice, explain_uncaught
from .optimizer import Client, OptimizerParts, optimizer_parts
from .parts import Parts
from .planning import log_whole_weights, plan_run, update_of
from .settings import (
    plan_settings_of,
    policy_settings_of,
    scaler_of,
    step_settings_of,
)

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config


def assemble(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    client: Client,
    params: Sequence[Any] | None,
    leaf_modules: tuple[str, ...],
    example: Callable[[], Any],
    sequence: parallel.SequenceSettings | None,
    rules: BuildRules = BuildRules(),  # noqa: B008  # frozen
) -> Parts:
    """Shard the model over the mesh and build its optimizer and the other parts.

    Args:
        config: The run's configuration, from which the settings are read.
        model: The model to shard; its parameters are replaced in place.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        client: An optimizer, or a callable that makes one from parameters. None takes the
            configuration's, if it names one.
        params: The parameters or parameter groups to train; None for all that require gradients.
        leaf_modules: More full names of modules that are not divided into units.
        example: Returns a micro-batch, whose shapes show a pipeline the sequence of blocks.
        sequence: The settings of sequence parallelism; None without it.
        rules: The classes and defaults that the calling API chooses for the parts.

    Returns:
        The runtime of the sharded model, the optimizer, the loss scaler and optional features.

    Note:
        Collective: every rank must call it.
    """
    world, transport = connect(config, mesh)
    layers = inspect_model(config, model, mesh, world)
    comm = world.lay_out(mesh)  # creates the groups of ranks of the mesh
    changes = change_model(config, model, mesh, comm, example, sequence, layers)
    settings = plan_settings_of(config, leaf_modules, mesh.pp)
    with AllRanks(comm, "reading the model and its optimizer"):
        tp_rank = mesh.coordinates["tp"]
        chosen = optimizer_parts(
            config, model, client, params, is_part=changes.stages is not None, coordinate=tp_rank
        )
        shape = read_model(model, settings)
        refuse_cuts(chosen, model, shape, mesh.tp)
    step_settings = step_settings_of(config, chosen.granularity, mesh.device)
    plan = plan_run(config, settings, step_settings, shape, chosen, comm, mesh)
    plan = changes.pieces.added_to(plan)
    capabilities = prepare_machine(comm, transport, plan.settings.policy)
    batch = config.batch.micro, config.batch.accumulation
    advice = MemoryAdvice(plan, shape, update_of(config, step_settings, chosen), batch)
    explain_uncaught(advice)
    scaler = scaler_of(config, rules.loss_scale)
    policies = policy_settings_of(config)
    with advice.explaining("initialize"):
        tiers = open_tiers(plan, config, comm, step_settings.host_tile_numel)
        check_space(plan, tiers, comm)
        compare_ranks(model, plan, comm)
        runtime = wrap_model(model, plan, comm, tiers, group_parts, ready_units)
        state_dicts = attach_extensions(runtime, scaler, rules.model)
        log_whole_weights(plan)
        optimizer = _optimizer_of(runtime, plan, chosen, policies, step_settings, scaler, rules)
        commit(tiers, comm)  # allocates the pages, after the model's own values were freed
    parts = Parts(
        runtime, optimizer, scaler, plan.settings, step_settings, policies, advice, state_dicts
    )
    add_features(parts, config, comm, mesh, changes)
    parts.capabilities = compare_capabilities(parts, capabilities + tiers.capabilities(), comm)
    return parts


def _optimizer_of(
    runtime: Runtime,
    plan: Plan,
    chosen: OptimizerParts,
    policies: PolicySettings,
    settings: StepSettings,
    scaler: LossScaler | None,
    rules: BuildRules,
) -> ShardedOptimizer | None:
    """Build the optimizer; None without one. Collective."""
    if chosen.make is None or chosen.cls is None:
        return None
    optimizer_class = rules.optimizer_class(chosen.cls, plan.settings)
    shards = ShardSet(
        runtime,
        chosen.groups,
        chosen.make,
        settings,
        scaler,
        plan.update,
        chosen.states,
        policies_of(policies, settings, runtime, chosen.cls),
    )
    return optimizer_class(shards)
