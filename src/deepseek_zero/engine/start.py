"""Start an engine from a user's arguments, or make its plan.

It reads and resolves the configuration, assembles the parts, and adds schedule and data.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from .. import engine
from ..base.device import CPU, default_device, has_fast_bf16
from ..base.errors import UsageError, shown
from ..base.given import whole_number
from ..base.log import log_once
from ..base.mesh import SHARD_AXES, Mesh, current_mesh
from ..base.nested import on_meta
from ..comm.net.channel import listening_variables
from ..comm.net.store import launchers_store
from ..config import Facts, RawConfig, choose_source, resolve
from ..config.load import load
from ..extensions.ties import tie_shared
from ..optimizers.lr_schedules import resolve_schedule
from ..planner.auto_wrap_policy import read_model
from ..planner.plan import Plan, plan_shape
from ..planner.plan_settings import Machine
from ..planner.split import refuse_other_cuts
from .assemble import assemble
from .changes import plan_large_layers, refuse_changes_on, refuse_split_states
from .determinism import fix_workspace
from .dialect import EngineDialect
from .engine import Engine
from .mesh_statements import choose_mesh, statements_of
from .optimizer import Client, optimizer_parts
from .parts import Parts
from .pieces import (
    PiecePlans,
    no_example,
    plan_pieces,
    refuse_auto_on,
    refuse_shared_loader,
    stage_to_plan,
)
from .planning import stated_budgets, update_of, with_order_of_sums, with_useful_copies
from .request import Request, parameters_of
from .settings import (
    placement_settings_of,
    plan_settings_of,
    step_settings_of,
)

E = TypeVar("E", bound=Engine)


def facts_of(request: Request, mesh: Mesh, *, has_bf16: bool | None = None) -> Facts:
    """Collect the facts about a run from which "auto" values are resolved.

    Args:
        request: The checked arguments that the user passed to the API.
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        has_bf16: Whether the device computes in bf16; None to check this machine's device.

    Returns:
        The facts that `config.auto.resolve` reads.
    """
    model_config = getattr(request.model, "config", None)
    hidden = _count(getattr(model_config, "hidden_size", None))
    several = getattr(model_config, "hidden_sizes", None)
    if hidden is None and isinstance(several, list):
        hidden = max((size for size in map(_count, several) if size), default=None)
    defaults = request.optimizer.defaults if isinstance(request.optimizer, Optimizer) else {}
    client = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in defaults.items()
    }
    if has_bf16 is None:
        has_bf16 = has_fast_bf16(mesh.device)
    return Facts(
        world_size=mesh.world_size,
        data_size=mesh.data_size,
        stages=mesh.pp,
        tensor_size=mesh.tp,
        counts_model_ranks=request.counts_model_ranks,
        device_type=mesh.device.type,
        has_bf16=has_bf16,
        launched=mesh.is_distributed,
        hidden_size=hidden,
        loader_micro_batch=_count(getattr(request.training_data, "batch_size", None)),
        client_optimizer=client,
    )


def _count(value: Any) -> int | None:
    """Return a size found on a foreign object; None if it is not a positive integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def prepare_process(raw: RawConfig) -> None:
    """Make the settings that must precede the rendezvous and the start of CUDA.

    The section `network` sets the listening address, unless the launcher or the user has set it.
    cuBLAS gets its fixed workspace if the configuration requests deterministic algorithms.

    Raises:
        UsageError: This host does not have the interface that the section names.
    """
    if raw.get("deterministic"):
        fix_workspace(default_device())
    section: Mapping[str, Any] = raw.get("network", {})
    stated = listening_variables(section.get("interface"), section.get("ports"))
    for name, value in stated.items():
        if (said := os.environ.setdefault(name, value)) != value:
            log_once(
                f"{name}={said} takes precedence over {value} of the configuration's section "
                "`network`"
            )


def start(raw: RawConfig, request: Request, dialect: EngineDialect[E]) -> E:
    """Build an engine from a configuration and the user's arguments.

    Args:
        raw: The configuration as the user wrote it, in which values may be "auto".
        request: The checked arguments that the user passed to the API.
        dialect: Builds the engine of the calling API, with the API's defaults.

    Returns:
        The engine, an instance of the dialect's engine class, ready to train.

    Note:
        Collective: every rank must call it with the same model and configuration.
    """
    mesh = choose_mesh(
        statements_of(raw, request.mesh, request.mesh_statements),
        current_mesh(default_device(), store_of=launchers_store),
    )
    config = resolve(raw, facts_of(request, mesh))
    if request.training_data is not None:
        refuse_shared_loader(config, mesh, "training_data")
    parts = assemble(
        config,
        request.model,
        mesh,
        request.optimizer,
        request.parameters,
        request.leaf_modules,
        partial(example_of, request),
        request.sequence,
        dialect.rules(config, mesh, request),
    )
    lr_scheduler = _schedule(parts, request)
    loader = None
    if request.training_data is not None:
        loader = dialect.make_loader(config, mesh, request)
    built = dialect.make_engine(config, mesh, parts, request, lr_scheduler, loader)
    if config.dump_state:
        log_once("\n".join(engine.describe(parts)))
    preemption = parts.preemption
    if preemption is not None:
        preemption.watch()
        # A deleted engine must not keep its signal handlers.
        weakref.finalize(built, preemption.release).atexit = False
    return built


def example_of(request: Request) -> Any:
    """Return an example micro-batch for the model's forward.

    It comes from the training data or from the model's `dummy_inputs`.
    """
    if request.training_data is not None and hasattr(request.training_data, "__getitem__"):
        return (request.collate_fn or default_collate)([request.training_data[0]])
    if (found := getattr(request.model, "dummy_inputs", None)) is not None:
        return found
    raise no_example("training_data")


def _schedule(parts: Parts, request: Request) -> Any:
    """Return the learning-rate schedule of the caller or of the configuration.

    The caller passes an object or a callable.
    """
    given = request.lr_scheduler
    if given is None and parts.schedule is None:
        return None
    if parts.optimizer is None:
        if request.drops_idle_schedule:
            log_once(
                "a learning-rate schedule was given without an optimizer to schedule: ignored.",
                logging.WARNING,
            )
            return None
        raise UsageError(
            "a learning-rate schedule was given without an optimizer to schedule.",
            "initialize got neither `optimizer` nor a configuration with an `optimizer` section.",
            "pass one of the two, or do not pass the schedule.",
        )
    if given is not None:
        # A class has `step`, too, but creates a schedule
        is_factory = callable(given) and (isinstance(given, type) or not hasattr(given, "step"))
        if is_factory:
            built = given(parts.optimizer)
            if not hasattr(built, "step"):
                raise UsageError(
                    f"the callable passed as lr_scheduler returned {shown(built)}, which is not a "
                    "schedule.",
                    "It is called with the engine's optimizer, and engine.step() calls the "
                    "schedule's step().",
                    "return a schedule, for example torch.optim.lr_scheduler.StepLR(optimizer, 1).",
                )
            return built
        scheduled = getattr(given, "optimizer", None)
        own = (request.optimizer, parts.optimizer, parts.optimizer.inner)
        if type(scheduled).__module__.startswith("torch.optim") and scheduled not in own:
            log_once(
                "the learning-rate schedule belongs to another optimizer than the engine's, whose "
                "learning rate it does not change.\n  What to do: pass to initialize the optimizer "
                "of the schedule, or a callable that creates the schedule from an optimizer.",
                logging.WARNING,
            )
        return given
    assert parts.schedule is not None
    name, params = parts.schedule
    return resolve_schedule(name, params, parts.optimizer)


def plan(
    model: nn.Module,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
    hosts: int = 1,
    mesh: Any = None,
    device: torch.device | str = CPU,
    optimizer: Client = None,
    model_parameters: Any = None,
    leaf_modules: Sequence[str] = (),
    example: Any = None,
) -> Plan:
    """Return the plan of one rank.

    The plan has the units, layouts, schedule, updates, memory and traffic of the rank. `initialize`
    makes the same plan for the same model and configuration. This function allocates no states and
    needs no process group, so any machine can compute the plan of any rank. It assumes that the
    device has bf16.

    Args:
        model: The model; only shapes and dtypes are read, so it may be on the meta device.
            As in a run, parameters that share memory are replaced in `model` by one parameter.
        config: The configuration, as for `initialize`. None uses the defaults.
        ranks: The number of ranks of the world.
        rank: The rank whose plan is returned, from 0 to ``ranks - 1``.
        hosts: The number of hosts. CPU ranks of one host read each other's memory.
        mesh: The device mesh, as for `initialize`.
        device: The device on which each rank trains; it need not exist here.
        optimizer: The optimizer or a callable that creates it, as for `initialize`.
        model_parameters: The parameters or parameter groups to train, as for `initialize`.
        leaf_modules: The full names of modules that are not divided into units, in addition to
            those of the configuration.
        example: A micro-batch for the model's forward. It is used for meshes with pp, tp or sp,
            because the messages of these axes depend on its shapes. None uses the model's
            `dummy_inputs`. If the model has none either, the sizes of these messages are unknown.

    Returns:
        A `Plan`. If printed, it shows a table of the bytes of each state in each memory.

    Raises:
        ConfigError: The configuration is invalid or does not fit these ranks.
        NotBuiltError: The configuration has a key, or a combination of keys and mesh axes, that is
            not implemented.
        UsageError: An argument is invalid, the mesh does not fit `ranks`, or the mesh has stages
            and there is neither `example` nor `dummy_inputs` (a list of layers needs none). The
            error is also raised if the configuration leaves the memories of states to "auto" and
            has no `memory_budget`.
        OutOfMemoryError: The `memory_budget` is too small for the states.
    """
    whole_number("plan", "ranks", ranks, 1)
    whole_number("plan", "rank", rank, 0, ranks - 1)
    whole_number("plan", "hosts", hosts, 1, ranks)
    world = Mesh().on_world(ranks, rank, torch.device(device))
    source, origin = choose_source({} if config is None else config, None, None)
    given = None
    if model_parameters is not None:
        given = parameters_of("plan", "model_parameters", model_parameters)
    request = Request(model, optimizer, given, call="plan")
    raw = load(source, origin=origin)
    axes = choose_mesh(statements_of(raw, mesh, launched=False), world)
    chosen = resolve(raw, facts_of(request, axes, has_bf16=True))
    refuse_changes_on(chosen, axes)
    refuse_auto_on(chosen, axes)
    settings = plan_settings_of(chosen, tuple(leaf_modules), axes.pp)
    placement = placement_settings_of(chosen)
    given_parameters = given is not None or isinstance(optimizer, Optimizer)
    model = stage_to_plan(model, axes, is_optimized_by_caller=given_parameters)
    tie_shared(model)
    parts = optimizer_parts(chosen, model, optimizer, given)
    shape = read_model(model, settings)
    refuse_other_cuts(shape.cuts, axes.tp)
    pieces = PiecePlans()
    if axes.pp > 1 or axes.tp > 1 or axes.sp > 1:
        own, pieces = plan_pieces(chosen, model, axes, example)
        refuse_split_states(parts, own)
        shape = read_model(own, settings)
    if chosen.zero_optimization.tile_above is not None:
        own = on_meta(model)
        parts = plan_large_layers(chosen, own, parts)
        shape = read_model(own, settings)
    counted = ranks // hosts if hosts > 1 and ranks % hosts == 0 else 1
    settings = with_order_of_sums(settings, axes, counted, parts.cls)
    per_host = -(-ranks // hosts)
    shard = axes.ranks_along(*SHARD_AXES)
    shares = axes.device.type == "cpu" and settings.transport != "gloo"

    def in_place(members: Sequence[int]) -> bool:
        return shares and len(members) > 1 and members[0] // per_host == members[-1] // per_host

    inside, across = axes.hosts_of(settings.ranks_per_host or 1)
    machine = Machine(
        in_place(shard),
        stated_budgets(settings, placement, axes.device),
        replicas_read_in_place=in_place(axes.ranks_along("dp_replicate")),
        near_read_in_place=in_place(inside),
        far_read_in_place=in_place(across),
        spans_hosts=shard[0] // per_host != shard[-1] // per_host,
    )
    settings = with_useful_copies(settings, axes, in_place=machine.reads_in_place)
    step = step_settings_of(chosen, parts.granularity, axes.device)
    update = update_of(chosen, step, parts)
    found = plan_shape(shape, settings, axes, machine, update, placement)
    return pieces.added_to(found)
