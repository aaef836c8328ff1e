"""What autograd saves of gathered weights: a place, not the memory.

Most operators save a view of the weight (`weight.t()`), which would keep the gathered buffer alive until backward.
While a unit that is to be released runs its forward, these hooks save such views as (group, offset, size, stride) and
restore them from the buffer gathered for backward.  They save memory only: without them a saved view keeps its old
buffer and reads the same values.  Other tensors go to the hooks that were in force before (checkpoint, save_on_cpu)
or are kept as autograd would.  Called by runtime.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.device import outer_saved_tensor_hooks
from ..base.errors import UsageError
from .group import FlatGroup
from .unit import Unit


@dataclass(frozen=True)
class SavedWeight:
    """A view of a gathered buffer, by place."""

    group: FlatGroup
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SavedTensor:
    """Any other tensor, with the version it had: hooks switch autograd's own check for in-place changes off."""

    tensor: Tensor
    version: int


def weight_hooks(unit: Unit, fetch: Callable[[FlatGroup], object]) -> torch.autograd.graph.saved_tensors_hooks:
    """The hooks for one forward of a gathered unit. fetch(group) gathers the group's unit again if backward finds it
    at rest.
    """
    places = {
        group.full.storage.untyped_storage().data_ptr(): group for group in unit.sharded if group.full is not None
    }
    outer = outer_saved_tensor_hooks()

    def pack(tensor: Tensor) -> Any:
        group = places.get(tensor.untyped_storage().data_ptr())
        if group is not None and tensor.dtype == group.plan.weight.dtype:
            return SavedWeight(group, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if outer is not None:
            return outer[0](tensor)
        kept = tensor.detach()
        return SavedTensor(kept, kept._version)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, SavedWeight):
            if saved.group.full is None:
                fetch(saved.group)
            assert saved.group.full is not None
            return saved.group.full.storage.as_strided(saved.size, saved.stride, saved.offset)
        if outer is not None:
            return outer[1](saved)
        if saved.tensor._version != saved.version:
            raise UsageError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}, "
                f"expected {saved.version}.",
                f"It was saved for backward in unit '{unit.name}'.",
                "replace the in-place operation (x += ..., relu_(x)) by its out-of-place form.",
            )
        kept: Tensor = saved.tensor
        return kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
