"""Optimizer states that are tensor subclasses made of plain tensors.

Examples are the 8-bit and 4-bit states of torchao.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_subclass(value: Any) -> bool:
    """Return whether a value is a tensor subclass that wraps other tensors.

    The elements of such a tensor can be neither viewed nor cut.
    """
    return (
        isinstance(value, Tensor)
        and type(value) not in (Tensor, nn.Parameter)
        and hasattr(value, FLATTEN)
    )


FLATTEN = "__tensor_flatten__"  # method of torch's protocol for tensor subclasses


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
