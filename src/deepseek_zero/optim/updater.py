"""Run the inner optimizer over tiles of main weight shards.

`ShardSet` attaches to an `Updater` what some shards need: kernels, and other memories of states.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.progress import FirstWork
from ..precision.compact import StochasticRounding
from .inner_step import Decision, run_inner
from .master_shard import MasterShard, Tile
from .moments import Moments
from .param_overlap import random_bits
from .scratch import Scratch
from .update_guard import UpdateGuard

Update = Callable[[Tile, Decision], None]


def in_turn(tiles: Sequence[Tile], decision: Decision, update: Update) -> Iterator[Tile]:
    """Update tiles one after another, and yield each after its update."""
    for tile in tiles:
        update(tile, decision)
        yield tile


class Updater:
    """Runs the inner optimizer over lists of shards (tiles).

    Args:
        inner: The optimizer that computes updates.
        scratch: The buffers that all tiles share.
        numel: The number of elements of all shards.

    Attributes:
        in_turn: Updates tiles in order. If some states are in other memories, it also moves them.
        kernels: Functions that update some shards of a tile, and return the others.
        stored: Stores moments in other memories or formats; empty if `inner` keeps them all.
    """

    def __init__(self, inner: Optimizer, scratch: Scratch, numel: int) -> None:
        self.inner = inner
        self.scratch = scratch
        self.guard = UpdateGuard()
        self.in_turn: Callable[[Sequence[Tile], Decision, Update], Iterator[Tile]] = in_turn
        self.kernels: list[Callable[[Tile, Decision], Tile]] = []
        self.stored: list[Moments] = []
        self.updates = 0  # number of decided updates
        # It may be slow, because it touches the memory of the states for the first time
        self._first_update = FirstWork("first update", numel, "parameters")

    def step_now(self, tiles: Sequence[Tile], decision: Decision) -> Generator[Tile, None, None]:
        """Update tiles one after another, and yield each after its update."""
        done = 0
        try:
            for tile in self.in_turn(tiles, decision, self.update):
                done += 1
                yield tile
        except (Exception, GeneratorExit):  # GeneratorExit: the caller failed between two tiles
            self.guard.record_failure(tiles, done)
            raise

    def update(self, tile: Tile, decision: Decision) -> None:
        """Update the shards of one tile, whose states have been fetched."""
        self._first_update.begin()
        with self.guard.busy():
            self._update(tile, decision)
        self._first_update.advance(sum(shard.numel for _, shard in tile))

    def _update(self, tile: Tile, decision: Decision) -> None:
        """Update a tile by kernels, or else by the inner optimizer's own step."""
        rest = tile
        for kernel in self.kernels:
            rest = kernel(rest, decision)
        chance = StochasticRounding(decision.number)
        shown = list[MasterShard]()
        done = False
        try:
            for _, shard in rest:
                grad = shard.grad(decision.source)
                if grad is None:
                    continue
                shard.load_values(self.scratch)
                for moments in self.stored:
                    moments.load(shard)
                shown.append(shard)
                shard.param.grad = self._scaled(shard, grad, decision.factor)
            if rest:
                run_inner(self.inner, rest, decision.hypers)
            done = True
        finally:
            for shard in shown:
                is_rounded = done and shard.master.is_rounded
                random = random_bits(shard, chance, "weight") if is_rounded else None
                shard.store_values(self.scratch, random, keep=done)
                for moments in self.stored:
                    moments.store(shard, chance, keep=done)
                shard.group.comm_ctx.tiers.budget.count_states(
                    shard, shard.names, self.inner.state.get(shard.param)
                )
                shard.param.grad = None

    def _scaled(self, shard: MasterShard, grad: Tensor, factor: float) -> Tensor:
        """Return a gradient times a factor, in the dtype and on the device of the update."""
        is_alike = grad.dtype == shard.param.dtype and grad.device == shard.master.update_device
        if is_alike and factor == 1.0:
            return grad
        scaled = shard.part_of(self.scratch, "grads").view(grad.shape)
        if is_alike:
            return torch.mul(grad, factor, out=scaled)
        scaled.copy_(grad)
        return scaled if factor == 1.0 else scaled.mul_(factor)
