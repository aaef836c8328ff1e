"""Run the inner optimizer over tiles of main weight shards.

`TilePrefetcher` fetches the states of the next tiles during the update of a tile, and stores the
states of earlier tiles in the background. `MasterShard` and `Moments` load and store the values.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.meter import PhaseClock
from ..base.progress import FirstWork
from ..precision.compact import StochasticRounding
from .inner_step import Decision, InnerStep
from .master_shard import MasterShard, Tile
from .moments import Moments
from .offloaded_states import evict_staged, prefetch
from .one_pass import OnePass
from .param_overlap import random_bits
from .tile_memory import PrefetchSettings, Scratch
from .update_guard import UpdateGuard


class Updater:
    """Runs the inner optimizer over lists of shards (tiles), and moves offloaded states.

    Args:
        inner: The optimizer that computes updates.
        scratch: The buffers that all tiles share.
        moments: Stores the moments of `inner`.
        settings: How many tiles may be in transfer at the same time.
        clock: Measures the time spent on updates.
        numel: The number of elements of all shards.
    """

    def __init__(
        self,
        inner: Optimizer,
        scratch: Scratch,
        moments: Moments,
        settings: PrefetchSettings,
        clock: PhaseClock,
        numel: int,
    ) -> None:
        self.inner = inner
        self.scratch = scratch
        self.moments = moments
        self.settings = settings
        self.guard = UpdateGuard(clock)
        self.one_pass = OnePass(inner)
        self._inner_step = InnerStep(inner)
        self.updates = 0  # number of decided updates
        self.has_run = False  # whether the optimizer has created its states
        # It may be slow, because it touches the memory of the states for the first time
        self._first_update = FirstWork("first update", numel, "parameters")

    def step_now(self, tiles: Sequence[Tile], decision: Decision) -> Generator[Tile, None, None]:
        """Update tiles one after another, and yield each after its update."""
        flow = prefetch(tiles, decision.source, self.moments, self.settings)
        done = 0
        try:
            while (tile := flow.next()) is not None:
                self.update(tile, decision)
                flow.release(tile)
                done += 1
                yield tile
        except (Exception, GeneratorExit):  # GeneratorExit: the caller failed between two tiles
            self.guard.record_failure(tiles, done)
            evict_staged(tiles, decision.source)
            raise

    def update(self, tile: Tile, decision: Decision) -> None:
        """Update the shards of one tile, whose states have been fetched."""
        self._first_update.begin()
        with self.guard.busy():
            self._update(tile, decision)
        self._first_update.advance(sum(shard.numel for _, shard in tile))

    def _update(self, tile: Tile, decision: Decision) -> None:
        """Update a tile by kernels, or else by the inner optimizer's own step."""
        rest = self.one_pass.update_tile(tile, decision, self.moments)
        chance = StochasticRounding(decision.number)
        shown = list[MasterShard]()
        done = False
        try:
            for _, shard in rest:
                grad = shard.grad(decision.source)
                if grad is None:
                    continue
                shard.load_values(self.scratch)
                self.moments.load(shard)
                shown.append(shard)
                shard.param.grad = self._scaled(shard, grad, decision.factor)
            if rest:
                self._inner_step.run(rest, shown, decision.hypers)
            self.one_pass.settle_tile(rest, decision)
            done = True
        finally:
            for shard in shown:
                is_rounded = done and shard.master.is_rounded
                random = random_bits(shard, chance, "weight") if is_rounded else None
                shard.store_values(self.scratch, random, keep=done)
                self.moments.store(shard, chance, keep=done)
                shard.param.grad = None

    def _scaled(self, shard: MasterShard, grad: Tensor, factor: float) -> Tensor:
        """Return a gradient times a factor, in the dtype and on the device of the update."""
        dtype = shard.param.dtype
        home = shard.master.update_device
        is_alike = grad.dtype == dtype and grad.device == home
        if is_alike and factor == 1.0:
            return grad
        buffer = self.scratch.take("grads", dtype, home)
        scaled = buffer[shard.at : shard.at + shard.numel].view(grad.shape)
        if is_alike:
            return torch.mul(grad, factor, out=scaled)
        scaled.copy_(grad)
        return scaled if factor == 1.0 else scaled.mul_(factor)
