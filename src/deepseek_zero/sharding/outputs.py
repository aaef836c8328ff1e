"""Walks what a module returns, to find or replace its tensors: tuples, lists, mappings, dataclasses, plain objects,
None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor replaced by change(tensor).  Mappings and objects are changed in place: callers own
    them.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        for key in list(value):
            new = map_tensors(value[key], change)
            if new is not value[key]:
                value[key] = new  # type: ignore[index]
        return value
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    names = _attribute_names(value)
    for name in names:
        old = getattr(value, name)
        new = map_tensors(old, change)
        if new is not old:
            object.__setattr__(value, name, new)
    return value


def _attribute_names(value: Any) -> list[str]:
    if value is None or isinstance(value, (str, bytes, int, float, bool, type)):
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
