"""Saved-tensor hooks that save views of gathered weights by place, not by memory.

Most operators save a view of the weight (`weight.t()`), which would keep the gathered buffer alive
until backward. While a unit that will be released runs its forward, these hooks save such views as
(group, offset, size, stride) and restore them from the buffer that backward gathers. They only save
memory: without them a saved view keeps its old buffer and reads the same values. Other tensors are
saved as usual.

Inside the hooks of other packages (checkpoint, save_on_cpu) all tensors are passed on to those
hooks. Checkpoint saves nothing anyway, but counts the tensors that it sees, so a missing weight
would make the recomputation seem to differ. The weights of a tile are the exception, also when the
tile is recomputed: a recomputed layer would otherwise keep all its tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.device import Pack, Unpack, outer_saved_tensor_hooks, version_of
from ..base.errors import UsageError
from .param_group import ParamGroup
from .unit import Unit

Fetch = Callable[[ParamGroup], object]


@dataclass(frozen=True)
class SavedWeight:
    """A saved view of a gathered weight, without the memory of the weight.

    Attributes:
        group: The group of the weight.
        fetch: Gathers the group's unit if backward finds it sharded.
        size: The size of the view.
        stride: The stride of the view.
        offset: The storage offset of the view.
    """

    group: ParamGroup
    fetch: Fetch
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor that is not a view of a gathered weight, with its version.

    The version is needed because hooks disable autograd's own check for in-place changes.

    Attributes:
        tensor: The tensor, detached.
        version: The version of the tensor when it was saved.
        unit: The name of the unit, used in error messages.
    """

    tensor: Tensor
    version: int
    unit: str


@dataclass(frozen=True)
class SavedByOthers:
    """A saved tensor that the saved-tensor hooks of another package have packed.

    Attributes:
        packed: The object that the other package's hook returned.
        restore: Unpacks it.
    """

    packed: Any
    restore: Unpack


Saved = SavedWeight | SavedTensor | SavedByOthers


class WeightHooks:
    """The saved-tensor hooks of one forward of a gathered unit.

    Args:
        unit: The unit whose weights are gathered.
        fetch: Gathers a group's unit if backward finds it sharded.
        outer: The hooks of the surrounding unit, if any.
        others: The hooks of another package, if any.

    Attributes:
        unit: The name of the unit.
        fetch: Gathers a group's unit.
        outer: The hooks of the surrounding unit, if any.
        others: The hooks of another package, if any.
        places: The gathered parameter groups, by the address of their storage.
    """

    def __init__(
        self,
        unit: Unit,
        fetch: Fetch,
        outer: WeightHooks | None,
        others: tuple[Pack, Unpack] | None = None,
    ) -> None:
        self.unit = unit.name
        self.fetch = fetch
        self.outer = outer
        self.others = others
        self.places = {
            group.unsharded.memory.untyped_storage().data_ptr(): group
            for group in unit.sharded
            if group.unsharded is not None
        }

    def pack(self, tensor: Tensor) -> Saved:
        """Return the object that autograd saves in place of a tensor.

        A view of a gathered weight is saved as group, offset, size and stride. Backward restores it
        from the weight that is gathered then.

        Args:
            tensor: The tensor that an operator saves for backward.
        """
        group = self.places.get(tensor.untyped_storage().data_ptr())
        if group is not None and tensor.dtype == group.plan.weight.dtype:
            return SavedWeight(
                group, self.fetch, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )
        if self.outer is not None:
            return self.outer.pack(tensor)
        if self.others is not None:
            pack, restore = self.others
            return SavedByOthers(pack(tensor), restore)
        kept = tensor.detach()
        return SavedTensor(kept, version_of(kept), self.unit)

    def unpack(self, saved: Saved) -> Tensor:
        """Return the tensor that `pack` replaced; gather the weight again if necessary.

        Raises:
            UsageError: The tensor was changed in place after it was saved.
        """
        if isinstance(saved, SavedByOthers):
            return saved.restore(saved.packed)
        if isinstance(saved, SavedWeight):
            if saved.group.unsharded is None:
                saved.fetch(saved.group)
            assert saved.group.unsharded is not None
            return saved.group.unsharded.memory.as_strided(saved.size, saved.stride, saved.offset)
        if version_of(saved.tensor) != saved.version:
            raise UsageError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(saved.tensor.shape)} is at version "
                f"{version_of(saved.tensor)}, expected {saved.version}.",
                f"It was saved for backward in unit '{saved.unit}'.",
                "replace the in-place operation (x += ..., relu_(x)) by its out-of-place form.",
            )
        return saved.tensor


def _ours_in_force() -> WeightHooks | None:
    top = outer_saved_tensor_hooks()
    outer = getattr(top[0], "__self__", None) if top is not None else None
    return outer if isinstance(outer, WeightHooks) else None


def others_see() -> bool:
    """Return whether saved-tensor hooks of another package are active, such as checkpointing."""
    return outer_saved_tensor_hooks() is not None and _ours_in_force() is None


def weight_hooks(unit: Unit, fetch: Fetch) -> AbstractContextManager[Any]:
    """Return the context manager for one forward of a gathered unit.

    It does nothing inside the hooks of other packages, unless the unit is a tile.

    Args:
        unit: The unit whose weights may be saved.
        fetch: Gathers a group's unit if backward finds it sharded.
    """
    if others_see() and not unit.is_layer_tile:
        return nullcontext()
    ours = _ours_in_force()
    others = outer_saved_tensor_hooks() if ours is None else None
    hooks = WeightHooks(unit, fetch, ours, others)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
