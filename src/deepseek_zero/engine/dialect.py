"""How an API builds its engines, with the defaults of the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.optim import Optimizer

from .. import parallel
from ..base.mesh import Mesh
from ..optim.sharded import ShardedOptimizer
from ..planner.plan_settings import PlanSettings
from ..precision.loss_scale import LossScaleSettings
from .data import ShardedLoader
from .engine import Engine
from .parts import Parts
from .request import Request

if TYPE_CHECKING:  # as in engine.py
    from ..config import Config

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class ModelRules:
    """The behavior of one wrapped model that an API chooses and the plan does not contain.

    Attributes:
        allows_unmanaged_params: Whether to ignore parameters that are added after wrapping, with a
            warning; otherwise they are an error.
        requires_scaled_loss: Whether a loss of the engine's own forward must be scaled before its
            backward.
        gathers_state_dict: `state_dict()` of the model gathers sharded parameters, which is a
            collective. Otherwise it is local, and sharded parameters are empty tensors.
    """

    allows_unmanaged_params: bool = False
    requires_scaled_loss: bool = False
    gathers_state_dict: bool = True


@dataclass(frozen=True)
class BuildRules:
    """The classes and defaults that an API chooses for the parts of an engine.

    Attributes:
        model: How the wrapped model behaves, for example whether its state dict is gathered.
        optimizer_class: A function that returns the class of the sharded optimizer, from the class
            of the inner optimizer and the settings of the plan.
        loss_scale: A function that returns the settings of the loss scale that are used instead of
            the configured ones.
    """

    model: ModelRules = field(default_factory=ModelRules)
    optimizer_class: Callable[[type[Optimizer], PlanSettings], type[ShardedOptimizer]] = (
        lambda inner, settings: ShardedOptimizer
    )
    loss_scale: Callable[[LossScaleSettings], LossScaleSettings] = lambda settings: settings


class EngineDialect(Generic[E]):
    """Builds engines of one class for `start`. An API overrides the methods that differ."""

    def __init__(self, engine_class: type[E]) -> None:
        self.engine_class = engine_class

    def rules(self, config: Config, mesh: Mesh, request: Request) -> BuildRules:
        """Return the classes and defaults with which `assemble` builds an engine.

        Args:
            config: The run's configuration, from which the settings are read.
            mesh: The device mesh: the size of each axis and this rank's coordinates.
            request: The checked arguments that the user passed to the API.

        Returns:
            The classes and defaults. The base class uses those of this library.
        """
        return BuildRules()

    def make_loader(self, config: Config, mesh: Mesh, request: Request) -> ShardedLoader:
        """Return the loader for this rank's part of `request.training_data`.

        Args:
            config: The run's configuration, from which the settings are read.
            mesh: The device mesh: the size of each axis and this rank's coordinates.
            request: The checked arguments that the user passed to the API.

        Returns:
            A loader that yields this rank's micro-batches.
        """
        take = None
        if mesh.sp > 1:
            take = partial(parallel.own_part, request.model)
        return ShardedLoader(
            request.training_data,
            config.train_micro_batch_size_per_gpu,
            mesh,
            request.collate_fn,
            config.dataloader_drop_last,
            take=take,
            step_samples=config.batch.train,
            shuffles=request.shuffles,
        )

    def make_engine(
        self,
        config: Config,
        mesh: Mesh,
        parts: Parts,
        request: Request,
        lr_scheduler: Any,
        loader: Any,
    ) -> E:
        """Return the engine, built from its parts.

        Args:
            config: The run's configuration, from which the settings are read.
            mesh: The device mesh: the size of each axis and this rank's coordinates.
            parts: The runtime, the optimizer and the features that `assemble` built.
            request: The checked arguments that the user passed to the API.
            lr_scheduler: The learning-rate schedule that `step` advances, or None.
            loader: The loader of the training data; None if the user passed no data.

        Returns:
            An instance of the engine class with which this object was constructed.
        """
        return self.engine_class(config, mesh, parts, lr_scheduler, loader)
