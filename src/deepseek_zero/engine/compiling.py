"""Compile units with torch.compile.

Only the forward of a unit is compiled. Its hooks are not, so gathers stay outside the graph, and
one graph serves all repeated blocks, whether they are sharded or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..sharding.runtime import Runtime


def compile_units(runtime: Runtime, options: dict[str, Any]) -> list[Callable[[], None]]:
    """Compile the forward of every unit except the root.

    If the model has no other unit, the forward of the whole model is compiled. Each `forward` is
    replaced in place, and torch compiles it at its first call.

    Args:
        runtime: The runtime of the wrapped model.
        options: The keyword arguments that are passed to `torch.compile`.

    Returns:
        One function per compiled module. Calling it restores the module's original `forward`,
        unless the `forward` was replaced in the meantime.
    """
    modules = [unit.module for unit in runtime.units[1:]] or [runtime.root.module]
    found = list[Callable[[], None]]()
    for module in modules:
        # Set on the instance, as PyTorch's documentation does to compile one method
        own = module.__dict__.get("forward")
        module.forward = torch.compile(module.forward, **options)
        found.append(partial(_restore, module, module.forward, own))
    return found


def _restore(module: nn.Module, compiled: Any, own: Any) -> None:
    """Undo the compilation of a module, unless its forward was replaced since.

    `own` is the `forward` that the instance had; None if it used its class's.
    """
    if module.__dict__.get("forward") is compiled:
        del module.__dict__["forward"]
        if own is not None:
            module.forward = own
