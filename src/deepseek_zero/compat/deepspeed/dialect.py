"""Dialects: how the library behaves under DeepSpeed's names.

`DeepSpeedNames` is the dialect of every call. It adds DeepSpeed's attributes and supports
DeepSpeed's models, but changes no default.

`DeepSpeedDropIn` is the dialect of a program that has imported `deepspeed`. It warns about unknown
keys, starts a process group even for one rank, refuses a world size that accelerate counted
wrongly, and uses DeepSpeed's defaults and checks (defaults.py). It also ends the previous engine of
a model: transformers' Trainer evaluates before it trains, Lightning tests after it has fitted, and
neither destroys its first engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from ...api.dialect import Dialect
from ...base.mesh import Mesh
from ...config.load import load
from ...config.problems import lookup
from ...config.raw_config import RawConfig
from ...config.text import read
from ...engine.data import ShardedLoader
from ...engine.dialect import BuildRules, ModelRules
from ...engine.engine import Engine
from ...engine.parts import Parts
from ...engine.request import Request
from ...extensions import zero_init
from ...sharding.param_group import ParamGroup
from ...sharding.sharded_parameter import owner_of
from . import defaults, groups
from .accelerate_ranks import (
    accelerate_statements,
    counted_by_accelerate,
    refuse_miscount,
    without_accelerates_wrapper,
)
from .before_initialize import tensor_parallel_statement
from .comm import configure, init_distributed
from .dropin import is_dropin_imported
from .engine import DeepSpeedEngine, GivenConfig, curriculum_loader
from .module_copies import allow_copies
from .optimizer import dropin_class, named_class, scale_at_stage_0
from .parameters import show_ds_names
from .zero import DropInGatheredParameters, DropInInit

if TYPE_CHECKING:  # see engine/engine.py
    from ...config import Config


def choose() -> Dialect:
    """Return the dialect for a call of `initialize` or `zero.Init` that starts now.

    It is `DeepSpeedDropIn` if the program has imported `deepspeed` from this library, and
    `DeepSpeedNames` otherwise.
    """
    return DeepSpeedDropIn() if is_dropin_imported() else DeepSpeedNames()


class DeepSpeedNames(Dialect):
    """Dialect of programs that import `deepseek_zero`: adds DeepSpeed's attributes."""

    is_dropin = False

    def complete(self, raw: RawConfig, request: Request) -> Request:
        """Add the mesh axes of `tp_model_init` and of a list of layers to the request.

        Args:
            raw: Configuration, which may define a tensor-parallel size.
            request: Arguments of `initialize`.

        Returns:
            The request with these axes.
        """
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
            # As in DeepSpeed, the samples of a list of layers are read in order.
            shuffles=layers is None,
        )

    def rules(self, config: Config, mesh: Mesh, request: Request) -> BuildRules:
        """Return the classes and defaults with which an engine is built.

        Args:
            config: Checked configuration of the run.
            mesh: Mesh of ranks of the run.
            request: Arguments of `initialize`.

        Returns:
            Rules that select the optimizer class with DeepSpeed's attribute names.
        """
        return BuildRules(optimizer_class=named_class)

    def make_loader(self, config: Config, mesh: Mesh, request: Request) -> ShardedLoader:
        """Create the loader of the training data, which follows a configured curriculum.

        Args:
            config: Checked configuration, which has the batch size and the curriculum.
            mesh: Mesh of ranks, which gives this rank's position along the data axis.
            request: Arguments of `initialize`.

        Returns:
            The loader of this rank's micro-batches.
        """
        found = curriculum_loader(
            config, mesh, request.model, request.training_data, request.collate_fn
        )
        return found if found is not None else super().make_loader(config, mesh, request)

    def make_engine(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        request: Request,
        lr_scheduler: Any,
        loader: Any,
    ) -> DeepSpeedEngine:
        """Create the engine and make its mesh the current one of `groups`.

        Args:
            config: Checked configuration of the run.
            mesh: Mesh of ranks of the run.
            parts: Sharded model, optimizer and other parts that the engine runs.
            request: Arguments of `initialize`.
            lr_scheduler: Learning-rate scheduler.
            loader: Loader of the training data.

        Returns:
            The engine: a `PipelineEngine` for a `PipelineModule`, else a `DeepSpeedEngine`.
        """
        layers: Any = _layers_of(request.model)
        kind: type[DeepSpeedEngine] = DeepSpeedEngine if layers is None else layers.engine_class
        engine = kind(config, mesh, parts, lr_scheduler, loader, request, is_dropin=self.is_dropin)
        _engines[engine.module] = weakref.ref(engine), engine.runtime.hooks
        groups.use_mesh_of(engine)
        self.finish(engine)
        return engine

    def finish(self, engine: DeepSpeedEngine) -> None:
        """Do nothing. A subclass overrides this method to change an engine after its creation."""

    def show_names(self, session: zero_init.Init) -> None:
        show_ds_names(session)


class DeepSpeedDropIn(DeepSpeedNames):
    """Dialect of programs that import `deepspeed`: uses its defaults, checks and types."""

    is_dropin = True
    init_class = DropInInit
    gathered_class = DropInGatheredParameters

    def load(self, source: Any, origin: str | None) -> RawConfig:
        """Read a configuration with DeepSpeed's defaults. Unknown keys are only logged.

        Args:
            source: A dict, the path of a JSON file, or JSON text.
            origin: Name of the source in messages.

        Returns:
            The configuration with the values of the source and DeepSpeed's defaults.
        """
        raw = load(source, origin=origin, unknown="warn")
        self._given = read(source, lenient=True).values
        return raw.changed(defaults.defaults_of(raw))

    def join(self, port: int, required: bool | None) -> None:
        """Start the process group, also for one rank, and check accelerate's count.

        Args:
            port: Port of the rendezvous.
            required: Value of `dist_init_required` of `initialize`.

        Note:
            Collective: every rank must call it.
        """
        init_distributed(distributed_port=port, dist_init_required=required)
        refuse_miscount()

    def complete(self, raw: RawConfig, request: Request) -> Request:
        """Apply DeepSpeed's checks and read accelerate's mesh.

        The previous engine of the model is destroyed, the model's fp32 values are rounded to the
        dtype of the computation, and its buffers are cast to it.

        Args:
            raw: Configuration to check.
            request: Arguments of `initialize`.

        Returns:
            The request with accelerate's mesh axes.
        """
        request = super().complete(raw, request)
        model = request.model
        defaults.refuse(raw, model, request.optimizer)
        DropInGatheredParameters.follow(raw.values)
        end_engine_of(model)
        if str(lookup(raw.values, "optimizer.type", "")).lower() == "muon":
            import_module(".muon", __package__).mark_parameters(model)
        defaults.round_values(model, raw)
        defaults.cast_buffers(model, raw)
        log_calls(raw.not_built.get("comms_logger") or {})
        self._autocast_modules = raw.not_built.get("torch_autocast.lower_precision_safe_modules")
        statements = (*accelerate_statements(), *request.mesh_statements)
        return replace(request, mesh_statements=statements, drops_idle_schedule=True)

    def rules(self, config: Config, mesh: Mesh, request: Request) -> BuildRules:
        # As in DeepSpeed, a state dict is local. With one rank, all of it is on this rank.
        # DeepSpeed supports pipelines of lists of layers only. Without gathering, a program would
        # save one stage of another model as if it were the whole.
        has_own_stages = mesh.pp > 1 and _layers_of(request.model) is None
        model = ModelRules(
            allows_unmanaged_params=True,
            requires_scaled_loss=mesh.pp == 1,  # a pipeline scales its loss itself
            gathers_state_dict=mesh.world_size == 1 or has_own_stages,
        )
        if config.zero_optimization.stage == 0:
            return BuildRules(model, dropin_class, scale_at_stage_0)
        return BuildRules(model, dropin_class)

    def make_engine(self, config: Config, *args: Any) -> DeepSpeedEngine:
        """Create an engine whose `config` is the dict that the program passed."""
        given: Any = GivenConfig(self._given, config)
        return super().make_engine(given, *args)

    def finish(self, engine: DeepSpeedEngine) -> None:
        """Create the process groups of the engine's mesh, and allow copies of whole weights.

        If autocast is configured, `comm_dtype` of the parameters that it covers is set, as in
        DeepSpeed.
        """
        autocast = engine.runtime.settings.policy.autocast
        if autocast is not None:
            init = import_module(".torch_autocast", __package__).init_autocast_params
            init(engine, autocast, self._autocast_modules)
        groups.make_groups(engine.mesh)
        if engine.runtime.settings.stage < 3:
            allow_copies(engine.module)


def log_calls(section: Mapping[str, Any]) -> None:
    """Log the program's calls of `deepspeed.comm` if the section `comms_logger` enables this."""
    if section.get("enabled"):
        names = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
        configure(**{"prof_all": True, **{key: section[key] for key in names if key in section}})


def _layers_of(model: nn.Module) -> nn.Module | None:
    """Return the model if it is a list of layers (`PipelineModule`), else None."""
    return model if hasattr(model, "mesh_statement") else None


# Model -> its engine and the engine's hooks. The references to both are weak, but the hooks stay on
# the model after its engine is deleted.
_engines: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Engine], list[Any]]] = (
    weakref.WeakKeyDictionary()
)


def end_engine_of(model: nn.Module) -> None:
    """Apply the pending update of a model's engine, and destroy the engine."""
    reference, hooks = _engines.pop(model, (None, []))
    engine = reference() if reference is not None else None
    owners = {owner_of(param) for param in model.parameters()}
    for group in [owner for owner in owners if isinstance(owner, ParamGroup)]:
        optimizer = group.optimizer()
        if optimizer is not None:
            optimizer.finish()
        runtime = group.runtime()
        # The engine is already deleted, but its optimizer is still referenced.
        if engine is None and runtime is not None:
            runtime.remove_hooks()
    if engine is not None:
        engine.destroy()
    for hook in hooks:  # needed if the engine and its optimizer were deleted
        hook.remove()
