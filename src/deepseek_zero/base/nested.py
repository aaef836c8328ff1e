"""Find, replace or cast the tensors in the arguments and outputs of modules.

`map_tensors` changes mappings and objects in place, because a module's output belongs to its
caller. `map_inputs` creates new containers, because a module's arguments belong to its caller.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Args = tuple[Any, ...]  # positional arguments
Kwargs = dict[str, Any]  # keyword arguments
Change = Callable[[Tensor], Tensor]
FLATTEN = "__tensor_flatten__"  # method of torch's protocol for tensor subclasses


def map_tensors(value: Any, change: Change) -> Any:
    """Replace each tensor in a value, changing mappings and objects in place.

    Modules are skipped. Objects that refer to themselves are visited once.

    Args:
        value: A tensor, or containers and objects with tensors.
        change: A function that returns the replacement of a tensor.

    Returns:
        `value`, or a new sequence or tensor if that is what changed.
    """
    return _map(value, change, {})


def _map(value: Any, change: Change, known: dict[int, Any]) -> Any:
    """Implement `map_tensors`.

    `known` maps the id of each visited object to its replacement, so cycles end and shared parts
    stay shared.
    """
    if isinstance(value, Tensor):
        return change(value)
    key = id(value)
    if key in known:
        return known[key]
    known[key] = value
    if isinstance(value, Mapping):
        known[key] = _map_mapping(value, change, known)
    elif isinstance(value, (list, tuple)):
        known[key] = _map_sequence(value, change, known)
    else:
        for name in _attribute_names(value):
            old = getattr(value, name)
            new = _map(old, change, known)
            if new is not old:
                object.__setattr__(value, name, new)
    return known[key]


def _map_mapping(value: Mapping[Any, Any], change: Change, known: dict[int, Any]) -> Any:
    """Return the mapping, changed in place, or a new one if it cannot be changed."""
    items = {key: _map(item, change, known) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return MappingProxyType(items)
    for key, item in changed.items():
        value[key] = item
    return value


def _map_sequence(value: Any, change: Change, known: dict[int, Any]) -> Any:
    """Return the list or tuple, or a new one of its type if a tensor was replaced."""
    items = [_map(item, change, known) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return _sequence_of(value, items)


def _attribute_names(value: Any) -> list[str]:
    """Return the attributes of an object that `map_tensors` visits."""
    if value is None or isinstance(value, (str, bytes, int, float, bool, type, nn.Module)):
        return []
    if is_dataclass(value):
        # A field without an initial value may be unset
        return [item.name for item in fields(value) if hasattr(value, item.name)]
    if type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
        return []
    return list(vars(value))


def all_tensors(value: Any, *, visits_objects: bool = True) -> list[Tensor]:
    """Return every tensor in a module's arguments or output, in order.

    Args:
        value: A tensor, or containers of tensors.
        visits_objects: Whether to visit the attributes of other objects too, as `map_tensors` does.

    Returns:
        The tensors, in the order in which they occur. A tensor that occurs twice is listed twice.
    """
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    visit = map_tensors if visits_objects else map_inputs
    visit(value, look)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor that requires a gradient in a module's output."""
    return [tensor for tensor in all_tensors(value) if tensor.requires_grad]


def is_of_integers(value: Any) -> bool:
    """Return whether a value is a tensor of integers. A boolean tensor is not, as it is a mask."""
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def once(change: Change) -> Change:
    """Return a function that calls `change` once for each tensor, and keeps its results."""
    known: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = change(tensor)
        return known[id(tensor)]

    return changed


def cast_inputs(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating-point tensor cast to a dtype.

    Args:
        value: A tensor, or usual containers of tensors. Other objects are returned unchanged.
        dtype: The dtype. None returns `value` unchanged.

    Returns:
        The same nested structure with the cast tensors.
    """
    if dtype is None:
        return value

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_inputs(value, cast)


def map_inputs(value: Any, change: Change) -> Any:
    """Return `value` with each tensor replaced, in new containers.

    Args:
        value: A tensor, or usual containers of tensors. Dataclasses and subclasses of containers
            are copied with their attributes. Other objects are returned unchanged.
        change: A function that returns the replacement of a tensor.

    Returns:
        The same nested structure with the replaced tensors.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_inputs(item, change) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, (list, tuple)):
        return _sequence_of(value, [map_inputs(item, change) for item in value])
    if is_dataclass(value) and not isinstance(value, type):
        made = copy(value)  # the constructor would reset the fields that it does not take
        for each in fields(value):
            if hasattr(value, each.name):
                inner = map_inputs(getattr(value, each.name), change)
                object.__setattr__(made, each.name, inner)
        return made
    return value


def _sequence_of(value: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the type of `value`, with its attributes and other items."""
    if type(value) in (list, tuple):
        return type(value)(items)
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, list):
        made = copy(value)
        made[:] = items
        return made
    try:
        found = tuple.__new__(type(value), items)
    except TypeError:  # a type of torch, such as torch.Size
        return type(value)(items)
    if hasattr(value, "__dict__"):
        vars(found).update(vars(value))
    return found


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `value`, or a plain dict if its type cannot be created."""
    if isinstance(value, (dict, UserDict)):
        made = copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, with tied parameters still tied."""
    memo = meta_parameters(model)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return deepcopy(model, memo)


def meta_parameters(model: nn.Module) -> dict[int, Any]:
    """Return a parameter on the meta device for each of a model's, by id, as a memo of `deepcopy`.

    Args:
        model: The model, which is not changed.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    return memo


def is_subclass(value: Any) -> bool:
    """Return whether a value is a tensor subclass that wraps other tensors, as torchao's do.

    The elements of such a tensor can be neither viewed nor cut.
    """
    return (
        isinstance(value, Tensor)
        and type(value) not in (Tensor, nn.Parameter)
        and hasattr(value, FLATTEN)
    )


def inner_tensors(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors of a tensor subclass by attribute name.

    The names of nested tensors are joined by dots.
    """
    found: dict[str, Tensor] = {}
    for name in getattr(value, FLATTEN)()[0]:
        inner = getattr(value, name)
        if is_subclass(inner):
            found |= {f"{name}.{path}": each for path, each in inner_tensors(inner).items()}
        else:
            found[name] = inner
    return found
