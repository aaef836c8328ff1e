"""`copy.deepcopy` of the modules of a wrapped model, as programs use it for averaged weights."""

from __future__ import annotations

import weakref
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn

from ...sharding.hooks import Hook

_COPY = "__deepcopy__"


def allow_copies(model: nn.Module) -> None:
    """Make `copy.deepcopy` of a wrapped model or submodule return a module without engine.

    The weights must be whole on every rank, as at stages 0 to 2. Modules whose class defines its
    own `__deepcopy__` are not changed.

    Args:
        model: The wrapped model.
    """
    for module in model.modules():
        if not hasattr(type(module), _COPY):
            vars(module)[_COPY] = partial(_copy, weakref.ref(module))


def refuse_copies(model: nn.Module) -> None:
    """Undo `allow_copies`."""
    for module in model.modules():
        vars(module).pop(_COPY, None)


def _copy(reference: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module with its weights and the program's own hooks."""
    module = reference()
    assert module is not None  # it is being copied
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    for name, value in vars(module).items():
        if name != _COPY:
            vars(made)[name] = deepcopy(_without_engine_hooks(value), memo)
    return made


def _without_engine_hooks(value: Any) -> Any:
    """Return a dict of hooks without those of an engine; every other value unchanged."""
    if not isinstance(value, dict) or not any(map(_is_engine_hook, value.values())):
        return value
    kept = {key: each for key, each in value.items() if not _is_engine_hook(each)}
    return type(value)(kept)


def _is_engine_hook(value: Any) -> bool:
    # torch stores a hook that gets the module in an object with the attribute `hook`.
    return isinstance(getattr(value, "hook", value), Hook)
