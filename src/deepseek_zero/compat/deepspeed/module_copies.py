"""Copies of the modules of a wrapped model, by `copy.deepcopy`, `pickle` and `torch.save`."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn

from ...sharding.hooks import Hook

_GET_STATE = "__getstate__"


def allow_copies(model: nn.Module) -> None:
    """Make copies of a wrapped model or submodule modules without engine.

    The weights must be whole on every rank, as at stages 0 to 2.

    Args:
        model: The wrapped model.
    """
    for module in model.modules():
        vars(module)[_GET_STATE] = partial(_state, weakref.ref(module))


def refuse_copies(model: nn.Module) -> None:
    """Undo `allow_copies`."""
    for module in model.modules():
        vars(module).pop(_GET_STATE, None)


def _state(reference: weakref.ref[nn.Module]) -> Any:
    """Return the state by which a module is copied, with the program's own hooks only."""
    module = reference()
    assert module is not None  # it is being copied
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state
    return {
        name: _without_engine_hooks(value) for name, value in state.items() if name != _GET_STATE
    }


def _without_engine_hooks(value: Any) -> Any:
    """Return a dict of hooks without those of an engine; every other value unchanged."""
    if not isinstance(value, dict) or not any(map(_is_engine_hook, value.values())):
        return value
    kept = {key: each for key, each in value.items() if not _is_engine_hook(each)}
    return type(value)(kept)


def _is_engine_hook(value: Any) -> bool:
    # torch stores a hook that gets the module in an object with the attribute `hook`.
    return isinstance(getattr(value, "hook", value), Hook)
