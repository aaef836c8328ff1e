"""Call an optimizer for the shards of one tile."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from torch.optim import Optimizer

from ..optimizers.plain_steps import raw_step, split_by_state
from ..precision.policy import settle_update
from .master_shard import GradSource, Tile, collected
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


def run_inner(inner: Optimizer, tile: Tile, hypers: Hypers | None) -> None:
    """Update the shards of a tile by an optimizer's own step.

    Args:
        inner: The optimizer that computes updates.
        tile: The shards and the numbers of their parameter groups.
        hypers: The hyper-parameters of the update; None for the current ones.
    """
    for part in split_by_state(inner, tile):
        with nullcontext() if hypers is None else with_hypers(inner, hypers):
            _step(inner, part)
    groups = inner.param_groups if hypers is None else hypers
    for number, shard in tile:
        settle_update(inner, groups[number], shard.param)


def _step(inner: Optimizer, tile: Tile) -> None:
    """Call the inner optimizer once, with the shards of a tile as its parameters."""
    groups = inner.param_groups
    before = [group["params"] for group in groups]
    try:
        for number, group in enumerate(groups):
            group["params"] = [shard.param for owner, shard in tile if owner == number]
        raw_step(inner)()
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params
