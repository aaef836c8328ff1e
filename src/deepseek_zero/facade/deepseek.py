"""Seed 000's words: `DeepSeekZeRO3(model, **zero_config)` and `ZeroOptimizer(params, lr=, optimizer_type=)`.

The model is wrapped in place and used as before: `model(...)`, `loss.backward()`, `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.device import default_device
from ..base.errors import UsageError
from ..base.mesh import current_mesh
from ..config import resolve
from ..config.load import load
from ..engine import exporting
from ..engine.assemble import Parts, adopting, assemble, granularities
from ..engine.start import Request, facts_of
from ..optim.registry import resolve_optimizer
from ..optim.sharded import ShardedOptimizer
from ..sharding.group import FlatGroup
from ..sharding.handle import owner_of
from ..sharding.runtime import Runtime

# Seed 000's flat keywords and where they stand in the configuration.
FLAT = {"optimizer": "optimizer.type", "lr": "optimizer.params.lr", "stage": "zero_optimization.stage"}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Seed 000's keywords as a configuration; any other keyword is a top-level key of it."""
    config: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = FLAT.get(key, key).split(".") if not isinstance(value, dict) else [key]
        into = config
        for section in sections:
            into = into.setdefault(section, {})
        into[last] = value
    return config


class DeepSeekZeRO3:
    """Shards a model in place, by seed 000's keywords or any key of the configuration.  Collective.

    The name says 3; `stage` may be 0 to 3.  Keep using the model itself; this object tells (`explain`) and can be
    dropped.
    """

    def __init__(self, model: nn.Module, **zero_config: Any) -> None:
        mesh = current_mesh(default_device())
        flat = dict(zero_config)
        section = dict(flat.pop("zero_optimization", {}))
        flat["zero_optimization"] = {"stage": flat.pop("stage", section.pop("stage", 3)), **section}
        optimizer = {key: flat.pop(key) for key in ("optimizer", "lr") if key in flat}
        self.optimizer_defaults = optimizer
        self.config = resolve(load(nested(flat)), facts_of(Request(model), mesh))
        parts = assemble(self.config, model, mesh, None, None)
        self.model, self.runtime = model, parts.runtime
        # The model keeps what drives it: a caller who drops this object still trains.
        model.register_forward_pre_hook(_Keep(parts))

    def explain(self) -> str:
        """The schedule of gathers, uses, releases and reductions."""
        return str(self.runtime.gatherer.schedule)

    def export(self, path: str | Path, dtype: torch.dtype | str | None = None, **settings: Any) -> Path:
        """Write the whole weights for others to read, as `DeepSpeedEngine.export` does.  Collective."""
        return exporting.export(self.runtime, path, dtype, **settings)

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Take weights from safetensors, each rank its slices alone.  Collective."""
        exporting.load_weights(self.runtime, path, strict)


class _Keep:
    """A hook that does nothing but hold the parts, where an optimizer finds them."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, module: nn.Module, args: Any) -> None:
        return None


class ZeroOptimizer(Optimizer):
    """An optimizer over a model that is, or will be, wrapped by `DeepSeekZeRO3`.

    params: parameters or groups. optimizer_type: any name of the registry.  Other keywords are the optimizer's own.
    Gradients stay until `zero_grad`, as with torch's optimizers.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, optimizer_type: str = "adam", **options: Any) -> None:
        self.client = resolve_optimizer(optimizer_type, {"lr": lr, **options}).build(list(params))
        self.sharded: ShardedOptimizer | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.client.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.client.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.client.defaults

    def _attach(self) -> ShardedOptimizer | Optimizer:
        """The sharded optimizer once the parameters are wrapped; before that, the plain one."""
        if self.sharded is None:
            owner = owner_of(self.client.param_groups[0]["params"][0])
            runtime = owner.runtime() if isinstance(owner, FlatGroup) else None
            if runtime is None:
                return self.client
            parts = _parts_of(runtime)
            settings = replace(
                parts.step_settings, keep_grads=True, granularity=granularities(self.client, self.client.param_groups)
            )
            groups = list(self.client.param_groups)
            self.sharded = ShardedOptimizer(runtime, groups, adopting(self.client), settings, parts.scaler)
        return self.sharded

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights; collective once the model is wrapped."""
        self._attach().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._attach().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._attach().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._attach().load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"ZeroOptimizer({self.client!r})"


def _parts_of(runtime: Runtime) -> Parts:
    for hook in runtime.model._forward_pre_hooks.values():
        if isinstance(hook, _Keep) and hook.parts.runtime is runtime:
            return hook.parts
    raise UsageError(
        "the model belongs to an engine made by initialize(), which has its own optimizer.",
        "Two optimizers would update the same slices.",
        "use engine.step(), or wrap the model with DeepSeekZeRO3.",
    )
