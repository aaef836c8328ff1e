"""Run the inner optimizer over tiles of main weight shards.

`TilePrefetcher` fetches the states of the next tiles during the update of a tile, and stores the
states of earlier tiles in the background. `MasterShard` and `Moments` load and store the values.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.meter import PhaseClock
from ..base.progress import FirstWork
from ..precision.compact import StochasticRounding
from .inner_step import Hypers, InnerStep
from .master_shard import GradSource, MasterShard, Tile, collected
from .moments import Moments
from .offloaded_states import evict_staged, prefetch
from .one_pass import GroupUpdate, OnePass
from .param_overlap import random_bits
from .tile_memory import PrefetchSettings, Scratch
from .update_guard import UpdateGuard


@dataclass(frozen=True)
class Decision:
    """How gradients are applied: the factor of clipping and unscaling, and hyper-parameters.

    Attributes:
        factor: Factor by which gradients are multiplied.
        number: Number of the update, which seeds stochastic rounding.
        hypers: Hyper-parameters of the update; None for the current ones.
        source: A function that returns the reduced gradient of a parameter group.
        groups: How kernels update the shards of each parameter group, by its index.
    """

    factor: float
    number: int
    hypers: Hypers | None = None
    source: GradSource = collected
    groups: dict[int, GroupUpdate | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )


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
        rest = Tile()  # shards that the optimizer's own step updates
        shown = list[MasterShard]()
        chance = StochasticRounding(decision.number)
        done = False
        try:
            for number, shard in tile:
                grad = shard.grad(decision.source)
                group = self._group(number, decision)
                if self.one_pass.update_shard(
                    shard, grad, group, self.moments, decision.factor, chance
                ):
                    continue
                rest.append((number, shard))
                if grad is None:
                    continue
                shard.load_values(self.scratch)
                self.moments.load(shard)
                shown.append(shard)
                shard.param.grad = self._scaled(shard, grad, decision.factor)
            if rest:
                self._inner_step.run(rest, shown, decision.hypers)
            # Kernels write one canonical NaN, so the optimizer's own NaNs are replaced by it.
            for number, shard in rest:
                self.one_pass.settle(shard.param, self._group(number, decision))
            done = True
        finally:
            for shard in shown:
                is_rounded = done and shard.master.is_rounded
                random = random_bits(shard, chance, "weight") if is_rounded else None
                shard.store_values(self.scratch, random, keep=done)
                self.moments.store(shard, chance, keep=done)
                shard.param.grad = None

    def _group(self, number: int, decision: Decision) -> GroupUpdate | None:
        """Return the kernel settings of a parameter group, or None without a kernel."""
        if number not in decision.groups:
            hypers = self.inner.param_groups if decision.hypers is None else decision.hypers
            decision.groups[number] = self.one_pass.group(hypers[number])
        return decision.groups[number]

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
