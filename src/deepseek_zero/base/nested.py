"""Walks what modules take and return, to find, change or cast the tensors in it.

`map_tensors` changes mappings and objects in place, since what a module returns is its caller's;
`map_inputs` makes new containers, since what a module is given stays its caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor replaced by change(tensor).  Mappings and objects are changed in
    place: callers own them.  Modules are not outputs and are passed over; an object that holds
    itself is walked once.
    """
    return _map(value, change, {})


def _map(value: Any, change: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    """known: id -> what stands for an object that was met before, so that cycles end and shared
    parts stay shared.
    """
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


def _map_mapping(
    value: Mapping[Any, Any], change: Callable[[Tensor], Tensor], known: dict[int, Any]
) -> Any:
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
    return (
        list(vars(value))
        if type(value).__module__ != "builtins" and hasattr(value, "__dict__")
        else []
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor that requires a gradient in what a module returned."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found


def cast_inputs(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating tensor in it cast to dtype; walk usual containers, keep
    others.
    """
    if dtype is None:
        return value

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_inputs(value, cast)


def map_inputs(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with change(tensor) for every tensor in it, in new containers: the caller's
    stay as they are.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_inputs(item, change) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, (list, tuple)):
        changed = [map_inputs(item, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: map_inputs(getattr(value, f.name), change) for f in fields(value) if f.init
        }
        return replace(value, **changes)
    return value


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values: parameters and buffers are on the meta device, ties
    stay.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return deepcopy(model, memo)
