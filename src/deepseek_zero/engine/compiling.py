"""Compile units with torch.compile.

Only the forward of a unit is compiled. Its hooks are not, so gathers stay outside the graph, and
one graph serves all repeated blocks, whether they are sharded or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..sharding.runtime import Runtime


@dataclass(frozen=True)
class Compiled:
    """One module with a compiled forward.

    Attributes:
        own: The `forward` attribute that the instance had; None if it used its class's.
    """

    module: nn.Module
    forward: Any
    own: Any


def compile_units(runtime: Runtime, options: dict[str, Any]) -> list[Compiled]:
    """Compile the forward of every unit, or of the whole model if it has no units.

    PyTorch does not compile modules of its own classes, such as an nn.Sequential used as a block.

    Args:
        runtime: The runtime of the model.
        options: The arguments of torch.compile.
    """
    modules = [unit.module for unit in runtime.units[1:]] or [runtime.root.module]
    found = []
    for module in modules:
        # Set on the instance, as PyTorch's documentation does to compile one method; `restore`
        # removes it.
        own = module.__dict__.get("forward")
        compiled = torch.compile(module.forward, **options)
        module.forward = compiled
        found.append(Compiled(module, compiled, own))
    return found


def restore(compiled: list[Compiled]) -> None:
    """Undo `compile_units`, except for modules whose forward was replaced since."""
    for each in compiled:
        if each.module.__dict__.get("forward") is each.forward:
            del each.module.__dict__["forward"]
            if each.own is not None:
                each.module.forward = each.own
