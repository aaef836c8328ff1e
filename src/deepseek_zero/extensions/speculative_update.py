"""Updates in backward: a unit is updated when its gradient has been reduced, while backward goes on
to earlier units. An update that does not agree with its step's decision is undone bit by bit.

Two decisions are assumed before the step is over. A speculative step (SuperOffload) assumes that
there is neither clipping nor overflow, before the norm is known. A delayed one (delayed_update.py)
uses the decision and the gradient of the step before. Updates are also undone if a program reads
what they changed before the step is over, so a program never sees them. Only units that the host
updates and whose weights are sharded take part: a read of such a weight needs a gather, which
undoes the update first. If a gather makes no copy, a unit is updated after it has been resharded,
because backward may still read its weight.

`UndoLog` holds a copy of every byte that an update writes. Copies, not arithmetic: an update cannot
be calculated backwards without rounding, and not at all once a number is not finite. The log is one
buffer on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.device import CPU, without_torch_function
from ..base.errors import UsageError
from ..base.memory import return_pages
from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.updater import (
    Decision,
    MasterShard,
    Moments,
    Scratch,
    StagedState,
    Tile,
    Tiles,
    Updater,
    collected,
    hypers_of,
)
from ..precision.loss_scale import LossScaler
from ..sharding.grad_sum import squares_of
from ..sharding.message import has_pages_to_return
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.step_state import Phase
from ..sharding.unit import Unit

# Of torch's and ours: their step over one shard reads and writes nothing but that shard, its entry
# in `state` and hyper-parameters that stay as they are.
BY_SHARD = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax Lamb Lion Muon NAdam RAdam RMSprop Rprop SGD".split()
)


@dataclass
class SpeculationStats:
    """updated: units, in backward.  undone: of these."""

    updated: int = 0
    undone: int = 0


class Delay(Protocol):
    """A policy whose steps carry out the decision of an earlier step."""

    @property
    def is_on(self) -> bool:
        """Return whether the next step carries out an earlier decision."""

    def expected(self) -> Decision | None:
        """Return that decision; None if there is none."""


class SpeculativeUpdate(UpdatePolicy):
    """The updates of one optimizer that came before their step's decision.

    Attributes:
        budget: Bytes of the log.
        units: The tiles of each unit that may be updated in backward, by number of the unit, the
            first units first.
        stats: Counts of updates.
    """

    keeps_decisions = True
    undoes = True

    def __init__(self, delay: Delay | None, budget: int, *, speculates: bool) -> None:
        """Build the policy.

        Args:
            delay: The policy that knows the decision before the step, if there is one.
            budget: Bytes of the log.
            speculates: A decision that is not known is assumed.
        """
        self.budget = budget
        self.units: Mapping[int, Sequence[Tile]] = {}
        self.stats = SpeculationStats()
        self.runtime: Runtime
        self.updater: Updater
        self.log: UndoLog
        self._delay = delay
        self._speculates = speculates
        self._scaler: LossScaler | None = None
        self._chosen: frozenset[int] | None = None
        self._decision: Decision | None = None
        self._done: dict[int, list[ParamGroup]] = {}
        self._reduced: list[Unit] = []  # that are not updated yet
        self._is_off = False  # set by a read: no more updates before the next step

    def attach(self, optimizer: Stepping) -> None:
        self._scaler = optimizer.scaler
        self.runtime = optimizer.runtime
        self.updater = optimizer.updater
        self.log = UndoLog(optimizer.inner, optimizer.moments, optimizer.scratch)
        self.tiles_changed(optimizer.tiles)

    def tiles_changed(self, tiles: Tiles) -> None:
        """Take the tiles of all units but the root, whose gradient is the last."""
        root = self.runtime.root.number
        self.units = {number: each for number, each in tiles.later.items() if number != root}

    def refuse_joining(self, what: str, fix: str) -> None:
        refuse_joining_beside_log(what, fix)

    def _expected(self) -> Decision | None:
        """Return the decision that this step will carry out, or is assumed to. An assumed one
        neither clips nor skips.
        """
        if not self.updater.has_run:  # the states that the log must have room for do not exist
            return None
        if self._delay is not None and self._delay.is_on:
            return self._delay.expected()
        if not self._speculates:
            return None
        scale = self._scaler.scale if self._scaler is not None else 1.0
        return Decision(1.0 / scale, self.updater.updates + 1, hypers_of(self.updater.inner))

    def after_reduce(self, unit: Unit) -> None:
        """Update the reduced units whose weight is not in use any more. Local."""
        self._reduced.append(unit)
        in_use = [each for each in self._reduced if _is_in_use(each)]
        free = [each for each in self._reduced if each not in in_use]
        self._reduced = in_use
        for each in free:
            self._update(each)

    def _update(self, unit: Unit) -> None:
        if unit.number not in self.units or self._is_off or unit.number in self._done:
            return
        if self.runtime.step.phase is not Phase.BACKWARD or not self.runtime.step.is_boundary:
            return
        if self._decision is None:
            self._decision = self._expected()
        if self._decision is None or unit.number not in self.chosen():
            return
        tiles = self.units[unit.number]
        groups = list({shard.group: None for tile in tiles for _, shard in tile})
        if any(map(_has_frozen, groups)):
            return  # which of its parameters have a gradient is known when backward is over
        if any(group.guard.pending is not None for group in groups):
            return  # an earlier step's update is still deferred
        # Which the step need not look for
        sums = [
            square
            for squares in squares_of([group.gradient.sum for group in groups])
            for square in squares
        ]
        if self._decision.source is collected and not all(map(math.isfinite, sums)):
            return
        self.updater.step_early(tiles, self._decision, self.log.note)
        self._done[unit.number] = groups
        self.stats.updated += 1
        for group in groups:
            group.set_pending(self)

    def chosen(self) -> frozenset[int]:
        """Return the units whose bytes before the update fit the budget together, the first ones
        first.

        Backward makes their gradients last, when most activations are gone and their room is free
        for the log; and the next forward needs them first, when there is nothing yet to hide their
        update behind. The others are updated when that forward comes to them.
        """
        if self._chosen is None:
            found = set()
            total = 0
            for number, tiles in self.units.items():
                nbytes = sum(self.log.bytes_of(shard) for tile in tiles for _, shard in tile)
                if total + nbytes <= self.budget:
                    total += nbytes
                    found.add(number)
            self.log.reserve(total)
            self._chosen = frozenset(found)
        return self._chosen

    def conclude(self, due: Decision | None) -> frozenset[int]:
        """Return the units whose update agrees with the step's decision. Undo the others."""
        if self._decision is None or due is None or not self._decision.agrees(due):
            self.undo()
        stands = frozenset(self._done)
        self._close()
        self._decision = None
        self._reduced = []
        self._is_off = False
        return stands

    def finish(self) -> None:
        self.undo()

    def discard(self) -> None:
        self.conclude(None)

    def flush(self) -> None:
        """Undo all updates, since a program reads a state before the step is over."""
        self.undo()

    def flush_group(self, group: ParamGroup) -> None:
        """Undo all updates, as `flush`."""
        self.undo()

    def undo(self) -> None:
        """Restore every byte that was updated before its step."""
        if not self._done:
            return
        self._is_off = True
        self.stats.undone += len(self._done)
        self._clear_deferred()
        with self.updater.guard_mixture():
            self.log.undo()
        self._close()

    def explain(self) -> list[str]:
        """Return the lines of `engine.explain` about it."""
        if not self.units:
            return [
                "updates in backward: none, since the host updates no unit but the root with a "
                "sharded weight"
            ]
        fit = len(self._chosen) if self._chosen is not None else "some"
        stats = f"{self.stats.updated} updates, {self.stats.undone} of them undone"
        return [f"updates in backward: {fit} of {len(self.units)} units fit undo_bytes, {stats}"]

    def _clear_deferred(self) -> None:
        for group in (group for groups in self._done.values() for group in groups):
            group.set_pending(None)

    def _close(self) -> None:
        self._clear_deferred()
        self._done = {}
        self.log.clear()


def works_by_shard(cls: type[Optimizer]) -> bool:
    """Return whether an update of one shard can be undone without the others: true of the classes
    that are listed.
    """
    is_known = cls.__module__.partition(".")[0] in ("torch", "deepseek_zero")
    return is_known and cls.__name__ in BY_SHARD


def unsupported_optimizer(cls: type[Optimizer]) -> UsageError:
    """Return the error for an optimizer whose updates cannot be undone."""
    return UsageError(
        f"super_offload cannot be used with {cls.__name__}.",
        "Its step may change more than one shard's state, which could then not be undone by "
        "itself.",
        f"use one of {', '.join(sorted(BY_SHARD))}, or leave super_offload out.",
    )


def refuse_joining_beside_log(what: str, fix: str) -> None:
    """Raise `UsageError`: no parameter can join an optimizer with an undo log.

    Args:
        what: The event that makes parameters join.
        fix: What the user can do.
    """
    raise UsageError(
        f"{what}, under super_offload or delayed_update_after.",
        "Updates made in backward are undone from a log that was laid out for the others.",
        fix,
    )


@dataclass
class Before:
    """A copy of one shard's states before its update. places, powers: ranges or scales, and their
    copy.

    state: the optimizer's entry, counters as numbers; None if there was none.
    """

    shard: MasterShard
    places: list[tuple[StagedState, Tensor]] = field(default_factory=list)
    powers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    state: dict[str, Any] | None = None
    counters: dict[str, float] = field(default_factory=dict)


class UndoLog:
    """Copies of shards before their updates, latest last."""

    def __init__(self, inner: Optimizer, moments: Moments, scratch: Scratch) -> None:
        self._inner = inner
        self._moments = moments
        self._scratch = scratch
        self._entries: list[Before] = []
        self._memory: Tensor | None = None
        self._used = 0

    def bytes_of(self, shard: MasterShard) -> int:
        """Return the bytes that `note` will take."""
        places = sum(stretch.itemsize for stretch in self._written(shard)) * shard.numel
        return places + sum(
            powers.nbytes for _, powers in self._moments.storages(shard) if powers is not None
        )

    def reserve(self, nbytes: int) -> None:
        """Allocate the buffer; raise `OutOfMemoryError` if memory_budget.device does not allow
        it.
        """
        self._memory = self._scratch.take("undo", torch.uint8, CPU, nbytes)

    def note(self, shard: MasterShard) -> None:
        """Copy the states of a shard that is about to be updated."""
        before = Before(shard)
        self._entries.append(before)
        for stretch in self._written(shard):
            before.places.append((stretch, self._copy(stretch.values())))
        for _, powers in self._moments.storages(shard):
            if powers is not None:
                before.powers.append((powers, self._copy(powers)))
        if shard.param in self._inner.state:
            before.state = dict(self._inner.state[shard.param])
            counters = {key: value for key, value in before.state.items() if _counts(value)}
            before.counters = {key: value.item() for key, value in counters.items()}

    def undo(self) -> None:
        """Restore every shard that was noted."""
        for before in reversed(self._entries):
            before.shard.group.guard.before_write()
            for stretch, copy in before.places:
                stretch.restore(copy)
            for powers, copy in before.powers:
                powers.view(torch.uint8).copy_(copy)
            self._restore_state(before)
        self.clear()

    def clear(self) -> None:
        """Drop the copies; on the CPU the buffer's pages are returned to the system until it is
        used again.
        """
        self._entries = []
        self._used = 0
        if self._memory is not None and has_pages_to_return(self._memory):
            return_pages(self._memory)

    def _restore_state(self, before: Before) -> None:
        state = self._inner.state
        if before.state is None:
            state.pop(before.shard.param, None)
            self._moments.forget()
            return
        state[before.shard.param] = before.state
        for key, number in before.counters.items():
            before.state[key].fill_(number)

    def _written(self, shard: MasterShard) -> Iterator[StagedState]:
        """Yield every range outside the optimizer's own counters that an update of this shard
        writes.
        """
        yield from (stretch for stretch in shard.storage_ranges() if stretch.changes)
        yield from (stretch for stretch in shard.staged_ranges() if stretch.changes)
        yield from (stretch for stretch, _ in self._moments.storages(shard))

    def _copy(self, values: Tensor) -> Tensor:
        assert self._memory is not None
        copy = self._memory[self._used : self._used + values.nbytes]
        self._used += values.nbytes
        return copy.copy_(values.view(torch.uint8))


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _is_in_use(unit: Unit) -> bool:
    """Return whether backward may still read the memory of a unit's weight."""
    return any(
        group.unsharded is not None and not group.weight_gather.makes_copies
        for group in unit.trained
    )


def _has_frozen(group: ParamGroup) -> bool:
    """Return whether a member is frozen now (`requires_grad_(False)`)."""
    with without_torch_function():
        return not all(member.param.requires_grad for member in group.members)
