"""Walks what a module returns, to find or replace its tensors: tuples, lists, mappings, dataclasses, plain objects,
None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor replaced by change(tensor).  Mappings and objects are changed in place: callers own
    them.  Modules are not outputs and are passed over; an object that holds itself is walked once.
    """
    return _map(value, change, {})


def _map(value: Any, change: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    """known: id -> what stands for an object that was met before, so that cycles end and shared parts stay shared."""
    if isinstance(value, Tensor):
        return change(value)
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Mapping):
        known[id(value)] = value
        known[id(value)] = _map_mapping(value, change, known)
    elif isinstance(value, (list, tuple)):
        known[id(value)] = value
        known[id(value)] = _map_sequence(value, change, known)
    elif names := _attribute_names(value):
        known[id(value)] = value
        for name in names:
            old = getattr(value, name)
            new = _map(old, change, known)
            if new is not old:
                object.__setattr__(value, name, new)
    return known.get(id(value), value)


def _map_mapping(value: Mapping[Any, Any], change: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    items = {key: _map(item, change, known) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return MappingProxyType(items)
    for key, item in changed.items():
        value[key] = item
    return value


def _map_sequence(value: Any, change: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    items = [_map(item, change, known) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _attribute_names(value: Any) -> list[str]:
    if value is None or isinstance(value, (str, bytes, int, float, bool, type, nn.Module)):
        return []
    if is_dataclass(value):
        return [item.name for item in fields(value)]
    return list(vars(value)) if type(value).__module__ != "builtins" and hasattr(value, "__dict__") else []


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor that requires a gradient in what a module returned."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found
