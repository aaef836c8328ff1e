"""Run the inner optimizer over tiles of main weight shards.

An update takes these steps. planner/update.py cuts the shards into `Tiles`, which are lists of
`MasterShard`. `TilePrefetcher` fetches the states of the next tiles during the update of a tile,
and stores the states of earlier tiles in the background. `MasterShard` copies the main weight to
`Scratch` if it is not updated in place, and `Moments` loads the optimizer's states. `Updater` calls
the inner optimizer and stores the results. The policies in update_policy.py choose which tiles are
not updated in the step itself.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import UsageError
from ..base.meter import PhaseClock
from ..base.progress import FirstWork
from ..optimizers.plain_steps import raw_step
from ..precision.compact import StochasticRounding
from ..sharding.param_group import ParamGroup
from ..tiers.tier import COMPLETED, CopyEvent
from .master_shard import GradSource, MasterShard, Tile, collected, tiles_by_group
from .moments import Moments
from .offloaded_states import evict_staged, ranges_of_tile
from .one_pass import GroupUpdate, OnePass
from .param_overlap import random_bits
from .tile_memory import PrefetchSettings, Scratch, TilePrefetcher

Hypers = list[dict[str, Any]]  # the options of each parameter group, without its parameters


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
        moments: Stores the moments of `inner` between updates.
        settings: How many tiles may be in transfer between memories at the same time.
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
        self.clock = clock
        self.one_pass = OnePass(inner)
        self.is_busy = False  # whether the update of a tile is in progress
        self._ended_halfway = False
        self.updates = 0  # number of decided updates
        self.has_run = False  # whether the optimizer has created its states
        # It may be slow, because it touches the memory of the states for the first time
        self._first_update = FirstWork("first update", numel, "parameters")

    def step_now(
        self, tiles: Sequence[Tile], decision: Decision
    ) -> Generator[set[ParamGroup], None, None]:
        """Update tiles one after another.

        Args:
            tiles: The tiles, in the order of their updates.
            decision: The factor, hyper-parameters and gradients of the update.

        Yields:
            After each tile, the groups whose tiles have all been updated.
        """
        flow = self.prefetcher(tiles, decision.source)
        done = 0
        left = tiles_by_group(tiles)  # number of tiles that are not updated yet
        try:
            while (tile := flow.next()) is not None:
                self.update(tile, decision)
                flow.release(tile)
                done += 1
                groups = {shard.group for _, shard in tile}
                for group in groups:
                    left[group] -= 1
                yield {group for group in groups if not left[group]}
        except (Exception, GeneratorExit):  # GeneratorExit: the caller failed between two tiles
            # If the first tile fails, split main weights are unchanged. Those that are updated in
            # place may have changed.
            in_place = any(
                shard.has_kernel or shard.master.is_updated_in_place
                for _, shard in chain.from_iterable(tiles)
            )
            self._ended_halfway = done > 0 or in_place
            evict_staged(tiles, decision.source)
            raise

    def prefetcher(
        self, tiles: Sequence[Tile], source: GradSource = collected
    ) -> TilePrefetcher[Tile]:
        """Return a prefetcher for the states that the updates of tiles use.

        Work that is given to the training device after this call must not change these states.

        Args:
            tiles: The tiles, in the order of their updates.
            source: A function that returns the reduced gradient of a parameter group.
        """
        after: CopyEvent = COMPLETED
        if tiles:
            after = tiles[0][0][1].group.comm_ctx.copy_engine.now()
        ranges = partial(ranges_of_tile, moments=self.moments, source=source, after=after)
        return TilePrefetcher(tiles, ranges, self.settings)

    @contextmanager
    def guard_mixture(self) -> Iterator[None]:
        """Return a context for updates, which records if one of them fails.

        If the block raises, some states have been updated and others have not. `refuse_mixture`
        then raises, because training cannot continue.
        """
        before = self.clock.enter("optimizer")
        already = self._ended_halfway
        self._ended_halfway = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
            self._ended_halfway = already
        finally:
            self.clock.enter(before)

    def refuse_mixture(self) -> None:
        """Raise `UsageError` if an earlier update failed after it had updated some states."""
        if self._ended_halfway and not self.is_busy:
            raise UsageError(
                "an earlier step ended with an error while states were being updated.",
                "Some have taken that step and some have not, so going on would compute with a "
                "mixture.",
                "load the last checkpoint into a new engine.",
            )

    def update(self, tile: Tile, decision: Decision) -> None:
        """Update the shards of one tile, whose states have been fetched.

        Args:
            tile: The shards to update together.
            decision: The factor, hyper-parameters and gradients of the update.
        """
        self._first_update.begin()
        rest = Tile()  # shards that the optimizer's own step updates
        shown = list[MasterShard]()
        chance = StochasticRounding(decision.number)
        self.is_busy = True
        done = False
        try:
            for number, shard in tile:
                grad = shard.grad(decision.source)
                group = self._group(number, decision)
                if (
                    grad is not None
                    and group is not None
                    and shard.has_kernel
                    and self.one_pass.update_shard(
                        shard, grad, group, self.moments, decision.factor, chance
                    )
                ):
                    continue
                rest.append((number, shard))
                if grad is None:
                    continue
                shard.load_values(self.scratch)
                self.moments.load(shard)
                shown.append(shard)
                shard.param.grad = self._scaled(shard, grad, decision.factor)
            for part in self._alike(rest, shown) if rest else ():
                self._step_inner(part, decision.hypers)
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
            self.is_busy = False
        self._first_update.advance(sum(shard.numel for _, shard in tile))

    def _group(self, number: int, decision: Decision) -> GroupUpdate | None:
        """Return the kernel settings of a parameter group, or None without a kernel."""
        if number not in decision.groups:
            hypers = self.inner.param_groups if decision.hypers is None else decision.hypers
            decision.groups[number] = self.one_pass.group(hypers[number])
        return decision.groups[number]

    def _scaled(self, shard: MasterShard, grad: Tensor, factor: float) -> Tensor:
        dtype = shard.param.dtype
        home = shard.master.update_device
        if grad.dtype == dtype and factor == 1.0 and grad.device == home:
            return grad
        into = self.scratch.take("grads", dtype, home)[shard.at : shard.at + shard.numel].view(
            grad.shape
        )
        if factor == 1.0:
            return into.copy_(grad)
        is_alike = grad.dtype == dtype and grad.device == into.device
        return torch.mul(grad, factor, out=into) if is_alike else into.copy_(grad).mul_(factor)

    def _alike(self, tile: Tile, shown: Sequence[MasterShard]) -> list[Tile]:
        """Split a tile into shards with and without optimizer state.

        Shards that were unfrozen later have no state yet. PyTorch's fused SGD does not accept both
        in one call.
        """
        new = {id(shard) for shard in shown if not self.inner.state.get(shard.param)}
        if not new or len(new) == len(shown):
            return [tile]
        return [
            [item for item in tile if (id(item[1]) in new) is is_new] for is_new in (False, True)
        ]

    def _step_inner(self, tile: Tile, hypers: Hypers | None) -> None:
        """Call the inner optimizer once for the shards of a tile."""
        everything = self.inner.param_groups
        held = [dict(group) for group in everything]
        try:
            for number, group in enumerate(everything):
                if hypers is not None:
                    group.update(hypers[number])
                group["params"] = [shard.param for owner, shard in tile if owner == number]
            raw_step(self.inner)()
        finally:
            for number, (group, before) in enumerate(zip(everything, held, strict=True)):
                group["params"] = before["params"]
                for key, value in hypers[number].items() if hypers is not None else ():
                    if group[key] is value:  # keep what the optimizer itself changed
                        group[key] = before[key]
