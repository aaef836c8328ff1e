"""Call an optimizer for the shards of one tile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch.optim import Optimizer

from ..optimizers.plain_steps import raw_step
from ..precision.policy import settle_update
from .master_shard import GradSource, MasterShard, Tile, collected
from .param_groups import Hypers, with_hypers


@dataclass(frozen=True)
class Decision:
    """How gradients are applied: the factor of clipping and unscaling, and hyper-parameters.

    Attributes:
        factor: Factor by which gradients are multiplied.
        number: Number of the update, which seeds stochastic rounding.
        hypers: Hyper-parameters of the update; None for the current ones.
        source: A function that returns the reduced gradient of a parameter group.
    """

    factor: float
    number: int
    hypers: Hypers | None = None
    source: GradSource = collected


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
            with nullcontext() if hypers is None else with_hypers(self.inner, hypers):
                self._step(part)
        groups = self.inner.param_groups if hypers is None else hypers
        for number, shard in tile:
            settle_update(self.inner, groups[number], shard.param)

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

    def _step(self, tile: Tile) -> None:
        """Call the inner optimizer once for the shards of a tile."""
        groups = self.inner.param_groups
        before = [group["params"] for group in groups]
        try:
            for number, group in enumerate(groups):
                group["params"] = [shard.param for owner, shard in tile if owner == number]
            raw_step(self.inner)()
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params
