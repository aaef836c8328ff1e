"""Convert numpy arrays and scalars to plain values and a tensor of bytes.

Reading the plain form never executes code:

    {"__ndarray__": tensor of bytes or None, "dtype": numpy's description, "shape": [...],
    "is_scalar": bool}

The bytes are in C order. Byte order and fields are part of the description. Arrays of Python
objects cannot be stored.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

Plain = dict[str, Any]  # values by name, which a manifest or a state dict holds
ARRAY = "__ndarray__"
_KEYS = {ARRAY, "dtype", "shape", "is_scalar"}


def is_storable(value: Any) -> bool:
    """Return whether a value is a numpy array or scalar that can be stored.

    Subclasses such as masked arrays and arrays of objects cannot.
    """
    if not isinstance(value, np.generic) and type(value) not in (np.ndarray, np.memmap):
        return False
    return not value.dtype.hasobject


def to_plain(value: Any) -> Plain:
    """Return the plain form of a numpy array or scalar that `is_storable` accepts."""
    data = np.frombuffer(bytearray(value.tobytes()), np.uint8)
    return {
        ARRAY: torch.from_numpy(data) if data.size else None,
        "dtype": np.lib.format.dtype_to_descr(value.dtype),
        "shape": list(value.shape),
        "is_scalar": isinstance(value, np.generic),
    }


def from_plain(value: Mapping[str, Any]) -> Any:
    """Return the array or scalar that was passed to `to_plain`.

    Raises:
        ValueError: The description does not match the number of bytes.
    """
    dtype = np.lib.format.descr_to_dtype(value["dtype"])
    shape = tuple(int(size) for size in value["shape"])
    data = value[ARRAY]
    content = data.contiguous().numpy().tobytes() if isinstance(data, Tensor) else b""
    if dtype.hasobject or prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {len(content)} bytes, dtype {dtype} and shape {shape}")
    found = np.frombuffer(bytearray(content), dtype).reshape(shape)
    return found[()] if value["is_scalar"] else found


def all_to_plain(value: Any) -> Any:
    """Return nested containers with numpy arrays and scalars in their plain form."""
    if is_storable(value):
        return to_plain(value)
    return _inside(value, all_to_plain)


def all_from_plain(value: Any) -> Any:
    """Return nested containers with the numpy arrays that `all_to_plain` replaced."""
    if isinstance(value, Mapping) and value.keys() == _KEYS:
        return from_plain(value)
    return _inside(value, all_from_plain)


def with_python_numbers(value: Any) -> Any:
    """Return nested containers with numpy scalars replaced by Python numbers."""
    if isinstance(value, np.generic) and is_storable(value):
        return value.item()
    return _inside(value, with_python_numbers)


def _inside(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    if type(value) is Namespace:
        return Namespace(**_inside(vars(value), change))
    return value
