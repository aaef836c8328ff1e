"""Plain Python values and tensors as JSON, without pickle: what a manifest and a client_state may hold.

    None, bool, int, str, float, list, dict with text keys     themselves
    tuple, other dicts, inf and nan {"__tuple__": ...}, {"__items__": ...}, {"__float__": ...}
    tensor                                                     {"__tensor__": path}, the elements in a safetensors file

Called by save.py and load.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from .tensor_file import dtype_named

MARKS = ("__tuple__", "__items__", "__float__", "__tensor__", "__dtype__")


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON values; tensors are put into `tensors` under their path.  path: names the value in errors."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if type(value) in (Tensor, nn.Parameter):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"__tensor__": path}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{path}[{number}]", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold.",
        "Checkpoints hold plain values and tensors, so that reading one never runs code.",
        "save it as numbers, text, lists, dicts or tensors (vars(namespace), array.tolist(), torch.from_numpy(array)).",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if all(isinstance(key, str) and key not in MARKS for key in value):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        pairs.append([encode(key, f"key {key!r} of {path}", tensors), encode(item, f"{path}[{key!r}]", tensors)])
    return {"__items__": pairs}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tuple__": items}:
            return tuple(decode(item, tensors) for item in items)
        case {"__items__": pairs}:
            return {decode(key, tensors): decode(item, tensors) for key, item in pairs}
        case {"__float__": text}:
            return float(text)
        case {"__tensor__": path}:
            return tensors[path]
        case {"__dtype__": name}:
            return dtype_named(name)
    return {key: decode(item, tensors) for key, item in value.items()}
