"""Deferred updates: run updates of offloaded weights during the next forward.

The states of these weights then travel between memories while units compute. Every read of a
deferred state runs its update first, so no result changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..optim.master_shard import Tile, tiles_by_group
from ..optim.tile_memory import TilePrefetcher
from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.updater import Decision, Updater, hypers_of
from ..sharding.param_group import ParamGroup


class DeferredUpdate(UpdatePolicy):
    """A policy that runs updates of offloaded weights during the next forward.

    The tiles are updated in order, and each before its states are read.
    """

    def __init__(self) -> None:
        self._updater: Updater
        self._tiles: TilePrefetcher[Tile]
        self._decision = Decision(1.0, 0)
        self._tiles_left: Counter[ParamGroup] = Counter()

    def attach(self, optimizer: Stepping) -> None:
        self._updater = optimizer.updater
        self._tiles = self._updater.prefetcher(())

    def postpone(self, tiles: Sequence[Tile], due: Decision) -> None:
        """Store the tiles, to update them when their states are read.

        Args:
            tiles: The tiles of offloaded weights that the step has not updated.
            due: The decision (clipping, loss scale, hyper-parameters) with which they are updated.
        """
        if not tiles:
            return
        updater = self._updater
        self._tiles = updater.prefetcher(tiles)
        updater.has_run = True
        self._decision = replace(due, hypers=due.hypers or hypers_of(updater.inner))
        self._tiles_left = tiles_by_group(tiles)
        for group in self._tiles_left:
            group.gradient.hold()
            group.set_pending(self)

    @property
    def waiting(self) -> set[ParamGroup]:
        """The groups that have a deferred update."""
        return {group for group, count in self._tiles_left.items() if count}

    def flush(self) -> None:
        """Run every deferred update.

        Raises:
            UsageError: An earlier update failed.
        """
        if self._updater.is_busy:
            return
        self._updater.refuse_mixture()
        while self._update_next():
            pass

    def flush_group(self, group: ParamGroup) -> None:
        """Run the deferred updates, in order, up to the last tile of a group."""
        self._updater.refuse_mixture()
        while self._tiles_left[group]:
            self._update_next()

    before_step = flush
    finish = flush
    discard = flush

    def _update_next(self) -> bool:
        with self._updater.guard_mixture():
            tile = self._tiles.next()
            if tile is None:
                return False
            self._updater.update(tile, self._decision)
            self._tiles.release(tile)
        for group in {shard.group for _, shard in tile}:
            self._tiles_left[group] -= 1
            if not self._tiles_left[group]:
                group.set_pending(None)
                group.gradient.end_hold()
        return True
