"""Measure the memory of this rank from live storages, independently of the engine."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.device import without_torch_function
from ..base.memory import segment_views
from ..base.quantities import format_bytes

OTHER = "other"


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank by state, predicted and measured; `print` prints a table.

    `measured["other"]` counts live storages that belong to no state, such as batches and tensors of
    the caller.
    """

    predicted: Mapping[str, int]
    measured: Mapping[str, int]

    @property
    def predicted_total(self) -> int:
        """Return the sum of the predicted states."""
        return sum(self.predicted.values())

    @property
    def measured_total(self) -> int:
        """Return the sum without "other"."""
        return sum(count for state, count in self.measured.items() if state != OTHER)

    def table(self) -> list[str]:
        """Return the lines of a table with a row per state that has bytes, and the totals."""
        states = dict.fromkeys([*self.predicted, *self.measured])
        states.pop(OTHER, None)
        lines = ["memory of this rank", _row("state", "predicted", "measured")]
        for state in states:
            predicted = self.predicted.get(state, 0)
            measured = self.measured.get(state, 0)
            if predicted or measured:
                lines.append(_row(state, format_bytes(predicted), format_bytes(measured)))
        totals = (format_bytes(self.predicted_total), format_bytes(self.measured_total))
        lines.append(_row("total", *totals))
        other = self.measured.get(OTHER, 0)
        if other:
            lines.append(_row("other tensors", "-", format_bytes(other)))
        return lines

    def __str__(self) -> str:
        return "\n".join(self.table())


def _row(state: str, predicted: str, measured: str) -> str:
    return f"  {state:<16} {predicted:>12} {measured:>12}"


def live_storages(device_type: str | None = None) -> dict[int, int]:
    """Return the address and size in bytes of every storage that a Python tensor uses.

    Shared pages count on the rank that owns the slice and writes them, not on ranks that only read
    them. Sparse tensors, whose storages no Python tensor uses, are not counted.
    """
    gc.collect()
    found: dict[int, int] = {}
    with without_torch_function():
        for value in gc.get_objects():
            if not issubclass(type(value), Tensor):
                continue
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is None or tensor.device.type != (device_type or tensor.device.type):
                    continue
                try:
                    storage = tensor.untyped_storage()
                    # torch.compile leaves fake tensors, which report a real device
                    if storage.device.type != "meta":
                        found[storage.data_ptr()] = storage.nbytes()
                except RuntimeError:  # a sparse or nested tensor, or a wrapper of other tensors
                    continue
    found.pop(0, None)
    seen_only = segment_views()
    return {
        at: nbytes
        for at, nbytes in found.items()
        if not any(at in addresses for addresses in seen_only)
    }


def bytes_of(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of these tensors' storages that are not in `seen`.

    Args:
        tensors: Tensors whose storages are counted.
        seen: Addresses of counted storages; new ones are added.
    """
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.data_ptr():
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def moments_of(state: Mapping[object, Mapping[str, object]]) -> list[Tensor]:
    """Return the tensors in an optimizer's state."""
    return [
        value
        for entry in state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
