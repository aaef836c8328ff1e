"""Optimizer states that are tensor subclasses made of plain tensors.

Examples are torchao's 8-bit and 4-bit states.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_subclass(value: Any) -> bool:
    """Return whether a value is a tensor that wraps others.

    Its elements cannot be viewed or cut.
    """
    return (
        isinstance(value, Tensor)
        and type(value) not in (Tensor, nn.Parameter)
        and hasattr(value, FLATTEN)
    )


FLATTEN = "__tensor_flatten__"  # torch's protocol for such classes


def inner_tensors(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors of which a subclass is made, by attribute ("codes").

    The key of a nested tensor is its path.
    """
    found: dict[str, Tensor] = {}
    for name in getattr(value, FLATTEN)()[0]:
        inner = getattr(value, name)
        if is_subclass(inner):
            found |= {f"{name}.{path}": each for path, each in inner_tensors(inner).items()}
        else:
            found[name] = inner
    return found
