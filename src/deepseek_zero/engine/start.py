"""From what a user passes to a running engine: read the configuration, resolve it, assemble, attach schedule and
data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..base.device import default_device, has_fast_bf16
from ..base.errors import UsageError
from ..base.mesh import Mesh, current_mesh
from ..config import Facts, RawConfig, resolve
from ..optim.lr_schedules import resolve_schedule
from .assemble import assemble
from .data import ShardedLoader
from .engine import Engine


@dataclass
class Request:
    """Everything a door can be given; None where it was not."""

    model: nn.Module
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None
    parameters: Sequence[Any] | None = None
    lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None


def facts_of(request: Request, mesh: Mesh) -> Facts:
    """What the resolver of "auto" may know of this run."""
    model_config = getattr(request.model, "config", None)
    hidden = (
        getattr(model_config, "hidden_size", None) or max(getattr(model_config, "hidden_sizes", None) or [0]) or None
    )
    client = dict(request.optimizer.defaults) if isinstance(request.optimizer, Optimizer) else {}
    return Facts(
        world_size=mesh.size,
        device_type=mesh.device.type,
        has_bf16=has_fast_bf16(mesh.device),
        launched=mesh.is_distributed,
        hidden_size=hidden,
        num_params=sum(param.numel() for param in request.model.parameters()),
        loader_micro_batch=getattr(request.training_data, "batch_size", None),
        client_optimizer=client,
    )


def start(raw: RawConfig, request: Request, engine_class: type[Engine] = Engine) -> Engine:
    """Build the engine.  Collective: every rank passes the same model and configuration."""
    if not isinstance(request.model, nn.Module):
        raise UsageError(
            f"a model of type {type(request.model).__name__} cannot be wrapped.", "", "pass a torch.nn.Module."
        )
    mesh = current_mesh(default_device())
    config = resolve(raw, facts_of(request, mesh))
    engine = engine_class(
        request.model, config, mesh, assemble(config, request.model, mesh, request.optimizer, request.parameters)
    )
    engine.lr_scheduler = _schedule(engine, request.lr_scheduler)
    preemption = engine.parts.preemption
    if preemption is not None:
        preemption.watch()
        weakref.finalize(engine, preemption.release).atexit = False  # signals are not an engine's that is gone
    if request.training_data is not None:
        engine.training_dataloader = ShardedLoader(
            request.training_data,
            engine.parts.data_settings.micro_batch,
            mesh,
            request.collate_fn,
            engine.parts.data_settings.drop_last,
        )
    return engine


def _schedule(engine: Engine, given: Any) -> Any:
    """The schedule the caller passed (an instance, or a callable of the optimizer), else the configuration's."""
    if given is not None:
        is_factory = callable(given) and not hasattr(given, "step")
        return given(engine.optimizer) if is_factory else given
    if engine.parts.schedule is None or engine.optimizer is None:
        return None
    name, params = engine.parts.schedule
    return resolve_schedule(name, params, engine.optimizer)
