"""What this rank really holds: bytes of live storages, found without asking our own registry."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.device import without_torch_function
from ..base.memory import segment_views
from ..base.quantities import unit_of

STATES = ("weight", "grad", "master", "moments", "buffers")  # in the order of tables and pictures


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank by state. `measured["other"]`: live storages that belong to no state
    (batches, client tensors).
    """

    predicted: Mapping[str, int]
    measured: Mapping[str, int]

    @property
    def predicted_total(self) -> int:
        return sum(self.predicted.values())

    @property
    def measured_total(self) -> int:
        """Without `other`, which is not ours."""
        return sum(count for state, count in self.measured.items() if state != "other")


def live_storages(device_type: str | None = None) -> dict[int, int]:
    """Address -> bytes of every storage that a Python tensor refers to.

    Shared pages count where they are written, on the rank whose slice they are, and not where they
    are only looked at.
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
                storage = tensor.untyped_storage()
                # Torch.compile leaves fake tensors, which claim a real device
                if storage.device.type == "meta":
                    continue
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    seen_only = segment_views()
    return {
        at: nbytes
        for at, nbytes in found.items()
        if not any(at in addresses for addresses in seen_only)
    }


def bytes_of(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages of these tensors that are not in `seen`; adds them to it."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.data_ptr():
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def moments_of(state: Mapping[object, Mapping[str, object]]) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    return [
        value
        for entry in state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one rank at one stage, by state, as the plan predicts them and as found in live
    storages.
    """

    stage: int
    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    measured_total: int

    @property
    def predicted_total(self) -> int:
        """Sum of the predicted states."""
        return sum(self.predicted.values())

    @property
    def difference(self) -> float:
        """(measured - predicted) / predicted."""
        return (self.measured_total - self.predicted_total) / max(self.predicted_total, 1)


def states_of(rows: Sequence[MemoryRow]) -> list[str]:
    """The states that take room in any row: the usual five first, others in order of appearance."""
    sizes = [
        item for row in rows for kind in (row.predicted, row.measured) for item in kind.items()
    ]
    found = {state: None for state, size in sizes if size}
    return [state for state in STATES if state in found] + [
        state for state in found if state not in STATES
    ]


def common_unit(rows: Sequence[MemoryRow]) -> tuple[float, str]:
    """Bytes in the unit that suits every row, and its name."""
    return unit_of(max((row.measured_total for row in rows), default=0))
