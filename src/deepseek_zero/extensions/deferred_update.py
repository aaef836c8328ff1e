"""Deferred updates: run updates of offloaded weights during the next forward.

The states of these weights then travel between memories while units compute. Every read of a
deferred state runs its update first, so no result changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.meter import PhaseClock
from ..optim.inner_step import Decision
from ..optim.master_shard import Tile, Tiles, collected, tiles_by_group
from ..optim.moments import Moments
from ..optim.offloaded_states import prefetch
from ..optim.param_groups import Hypers
from ..optim.policy_state import Stepping
from ..optim.tile_memory import PrefetchSettings, TilePrefetcher
from ..optim.update_guard import UpdateGuard
from ..optim.update_policy import UpdatePolicy
from ..optim.updater import Updater
from ..sharding.grad_sum import GradState
from ..sharding.gradient import Gradient
from ..sharding.param_group import ParamGroup


class DeferredUpdate(UpdatePolicy):
    """An update policy that runs updates of main weights during the next forward.

    The update plan selects the shards of main weights whose updates are deferred, for example those
    with offloaded states. A step only records these shards, except those of units that were updated
    during backward. Each recorded shard is updated later, before its states are read. Transfers of
    offloaded states therefore overlap with the computation of the next forward. The results of
    training do not change.
    """

    def __init__(self) -> None:
        self._updater: Updater
        self._moments: Moments
        self._settings: PrefetchSettings
        self._tiles: TilePrefetcher[Tile]
        self._decision = Decision(1.0, 0)
        self._later: Mapping[int, Sequence[Tile]] = {}  # by unit
        self._tiles_left: Counter[ParamGroup] = Counter()

    def attach(self, optimizer: Stepping) -> None:
        self._updater = optimizer.updater
        self._moments = optimizer.moments
        self._settings = optimizer.settings.flow
        self._clock = optimizer.runtime.comm.meter.clock

    def tiles_changed(self, tiles: Tiles) -> None:
        self._later = tiles.later

    def postpone(self, due: Decision, done: Collection[int]) -> None:
        """Record the shards whose update is deferred until their states are next read.

        The reduced gradients of these shards are kept until the update has run. The current
        hyper-parameters are copied if `due` has none, so later changes do not affect the update.

        Args:
            due: The factor by which gradients are multiplied (clipping and loss scale), and the
                hyper-parameters of the step. The deferred update uses both.
            done: The numbers of the units that were updated during backward.
        """
        tiles = [tile for unit, own in self._later.items() if unit not in done for tile in own]
        if not tiles:
            return
        self._tiles = prefetch(tiles, collected, self._moments, self._settings)
        self._decision = replace(due, hypers=due.hypers or hypers_of(self._updater.inner))
        self._tiles_left = tiles_by_group(tiles)
        for group in self._tiles_left:
            hold(group.gradient)
            group.set_pending(self)

    @property
    def waiting(self) -> set[ParamGroup]:
        """The parameter groups with deferred updates that have not run yet, as a new set."""
        return {group for group, count in self._tiles_left.items() if count}

    def flush(self) -> None:
        """Run all deferred updates that have not run yet.

        The call has no effect while an update is in progress. `before_step`, `finish` and `discard`
        are other names of this method, because a deferred update must not be dropped.

        Raises:
            StorageError: A disk failed.
            UsageError: An earlier update failed.
        """
        if self._updater.guard.is_busy:
            return
        self._updater.guard.refuse_mixture()
        while any(self._tiles_left.values()):
            self._update_next()

    def flush_group(self, group: ParamGroup) -> None:
        """Run deferred updates in order until those of one parameter group have run.

        Updates of other groups that precede them run too. No update runs if the group has none.

        Args:
            group: The parameter group whose states are about to be read.

        Raises:
            StorageError: A disk failed.
            UsageError: An earlier update failed.
        """
        self._updater.guard.refuse_mixture()
        while self._tiles_left[group]:
            self._update_next()

    before_step = flush
    finish = flush
    discard = flush

    def _update_next(self) -> None:
        with outside_step(self._updater.guard, self._clock):
            tile = self._tiles.next()
            assert tile is not None
            self._updater.update(tile, self._decision)
            self._tiles.release(tile)
        for group in {shard.group for _, shard in tile}:
            self._tiles_left[group] -= 1
            if not self._tiles_left[group]:
                group.set_pending(None)
                end_hold(group.gradient)


@contextmanager
def outside_step(guard: UpdateGuard, clock: PhaseClock) -> Iterator[None]:
    """Return a context for updates outside a step, which records if one of them fails.

    If the block raises, some states have been updated and others have not. `refuse_mixture`
    then raises, because training cannot continue.

    Args:
        guard: The guard of the optimizer's updates.
        clock: Measures the time spent on updates.
    """
    before = clock.enter("optimizer")
    already = guard.ended_halfway
    guard.ended_halfway = True
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
        guard.ended_halfway = already
    finally:
        clock.enter(before)


def hypers_of(optimizer: Optimizer) -> Hypers:
    """Return a copy of the optimizer's current hyper-parameters, by parameter group.

    Args:
        optimizer: The inner optimizer.
    """

    def copy_of(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return [
        {key: copy_of(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def hold(gradient: Gradient) -> None:
    """Keep a reduced gradient after its step, until `end_hold`.

    Args:
        gradient: The gradient of a group with a deferred update.
    """
    total = gradient.sum
    if total.state is GradState.EMPTY:
        # No member has a gradient, so none is updated.
        total.absent = set(range(len(gradient.group.members)))
    total.enter(GradState.HELD)


def end_hold(gradient: Gradient) -> None:
    """Discard a reduced gradient after the deferred update has used it.

    Args:
        gradient: The gradient of a group with a deferred update.
    """
    gradient.sum.enter(GradState.EMPTY)
    gradient.discard()
