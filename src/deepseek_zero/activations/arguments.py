"""The tensors among a function's arguments: found, taken out, and put back.  Called by recompute.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST_BYTES = 4096  # of a tensor that is worth a place


@dataclass(frozen=True)
class Slot:
    """Stands where a tensor was."""

    number: int


def is_activation(value: Any) -> bool:
    """Whether parking a value frees memory: a plain tensor that something computed, and that backward goes through.

    Parameters, leaves and what needs no gradient (batches, masks) are held by others in any case; several checkpoints
    often share them.
    """
    return (
        type(value) is Tensor
        and value.requires_grad
        and not value.is_leaf
        and value.layout is torch.strided
        and value.nbytes >= SMALLEST_BYTES
        and not value.is_conj()
        and not value.is_neg()
    )


def extract_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """`value` with a slot in place of each activation, and the activations."""
    found: list[Tensor] = []

    def change(leaf: Any) -> Any:
        if not is_activation(leaf):
            return leaf
        found.append(leaf)
        return Slot(len(found) - 1)

    return replaced(value, change), found


def insert_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `extract_tensors`."""
    return replaced(value, lambda leaf: tensors[leaf.number] if isinstance(leaf, Slot) else leaf)


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with change(leaf) for each leaf of its tuples, lists and dicts.

    A container in which nothing changed stays the same object: a function may fill a list that it is given.
    """
    if type(value) is dict:
        items = {key: replaced(item, change) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [replaced(item, change) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value)
