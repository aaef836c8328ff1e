"""What autograd saves of gathered weights: a place, not the memory.

Most operators save a view of the weight (`weight.t()`), which would keep the gathered buffer alive
until backward. While a unit that is to be released runs its forward, these hooks save such views as
(group, offset, size, stride) and restore them from the buffer gathered for backward.  They save
memory only: without them a saved view keeps its old buffer and reads the same values.  Other
tensors are kept as autograd would.  Where hooks of others are in force (checkpoint, save_on_cpu)
everything goes to them: checkpoint saves nothing anyway, and counts what it sees, so a weight taken
out of its sight would make the recomputation seem to differ.  A tile's weights are taken out of it
all the same,
when it is recomputed too: a recomputed layer would otherwise keep all its tiles.
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
    """A view of a gathered buffer, saved as its position.

    `fetch(group)` gathers the group's unit if backward finds it sharded.
    """

    group: ParamGroup
    fetch: Fetch
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SavedTensor:
    """Any other tensor, with its version.

    The version is checked here, because hooks disable autograd's own check for in-place changes.
    """

    tensor: Tensor
    version: int
    unit: str


@dataclass(frozen=True)
class SavedByOthers:
    """Any other tensor if hooks of another package are active.

    It has the result of these hooks, and the function that converts it to a tensor again.
    """

    packed: Any
    restore: Unpack


Saved = SavedWeight | SavedTensor | SavedByOthers


class WeightHooks:
    """The hooks for one forward of a gathered unit.

    `outer` are the hooks of the enclosing unit, and `others` those of another package.
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
    """Return whether what autograd saves now goes to hooks of others (checkpoint, save_on_cpu)."""
    return outer_saved_tensor_hooks() is not None and _ours_in_force() is None


def weight_hooks(unit: Unit, fetch: Fetch) -> AbstractContextManager[Any]:
    """Return the context for one forward of a gathered unit.

    It does nothing inside hooks of other packages, except for a tile.
    """
    if others_see() and not unit.is_tile:
        return nullcontext()
    ours = _ours_in_force()
    others = outer_saved_tensor_hooks() if ours is None else None
    hooks = WeightHooks(unit, fetch, ours, others)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
