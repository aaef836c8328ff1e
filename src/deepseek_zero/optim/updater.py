"""Runs the inner optimizer over tiles of master shards: at the step, in a later forward, or a step late.

A step that has its verdict (norm, overflow) may defer the update of weights that are offloaded: the next forward
flushes it unit by unit, in the tiles' order, so that states travel while units compute.  Every read of an
element flushes its update first, so no result changes; `Updater.flush` updates all that is deferred.  The step's
hyper-parameters and gradients are kept until then.

`undecorated` and `raw_step` call torch's optimizers without the decorators that
import torch's compiler (a second, and 70 MB per rank).

`DelayedUpdate` is ZeRO-Offload's delayed parameter update.  With w(t) the weights that step t computes with, g(t) its
gradient and d(t) what step t decided about it (norm, clipping, loss scale, hyper-parameters), from step K on

    w(t + 1) = update(w(t), d(t - 1), g(t - 1))        and        w(K + 1) = w(K)

so an update may run while the next step computes.  A step whose own gradient overflows carries out the deferred update
and defers none.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.clock import PhaseClock
from ..base.errors import UsageError
from ..precision.compact import StochasticRounding
from ..sharding.param_group import ParamGroup
from .moments import Moments
from .prefetch import PrefetchSettings, StagedState, TilePrefetcher
from .scratch import Scratch
from .shards import MasterShard, Tile

Hypers = list[dict[str, Any]]  # of each parameter group, without its parameters


@dataclass(frozen=True)
class Decision:
    """The decision of a step about its gradients. factor: they are multiplied by it. number: of the update, which seeds
    random rounding.

    hypers: hyper-parameters that hold for it; None: those in force. is_waiting: the gradients are the delayed ones.
    """

    factor: float
    number: int
    hypers: Hypers | None = None
    is_waiting: bool = False

    def agrees(self, other: Decision) -> bool:
        """Return whether both decisions lead to the same bits."""
        return (self.factor, self.number) == (other.factor, other.number) and _same(self.hypers, other.hypers)


def hypers_of(optimizer: Optimizer) -> Hypers:
    """Return a copy of the hyper-parameters in force."""
    return [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


class Updater:
    """Runs the inner optimizer over tiles."""

    def __init__(
        self, inner: Optimizer, scratch: Scratch, moments: Moments, settings: PrefetchSettings, clock: PhaseClock
    ) -> None:
        self.inner, self.scratch, self.moments, self.settings = inner, scratch, moments, settings
        self.clock = clock
        self._tiles: TilePrefetcher[Tile] = TilePrefetcher((), self._staged_states, settings)
        self._tiles_left: Counter[ParamGroup] = Counter()  # tiles of each group that wait
        self._decision = Decision(1.0, 0)
        self._is_busy = self._ended_halfway = False
        self.updates = 0  # decided so far
        self.has_run = False  # so the optimizer has made its states

    def step_now(self, tiles: Sequence[Tile], decision: Decision) -> None:
        """Update these tiles now."""
        flow, done = TilePrefetcher(tiles, self._staged_states, self.settings), 0
        try:
            while (tile := flow.next()) is not None:
                self._update(tile, decision)
                flow.release(tile)
                done += 1
        except Exception:
            # A first tile that fails leaves split masters as they were; others are changed where they lie.
            in_place = any(shard.master.is_updated_in_place for tile in tiles for _, shard in tile)
            self._ended_halfway = done > 0 or in_place
            for reflection in [each for tile in tiles for _, shard in tile for each in shard.staged_ranges()]:
                reflection.mirror.clear()
            raise

    def step_deferred(self, tiles: Sequence[Tile], decision: Decision) -> None:
        """Defer the update of these tiles until their states are read."""
        if not tiles:
            return
        self._tiles, self.has_run = TilePrefetcher(tiles, self._staged_states, self.settings), True
        self._decision = replace(decision, hypers=decision.hypers or hypers_of(self.inner))
        self._tiles_left = Counter(
            shard.group for tile in tiles for shard in {id(p.group): p for _, p in tile}.values()
        )
        for group in self._tiles_left:
            group.gradient.is_deferred = True
            group.set_pending(self)

    def step_speculative(self, tiles: Sequence[Tile], decision: Decision, note: Callable[[MasterShard], None]) -> None:
        """Update these tiles before their step is decided; pass each shard to `note` first."""
        flow = TilePrefetcher(tiles, partial(self._staged_states, waiting=decision.is_waiting), self.settings)
        with self.guard_mixture():
            while (tile := flow.next()) is not None:
                for _, shard in tile:
                    note(shard)
                self._update(tile, decision)
                flow.release(tile)

    @contextmanager
    def guard_mixture(self) -> Iterator[None]:
        """Open a block after which, if it raises, some states have taken a step and some have not: training cannot
        go on.
        """
        before, already = self.clock.enter("optimizer"), self._ended_halfway
        self._ended_halfway = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
            self._ended_halfway = already
        finally:
            self.clock.enter(before)

    def has_deferred(self, group: ParamGroup) -> bool:
        """Return whether an update of this group is still deferred."""
        return bool(self._tiles_left[group])

    def flush(self) -> None:
        """Run every deferred update. Local. Raise `UsageError` after an update that failed."""
        if self._is_busy:
            return
        if self._ended_halfway:
            raise UsageError(
                "an earlier step ended with an error while states were being updated.",
                "Some have taken that step and some have not, so going on would compute with a mixture.",
                "load the last checkpoint into a new engine.",
            )
        while self._update_next():
            pass

    def flush_group(self, group: ParamGroup) -> None:
        """Run the deferred updates of the tiles up to this group's: its states are about to be read. Local."""
        if self._ended_halfway:
            self.flush()
        while self._tiles_left[group]:
            self._update_next()

    def _update_next(self) -> bool:
        with self.guard_mixture():
            tile = self._tiles.next()
            if tile is None:
                return False
            self._update(tile, self._decision)
            self._tiles.release(tile)
        for group in {shard.group for _, shard in tile}:
            self._tiles_left[group] -= 1
            if not self._tiles_left[group]:
                group.set_pending(None)
                group.gradient.is_deferred = False
                group.gradient.discard()
        return True

    def _staged_states(self, tile: Tile, *, waiting: bool = False) -> Iterator[StagedState]:
        for _, shard in tile:
            if shard.is_absent(waiting=waiting):
                continue
            yield from shard.extent_ranges(waiting=waiting)
            yield from shard.staged_ranges()
            yield from self.moments.extent_ranges(shard)

    def _update(self, tile: Tile, decision: Decision) -> None:
        shown, chance = list[MasterShard](), StochasticRounding(decision.number)
        self._is_busy, done = True, False
        try:
            for _, shard in tile:
                if (grad := shard.grad(waiting=decision.is_waiting)) is not None:
                    shard.load_values(self.scratch)
                    self.moments.load(shard)
                    shown.append(shard)
                    shard.param.grad = self._scaled(shard, grad, decision.factor)
            for part in self._alike(tile, shown):
                self._step_inner(part, decision.hypers)
            done = True
        finally:
            for shard in shown:
                shard.store_values(self.scratch, chance, keep=done)
                self.moments.store(shard, chance, keep=done)
                shard.param.grad = None
            self._is_busy = False

    def _scaled(self, shard: MasterShard, grad: Tensor, factor: float) -> Tensor:
        dtype, home = shard.param.dtype, shard.master.update_device
        if grad.dtype == dtype and factor == 1.0 and grad.device == home:
            return grad
        into = self.scratch.take("grads", dtype, home)[shard.at : shard.at + shard.numel].view(grad.shape)
        if factor == 1.0:
            return into.copy_(grad)
        is_alike = grad.dtype == dtype and grad.device == into.device
        return torch.mul(grad, factor, out=into) if is_alike else into.copy_(grad).mul_(factor)

    def _alike(self, tile: Tile, shown: Sequence[MasterShard]) -> list[Tile]:
        """Split a tile in two if some shards have states and others (unfrozen since) have not: torch's fused SGD
        refuses a mixture.
        """
        new = {id(shard) for shard in shown if not self.inner.state.get(shard.param)}
        if not new or len(new) == len(shown):
            return [tile]
        return [[item for item in tile if (id(item[1]) in new) is is_new] for is_new in (False, True)]

    def _step_inner(self, tile: Tile, hypers: Hypers | None) -> None:
        """Call the inner optimizer once, over the shards of a tile."""
        everything = self.inner.param_groups
        held = [dict(group) for group in everything]
        try:
            for number, group in enumerate(everything):
                group.update(hypers[number] if hypers is not None else {})
                group["params"] = [shard.param for owner, shard in tile if owner == number]
            raw_step(self.inner)()
        finally:
            for number, (group, before) in enumerate(zip(everything, held, strict=True)):
                group["params"] = before["params"]
                for key, value in hypers[number].items() if hypers is not None else ():
                    if group[key] is value:  # what the optimizer itself changed stays
                        group[key] = before[key]


_ONE_AT_A_TIME = threading.RLock()  # a second thread would take the bare methods for torch's, and put those back


@contextmanager
def undecorated() -> Iterator[None]:
    """Remove the decorators of torch's optimizers while one is built, or loads a state.

    Optimizers of other threads do without them for as long, which changes nothing that they do.
    """
    with _ONE_AT_A_TIME:
        marked = {name: getattr(Optimizer, name) for name in ("add_param_group", "load_state_dict")}
        for name, method in marked.items():
            setattr(Optimizer, name, inspect.unwrap(method))
        try:
            yield
        finally:
            for name, method in marked.items():
                setattr(Optimizer, name, method)


def raw_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the bare update of one of torch's own optimizers or ours, else its `step`. It runs inside
    `torch.no_grad()`.

    Hooks belong to the outer step: they run once a step and not once a tile.
    """
    cls = type(optimizer)
    is_known = cls.__module__.partition(".")[0] in ("torch", "deepseek_zero") and "step" not in vars(optimizer)
    return inspect.unwrap(cls.step).__get__(optimizer) if is_known else optimizer.step


class DelayedUpdate:
    """The deferred decision of one optimizer whose updates are a step late. after: updates in time at the start of a
    run.
    """

    def __init__(self, groups: Sequence[ParamGroup], after: int) -> None:
        self.groups, self.after = groups, after
        self.deferred: Decision | None = None

    def is_on(self, updates: int) -> bool:
        """Return whether a step after so many updates delays its own."""
        return self.deferred is not None or updates >= self.after

    def swap(self, made: Decision | None) -> Decision | None:
        """Store a step's decision (None: it has none) and return the one stored before."""
        for group in self.groups:
            group.gradient.delayed.swap(keep=made is not None)
        due, self.deferred = self.deferred, made
        return due

    def discard(self) -> None:
        """Drop the stored decision."""
        self.deferred = None
        for group in self.groups:
            group.gradient.delayed.discard()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the stored decision as plain values; its gradient is saved by parameter (checkpoint/state.py)."""
        if self.deferred is None:
            return None
        return {"factor": self.deferred.factor, "number": self.deferred.number, "hypers": self.deferred.hypers}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a saved decision; the gradient has been loaded already."""
        self.deferred = Decision(state["factor"], state["number"], state["hypers"]) if state is not None else None
        for group in self.groups:
            group.gradient.delayed.is_full = self.deferred is not None
