"""Seed 000's words: `DeepSeekZeRO3(model, **zero_config)` and `ZeroOptimizer(params, lr=, optimizer_type=)`.

The model is wrapped in place and used as before, by itself or through what `DeepSeekZeRO3` returns: `model(...)`,
`loss.backward()`, `optimizer.step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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


class DeepSeekZeRO3(nn.Module):
    """Shards a model in place, by seed 000's keywords or any key of the configuration.  Collective.

    The name says 3; `stage` may be 0 to 3.  The object stands for the model it has wrapped (`module`): it computes what
    the model computes and has the model's names, without a prefix, so `model = DeepSeekZeRO3(model)` and going on with
    the model itself are equally good.  It tells (`explain`), exports, and can be dropped.
    """

    def __init__(self, model: nn.Module, **zero_config: Any) -> None:
        super().__init__()
        mesh = current_mesh(default_device())
        flat = dict(zero_config)
        section = dict(flat.pop("zero_optimization", {}))
        flat["zero_optimization"] = {"stage": flat.pop("stage", section.pop("stage", 3)), **section}
        optimizer = {key: flat.pop(key) for key in ("optimizer", "lr") if key in flat}
        self.optimizer_defaults = optimizer
        self.config = resolve(load(nested(flat)), facts_of(Request(model), mesh))
        parts = assemble(self.config, model, mesh, None, None)
        self.module, self.runtime = model, parts.runtime
        # The model keeps what drives it: a caller who drops this object still trains.
        model.register_forward_pre_hook(_Keep(parts))
        _parts[parts.runtime] = weakref.ref(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's micro-batch."""
        return self.module(*args, **kwargs)

    def explain(self) -> str:
        """The schedule of gathers, uses, releases and reductions."""
        return str(self.runtime.gatherer.schedule)

    def export(self, path: str | Path, dtype: torch.dtype | str | None = None, **settings: Any) -> Path:
        """Write the whole weights for others to read, as `DeepSpeedEngine.export` does.  Collective."""
        return exporting.export(self.runtime, path, dtype, **settings)

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Take weights from safetensors, each rank its slices alone.  Collective."""
        exporting.load_weights(self.runtime, path, strict)

    # -- the model's names: what nn.Module would spell with this object's own attribute in front

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole tensors under the model's names, on every rank.  Collective."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Take whole tensors under the model's names; every rank passes them and keeps its slices."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)


# What this door has wrapped, for the optimizers that come later; both weakly, since the model holds the parts (_Keep).
_parts: weakref.WeakKeyDictionary[Runtime, weakref.ref[Parts]] = weakref.WeakKeyDictionary()


class _Keep:
    """A hook that does nothing but hold the parts."""

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
    reference = _parts.get(runtime)
    if reference is not None and (parts := reference()) is not None:
        return parts
    raise UsageError(
        "the model belongs to an engine made by initialize(), which has its own optimizer.",
        "Two optimizers would update the same slices.",
        "use engine.step(), or wrap the model with DeepSeekZeRO3.",
    )
