"""What DeepSpeed's names change in calls of the library.

`DeepSpeedNames` is the dialect of every call if this package is there.  It shows DeepSpeed's
attributes and takes DeepSpeed's models, but changes no default.  `DeepSpeedDropIn` is that of a
program that has imported `deepspeed`, and does more for it: it takes unknown keys with a warning,
starts a process group in a world of one, ends the engine that a model was in (the Trainer evaluates
before it trains, Lightning tests after it has fitted, and neither destroys its first engine),
refuses a world that accelerate counted wrongly, and takes DeepSpeed's defaults and refusals
(defaults.py).
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from ...api.dialect import Plain
from ...base.mesh import Mesh
from ...config.load import load
from ...config.problems import lookup
from ...config.raw_config import RawConfig
from ...engine.data import ShardedLoader
from ...engine.dialect import BuildRules
from ...engine.engine import Engine, Parts
from ...engine.request import Request
from ...extensions import zero_init
from ...sharding.param_group import ParamGroup
from ...sharding.rules import ModelRules
from ...sharding.sharded_parameter import owner_of
from . import defaults, groups
from .accelerate_ranks import (
    accelerate_statements,
    counted_by_accelerate,
    refuse_miscount,
    without_accelerates_wrapper,
)
from .before_initialize import tensor_parallel_statement
from .comm import init_distributed
from .dropin import is_dropin_imported
from .engine import DeepSpeedEngine, curriculum_loader
from .optimizer import dropin_class, named_class, scale_at_stage_0
from .parameters import show_ds_names
from .zero import DropInGatheredParameters, DropInInit

if TYPE_CHECKING:  # as in engine/engine.py
    from ...config import Config


def choose() -> Plain:
    """Return the dialect of a call that begins now."""
    return DeepSpeedDropIn() if is_dropin_imported() else DeepSpeedNames()


class DeepSpeedNames(Plain):
    """The library under its own name, with DeepSpeed's attributes beside its own."""

    is_dropin = False

    def complete(self, raw: RawConfig, request: Request) -> Request:
        statements = list(request.mesh_statements)
        asked = tensor_parallel_statement(request.model, raw, request.mpu is not None)
        if asked is not None:
            statements.insert(0, asked)
        layers: Any = _layers_of(request.model)
        if layers is not None:
            statements.append(layers.mesh_statement())
            layers.take_configured(raw.get("pipeline") or {})
        return replace(
            request,
            optimizer=without_accelerates_wrapper(request.optimizer),
            mesh_statements=tuple(statements),
            counts_model_ranks=counted_by_accelerate() is not None,
            shuffles=layers is None,  # a list of layers reads its samples in order, as in DeepSpeed
        )

    def rules(self, config: Config, mesh: Mesh, request: Request) -> BuildRules:
        return BuildRules(optimizer_class=named_class)

    def make_loader(
        self, config: Config, mesh: Mesh, parts: Parts, request: Request
    ) -> ShardedLoader:
        found = curriculum_loader(
            config, mesh, parts, request.model, request.training_data, request.collate_fn
        )
        return found if found is not None else super().make_loader(config, mesh, parts, request)

    def make_engine(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        request: Request,
        lr_scheduler: Any,
        loader: Any,
    ) -> DeepSpeedEngine:
        layers: Any = _layers_of(request.model)
        kind: type[DeepSpeedEngine] = DeepSpeedEngine if layers is None else layers.engine_class
        engine = kind(config, mesh, parts, lr_scheduler, loader, request, is_dropin=self.is_dropin)
        _engines[engine.module] = weakref.ref(engine), engine.runtime.hooks
        groups.tell_of(engine)
        return engine

    def show_names(self, session: zero_init.Init) -> None:
        show_ds_names(session)


class DeepSpeedDropIn(DeepSpeedNames):
    """The library under the name `deepspeed`: DeepSpeed's defaults, refusals and forms."""

    is_dropin = True
    init_class = DropInInit
    gathered_class = DropInGatheredParameters

    def load(self, source: Any, origin: str | None) -> RawConfig:
        raw = load(source, origin=origin, unknown="warn")
        return raw.changed(defaults.defaults_of(raw))

    def join(self, port: int, required: bool | None) -> None:
        init_distributed(distributed_port=port, dist_init_required=required)
        refuse_miscount()

    def complete(self, raw: RawConfig, request: Request) -> Request:
        request = super().complete(raw, request)
        model = request.model
        defaults.refuse(raw, model, request.optimizer)
        DropInGatheredParameters.follow(raw.values)
        end_engine_of(model)
        if str(lookup(raw.values, "optimizer.type", "")).lower() == "muon":
            import_module(".muon", __package__).mark_parameters(model)
        defaults.round_values(model, raw)
        self._autocast_modules = raw.not_built.get("torch_autocast.lower_precision_safe_modules")
        statements = (*accelerate_statements(), *request.mesh_statements)
        return replace(request, mesh_statements=statements, drops_idle_schedule=True)

    def rules(self, config: Config, mesh: Mesh, request: Request) -> BuildRules:
        # As in DeepSpeed, a state dict is local.  In a world of one, everything is on this rank.
        # DeepSpeed does not have stages of other models than lists of layers: a program would save
        # a part of such a model and take it for the whole.
        has_own_stages = mesh.pp > 1 and _layers_of(request.model) is None
        model = ModelRules(
            allows_unmanaged_params=True,
            requires_scaled_loss=mesh.pp == 1,  # a pipeline scales its loss by itself
            gathers_state_dict=mesh.world_size == 1 or has_own_stages,
        )
        if config.zero_optimization.stage == 0:
            return BuildRules(model, dropin_class, scale_at_stage_0)
        return BuildRules(model, dropin_class)

    def make_engine(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        request: Request,
        lr_scheduler: Any,
        loader: Any,
    ) -> DeepSpeedEngine:
        engine = super().make_engine(config, mesh, parts, request, lr_scheduler, loader)
        autocast = engine.runtime.settings.policy.autocast
        if autocast is not None:
            init = import_module(".torch_autocast", __package__).init_autocast_params
            init(engine, autocast, self._autocast_modules)
        groups.make_groups(mesh)
        return engine


def _layers_of(model: nn.Module) -> nn.Module | None:
    """Return a model that is written as a list of layers (`PipelineModule`), None for another."""
    return model if hasattr(model, "mesh_statement") else None


# Model -> its engine, both weakly, and the engine's hooks, which stay on the model when it is gone.
_engines: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Engine], list[Any]]] = (
    weakref.WeakKeyDictionary()
)


def end_engine_of(model: nn.Module) -> None:
    """Destroy the engine that the model is in, if there is one, after its last update has been
    made.
    """
    reference, hooks = _engines.pop(model, (None, []))
    engine = reference() if reference is not None else None
    owners = {owner_of(param) for param in model.parameters()}
    for group in [owner for owner in owners if isinstance(owner, ParamGroup)]:
        optimizer = group.optimizer()
        if optimizer is not None:
            optimizer.finish()
        runtime = group.runtime()
        # The engine is gone already; its optimizer is still held
        if engine is None and runtime is not None:
            runtime.remove_hooks()
    if engine is not None:
        engine.destroy()
    for hook in hooks:  # of an engine that is gone with its optimizer
        hook.remove()
