"""DeepSpeed's `deepspeed.zero`: gathering parameters and announcing external ones."""

from __future__ import annotations

from torch import nn

from .base.errors import UsageError
from .sharding.access import GatheredParameters
from .sharding.group import FlatGroup
from .sharding.handle import owner_of

__all__ = ["GatheredParameters", "register_external_parameter"]


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
    runtime.add_external(module, parameter, owner)
