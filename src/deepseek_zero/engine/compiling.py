"""torch.compile, unit by unit.

A unit's forward is compiled and its hooks are not, so that gathering stays outside the graph: one
graph serves every repeated block, sharded or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..sharding.runtime import Runtime


@dataclass(frozen=True)
class Compiled:
    """One module with a compiled forward.  own: what its instance had for a forward; None: its
    class's.
    """

    module: nn.Module
    forward: Any
    own: Any


def compile_units(runtime: Runtime, options: dict[str, Any]) -> list[Compiled]:
    """Compile every unit's forward, the whole model's where it has no units.

    torch leaves modules of its own classes (nn.Sequential as a block) uncompiled.  options:
    torch.compile's.
    """
    modules = [unit.module for unit in runtime.units[1:]] or [runtime.root.module]
    found = []
    for module in modules:
        # An attribute of the instance, as torch's own documentation compiles one method; `restore`
        # removes it.
        own = module.__dict__.get("forward")
        compiled = torch.compile(module.forward, **options)
        module.forward = compiled
        found.append(Compiled(module, compiled, own))
    return found


def restore(compiled: list[Compiled]) -> None:
    """Undo `compile_units`, except for a module whose forward was replaced since."""
    for each in compiled:
        if each.module.__dict__.get("forward") is each.forward:
            del each.module.__dict__["forward"]
            if each.own is not None:
                each.module.forward = each.own
