"""Call an optimizer for the shards of one tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ..optimizers.plain_steps import raw_step
from .master_shard import MasterShard, Tile

Hypers = list[dict[str, Any]]  # the options of each parameter group, without its parameters


class InnerStep:
    """Runs the inner optimizer's own step, with the shards of a tile as its parameters.

    Args:
        inner: The optimizer that computes updates.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def run(self, tile: Tile, with_gradient: Sequence[MasterShard], hypers: Hypers | None) -> None:
        """Update the shards of a tile.

        Args:
            tile: The shards and the numbers of their parameter groups.
            with_gradient: The shards of the tile that have a gradient.
            hypers: The hyper-parameters of the update; None for the current ones.
        """
        for part in self._alike(tile, with_gradient):
            self._step(part, hypers)

    def _alike(self, tile: Tile, with_gradient: Sequence[MasterShard]) -> list[Tile]:
        """Split a tile into shards with and without optimizer state.

        Shards that were unfrozen later have no state yet. PyTorch's fused SGD does not accept both
        in one call.
        """
        new = {id(shard) for shard in with_gradient if not self.inner.state.get(shard.param)}
        if not new or len(new) == len(with_gradient):
            return [tile]
        return [
            [item for item in tile if (id(item[1]) in new) is is_new] for is_new in (False, True)
        ]

    def _step(self, tile: Tile, hypers: Hypers | None) -> None:
        """Call the inner optimizer once for the shards of a tile."""
        groups = self.inner.param_groups
        before = [dict(group) for group in groups]
        given = hypers or [{} for _ in groups]
        try:
            for number, group in enumerate(groups):
                group.update(given[number])
                group["params"] = [shard.param for owner, shard in tile if owner == number]
            raw_step(self.inner)()
        finally:
            for group, earlier, values in zip(groups, before, given, strict=True):
                group["params"] = earlier["params"]
                for key, value in values.items():
                    if group[key] is value:  # keep what the optimizer itself changed
                        group[key] = earlier[key]
