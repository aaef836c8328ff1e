"""torch.compile, unit by unit.

A unit's forward is compiled and its hooks are not, so that gathering stays outside the graph: one graph serves every
repeated block, sharded or not.  Called by facade/deepspeed.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..sharding.runtime import Runtime


def compile_units(runtime: Runtime, options: dict[str, Any]) -> list[nn.Module]:
    """Compile every unit's forward, the whole model's where it has no units; returns the modules.

    torch leaves modules of its own classes (nn.Sequential as a block) uncompiled.  options: torch.compile's.
    """
    modules = [unit.module for unit in runtime.units[1:]] or [runtime.root.module]
    for module in modules:
        # An attribute of the instance, as torch's own documentation compiles one method; `restore` removes it.
        module.forward = torch.compile(module.forward, **options)
    return modules


def restore(modules: list[nn.Module]) -> None:
    """Undo `compile_units`."""
    for module in modules:
        module.__dict__.pop("forward", None)
