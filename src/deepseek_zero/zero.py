"""DeepSpeed's `deepspeed.zero`: building sharded, gathering parameters, announcing external ones, tiled layers."""

from __future__ import annotations

from torch import nn

from .base.errors import UsageError
from .checkpoint.weights import load_weights
from .facade.views import show_ds_names
from .sharding.access import GatheredParameters
from .sharding.group import ParamGroup
from .sharding.handle import owner_of
from .sharding.init import Init
from .sharding.runtime import Runtime
from .sharding.tiled import TiledLinear
from .sharding.unit import Unit

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "load_weights",
    "register_external_parameter",
    "unregister_external_parameter",
]

Init.on_start = show_ds_names  # what it has cut answers to DeepSpeed's names before there is an engine


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Announce that a module's forward reads a parameter of another unit.  Local; every rank announces the same.

    Found by itself at the first use inside a forward; announcing it saves that first search.
    """
    runtime, owner = _home(parameter)
    for reader in _units_around(module, runtime):
        runtime.gatherer.remember_external(reader, owner)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take an announcement back.  Local; every rank does the same.  Should the module read it again, it is found."""
    runtime, owner = _home(parameter)
    for reader in _units_around(module, runtime):
        runtime.gatherer.forget_external(reader, owner)


def _home(parameter: nn.Parameter) -> tuple[Runtime, Unit]:
    """The engine and the unit of a wrapped parameter."""
    owner = owner_of(parameter)
    runtime = owner.runtime() if isinstance(owner, ParamGroup) else None
    if runtime is None or not isinstance(owner, ParamGroup):
        raise UsageError(
            "an external parameter was announced that no engine has wrapped.",
            "Only a wrapped parameter has a unit to gather.",
            "call it after initialize (or DeepSeekZeRO3).",
        )
    return runtime, runtime.unit_of(owner)


def _units_around(module: nn.Module, runtime: Runtime) -> list[Unit]:
    return [unit for unit in runtime.units[1:] if any(each is module for each in unit.module.modules())]
