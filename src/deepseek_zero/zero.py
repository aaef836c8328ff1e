"""DeepSpeed's `deepspeed.zero`: building sharded, gathering parameters, announcing external ones."""

from __future__ import annotations

from torch import nn

from .base.errors import UsageError
from .sharding.access import GatheredParameters
from .sharding.group import FlatGroup
from .sharding.handle import owner_of
from .sharding.init import Init

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Announce that a module's forward reads a parameter of another unit.  Local; every rank announces the same.

    Found by itself at the first use inside a forward; announcing it saves that first search.
    """
    owner = owner_of(parameter)
    runtime = owner.runtime() if isinstance(owner, FlatGroup) else None
    if runtime is None or not isinstance(owner, FlatGroup):
        raise UsageError(
            "register_external_parameter got a parameter that no engine has wrapped.",
            "Only a wrapped parameter has a unit to gather.",
            "call it after initialize (or DeepSeekZeRO3).",
        )
    for unit in runtime.units[1:]:
        if any(each is module for each in unit.module.modules()):
            runtime.gatherer.remember_external(unit, runtime.unit_of(owner))
