"""Updates of units during backward, before the decision of the step is known.

A unit is updated after its gradient has been reduced, while backward computes earlier units. If
the update does not agree with the decision of the step, it is undone bit by bit.

Two kinds of decisions are known or assumed early. A speculative step (SuperOffload) assumes that
there is neither clipping nor overflow. A delayed step (delayed_update.py) uses the decision and
the gradient of the previous step. If a program reads an updated state before the step is over,
all early updates are undone first, so a program never sees them.

Only units that the host updates and whose weights are sharded take part. A read of such a weight
needs a gather, and the gather undoes the update first. If a gather makes no copy, the unit is
updated only after it has been resharded, because backward may still read its weight.

`UndoLog` holds a copy of every byte that an update writes. An update cannot be computed backwards,
because arithmetic rounds and numbers may not be finite. The log is one buffer on the host.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.device import CPU, without_torch_function
from ..base.errors import UsageError
from ..base.log import log_once
from ..base.memory import offer_pages
from ..base.quantities import format_bytes
from ..optim.inner_step import Decision
from ..optim.master_shard import MasterShard, Tile, Tiles, collected
from ..optim.moments import Moments
from ..optim.offloaded_states import prefetch, staged_ranges, storage_ranges
from ..optim.policy_state import Stepping
from ..optim.tile_memory import PrefetchSettings, StorageRange, TileScratch
from ..optim.update_policy import UpdatePolicy
from ..optim.updater import Updater
from ..precision.loss_scale import LossScaler
from ..sharding.grad_sum import squares_of
from ..sharding.param_group import ParamGroup
from ..sharding.pool import has_pages_to_return
from ..sharding.runtime import Runtime
from ..sharding.step_state import Phase
from ..sharding.unit import Unit
from .deferred_update import hypers_of, outside_step
from .delayed_update import DelayedUpdate, refuse_joining_with_undo_log

# Optimizers whose step over one shard uses only that shard, its entry in `state` and constant
# hyper-parameters
BY_SHARD = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax Lamb Lion Muon NAdam RAdam RMSprop Rprop SGD".split()
)


class SpeculativeUpdate(UpdatePolicy):
    """An update policy that updates units during backward (SuperOffload).

    A unit is updated after its gradient has been reduced, before the gradient norm is known. The
    policy assumes that the step neither clips nor overflows. If the assumption is wrong, the
    updates are undone from a log of the overwritten bytes. If updates are also delayed by one step
    (`DelayedUpdate`), the policy applies the gradient of the previous step, whose clipping factor
    is known.

    Attributes:
        budget: The largest size of the undo log in bytes.
        units: For the number of each unit that may be updated during backward, the lists of its
            shards. The shards of one list are updated together.
        updated: The number of updates of units that ran during backward, over all steps.
        undone: The number of these updates that were undone.
    """

    undoes = True

    def __init__(self, delay: DelayedUpdate | None, budget: int, *, speculates: bool) -> None:
        """Create a policy that has not updated anything yet.

        Args:
            delay: The policy of delayed updates, whose clipping factor is known before the step;
                None without delayed updates.
            budget: The size of the undo log in bytes.
            speculates: Whether to assume that a step neither clips nor overflows. If false, only
                delayed updates run during backward.
        """
        self.budget = budget
        self.units: Mapping[int, Sequence[Tile]] = {}
        self.updated = 0
        self.undone = 0
        self.runtime: Runtime
        self.updater: Updater
        self._moments: Moments
        self._settings: PrefetchSettings
        self.log: UndoLog
        self._delay = delay
        self._speculates = speculates
        self._scaler: LossScaler | None = None
        self._chosen: frozenset[int] | None = None
        self._decision: Decision | None = None
        self._done: dict[int, list[ParamGroup]] = {}
        self._reduced: list[Unit] = []  # units that are not updated yet
        self._has_run = False  # whether a step has updated all units
        self._is_off = False  # set by a read: no more updates before the next step

    def attach(self, optimizer: Stepping) -> None:
        self._scaler = optimizer.scaler
        self.runtime = optimizer.runtime
        self.updater = optimizer.updater
        self._moments = optimizer.moments
        self._settings = optimizer.settings.flow
        self._clock = optimizer.runtime.comm.meter.clock
        self.log = UndoLog(optimizer.inner, optimizer.moments, optimizer.scratch)
        reference = weakref.ref(self)  # a runtime does not keep its optimizer alive

        def after_reduce(unit: Unit) -> None:
            policy = reference()
            if policy is not None:
                policy.after_reduce(unit)

        self.runtime.reductions.after_reduce = [after_reduce]

    def tiles_changed(self, tiles: Tiles) -> None:
        """Select the units that may be updated during backward.

        The method is called after the shards have changed. All units in `tiles.later` are selected
        except the root, because the gradient of the root is reduced last.

        Args:
            tiles: The new lists of shards that are updated together.
        """
        root = self.runtime.root.number
        self.units = {number: each for number, each in tiles.later.items() if number != root}
        for _, shard in chain.from_iterable(chain.from_iterable(self.units.values())):
            staged = shard.master.on_device.staged
            if staged is not None:
                staged.is_read = True  # the undo log copies what an update overwrites

    def refuse_joining(self, what: str, fix: str) -> None:
        """Raise `UsageError`, because the undo log does not support new parameters.

        Args:
            what: The event that adds parameters to the optimizer, for the error message.
            fix: The last sentence of the error message: what the user can do.

        Raises:
            UsageError: Always.
        """
        refuse_joining_with_undo_log(what, fix)

    def _expected(self) -> Decision | None:
        """Return the known or assumed decision of this step, or None.

        An assumed decision neither clips nor skips.
        """
        if not self._has_run:  # the log needs room for states that do not exist yet
            return None
        if self._delay is not None and self._delay.is_on:
            return self._delay.expected()
        if not self._speculates:
            return None
        scale = self._scaler.scale if self._scaler is not None else 1.0
        return Decision(1.0 / scale, self.updater.updates + 1, hypers_of(self.updater.inner))

    def after_reduce(self, unit: Unit) -> None:
        """Update the reduced units whose weights are no longer in use.

        The call has no effect outside the last backward of a step. Only units in `chosen()` are
        updated. If backward may still read the weight of a unit in place, the unit is updated by a
        later call. A unit waits for the step if one of its parameters is frozen, if an update of an
        earlier step is still deferred, or if a gradient of this step is not finite. The overwritten
        bytes are copied to the undo log.

        Args:
            unit: The unit whose gradient has just been reduced.

        Raises:
            OutOfMemoryError: The memory budget does not allow the undo log.
            StorageError: A disk failed.
        """
        step = self.runtime.step
        if step.phase is not Phase.BACKWARD or not step.is_boundary:
            return  # a later micro-batch adds to the gradient
        self._reduced.append(unit)
        in_use = [each for each in self._reduced if _is_in_use(each)]
        free = [each for each in self._reduced if each not in in_use]
        self._reduced = in_use
        for each in free:
            self._update(each)

    def _update(self, unit: Unit) -> None:
        if unit.number not in self.units or self._is_off or unit.number in self._done:
            return
        if self._decision is None:
            self._decision = self._expected()
        if self._decision is None or unit.number not in self.chosen():
            return
        tiles = self.units[unit.number]
        groups = list({shard.group: None for tile in tiles for _, shard in tile})
        if any(map(_has_frozen, groups)):
            return  # only after backward it is known which parameters have a gradient
        if any(group.guard.pending is not None for group in groups):
            return  # an earlier step's update is still deferred
        # The gradients keep these sums (`known_squares`), so the step need not compute them again
        sums = squares_of([group.gradient.sum for group in groups])
        is_finite = all(map(math.isfinite, chain.from_iterable(sums)))
        if self._decision.source is collected and not is_finite:
            return
        self._update_tiles(tiles, self._decision)
        self._done[unit.number] = groups
        self.updated += 1
        for group in groups:
            group.set_pending(self)

    def _update_tiles(self, tiles: Sequence[Tile], decision: Decision) -> None:
        """Update tiles by the expected decision, and log their earlier bytes."""
        flow = prefetch(tiles, decision.source, self._moments, self._settings)
        with outside_step(self.updater.guard, self._clock):
            while (tile := flow.next()) is not None:
                for _, shard in tile:
                    if not shard.is_absent(decision.source):
                        self.log.note(shard)
                self.updater.update(tile, decision)
                flow.release(tile)

    def chosen(self) -> frozenset[int]:
        """Return the numbers of the units that are updated during backward.

        The units are examined in the order of the model, and each one is chosen that fits into the
        rest of the undo log. The first call allocates the log, and logs a warning if no unit fits.
        Later calls return the same result.

        There are two reasons to prefer the first units. Backward computes their gradients last,
        when most activations have been freed and there is memory for the log. The next forward
        needs these units first, so their updates could not overlap with any computation of that
        forward.

        Raises:
            OutOfMemoryError: The memory budget does not allow the undo log.
        """
        if self._chosen is None:
            found = set()
            total = 0
            needed = self._log_bytes()
            for number, nbytes in needed.items():
                if total + nbytes <= self.budget:
                    total += nbytes
                    found.add(number)
            if needed and not found:
                log_once(
                    f"no unit is updated in backward: undo_bytes is {format_bytes(self.budget)}, "
                    f"the smallest unit needs {format_bytes(min(needed.values()))} and all need "
                    f"{format_bytes(sum(needed.values()))}.",
                    logging.WARNING,
                )
            self.log.reserve(total)
            self._chosen = frozenset(found)
        return self._chosen

    def _log_bytes(self) -> dict[int, int]:
        """Return the bytes that the log needs for each unit."""
        return {
            number: sum(self.log.bytes_of(shard) for tile in tiles for _, shard in tile)
            for number, tiles in self.units.items()
        }

    def conclude(self, due: Decision | None) -> frozenset[int]:
        """End the step: confirm or undo the updates that ran during backward.

        Either all updates are confirmed, or all are undone. The copies in the undo log are then
        discarded.

        Args:
            due: The factor of the gradients, the number of the update and the hyper-parameters of
                the step. The updates are undone if they used other values. None also undoes them,
                because the step updates nothing.

        Returns:
            The numbers of the units whose updates are confirmed; empty if there are none or if they
            were undone. The step must not update these units again.

        Raises:
            StorageError: A disk failed.
        """
        if due is not None and due.hypers is None:
            due = replace(due, hypers=hypers_of(self.updater.inner))
        if self._decision is None or due is None or not _agree(self._decision, due):
            self.flush()
        stands = frozenset(self._done)
        self._forget()
        self.log.clear()
        self._decision = None
        self._reduced = []
        self._is_off = False
        return stands

    def postpone(self, due: Decision, done: Collection[int]) -> None:
        self._has_run = True

    def discard(self) -> None:
        self.conclude(None)

    def flush(self) -> None:
        """Undo all updates that ran during backward.

        If there were any, no further unit is updated during this backward. Otherwise the call has
        no effect. The method is called before a program reads a state in the middle of a step.
        `finish` is another name of this method.

        Raises:
            StorageError: A disk failed.
        """
        if not self._done:
            return
        self._is_off = True
        self.undone += len(self._done)
        self._forget()
        with outside_step(self.updater.guard, self._clock):
            self.log.undo()

    finish = flush

    def flush_group(self, group: ParamGroup) -> None:
        """Undo all updates that ran during backward, because a state is read.

        If none ran, the call has no effect.

        Args:
            group: The parameter group whose state is read. The updates of all groups are undone.

        Raises:
            StorageError: A disk failed.
        """
        self.flush()

    def explain(self) -> list[str]:
        """Return one line for `engine.explain` about the updates during backward.

        The line contains the number of units that fit into the undo log, the number of updates that
        ran during backward, how many of them were undone, and the bytes that all units need in the
        log. If no unit can be updated during backward, it contains the reason instead.
        """
        if not self.units:
            return [
                "updates in backward: none, since the host updates no unit but the root with a "
                "sharded weight"
            ]
        fit = len(self._chosen) if self._chosen is not None else "some"
        stats = f"{self.updated} updates, {self.undone} of them undone"
        needed = format_bytes(sum(self._log_bytes().values()))
        return [
            f"updates in backward: {fit} of {len(self.units)} units fit undo_bytes, {stats}; all "
            f"units need {needed}"
        ]

    def _forget(self) -> None:
        for group in (group for groups in self._done.values() for group in groups):
            group.set_pending(None)
        self._done = {}


def works_by_shard(cls: type[Optimizer]) -> bool:
    """Return whether the update of one shard can be undone without the others.

    The result is True only for the classes of PyTorch and of this library that `BY_SHARD` lists.
    Their update of a shard changes only the shard and its optimizer state.

    Args:
        cls: The class of the optimizer.
    """
    is_known = cls.__module__.partition(".")[0] in ("torch", "deepseek_zero")
    return is_known and cls.__name__ in BY_SHARD


def unsupported_optimizer(cls: type[Optimizer]) -> UsageError:
    """Create the error for an optimizer that `super_offload` does not support.

    Args:
        cls: The class of the optimizer.

    Returns:
        The error, which the caller raises.
    """
    return UsageError(
        f"super_offload cannot be used with {cls.__name__}.",
        "Its step may change more than one shard's state, which could then not be undone by "
        "itself.",
        f"use one of {', '.join(sorted(BY_SHARD))}, or leave super_offload out.",
    )


@dataclass
class UndoLog:
    """Copies of the bytes that early updates have overwritten, to undo these updates.

    The copies of each updated shard are in one buffer on the host, in the order of the updates.
    """

    _inner: Optimizer
    _moments: Moments
    _scratch: TileScratch
    # For each update, the functions that undo it
    _entries: list[list[Callable[[], object]]] = field(default_factory=list)
    _memory: Tensor | None = None
    _used: int = 0

    def bytes_of(self, shard: MasterShard) -> int:
        """Return how many bytes of the log one update of a shard needs.

        Args:
            shard: The shard, whose main weight, weight and moments an update overwrites.
        """
        places = sum(stretch.itemsize for stretch in self._written(shard)) * shard.numel
        return places + sum(
            powers.nbytes for _, powers in self._moments.storages(shard) if powers is not None
        )

    def reserve(self, nbytes: int) -> None:
        """Allocate the buffer.

        Raises:
            OutOfMemoryError: memory_budget.device does not allow the allocation.
        """
        self._memory = self._scratch.take("undo", torch.uint8, CPU, nbytes)

    def note(self, shard: MasterShard) -> None:
        """Copy the states of a shard into the log before it is updated."""
        restores: list[Callable[[], object]] = [shard.group.guard.before_write]
        self._entries.append(restores)
        for stretch in self._written(shard):
            restores.append(partial(stretch.restore, self._copy(stretch.values())))
        for _, powers in self._moments.storages(shard):
            if powers is not None:
                restores.append(partial(powers.view(torch.uint8).copy_, self._copy(powers)))
        state = None
        counters = {}
        if shard.param in self._inner.state:
            state = dict(self._inner.state[shard.param])
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 0:
                    counters[key] = value.item()
        restores.append(partial(self._restore_state, shard.param, state, counters))

    def undo(self) -> None:
        """Restore all shards from the log, the last one first."""
        for restores in reversed(self._entries):
            for restore in restores:
                restore()
        self.clear()

    def clear(self) -> None:
        """Discard all copies, so that the log can be used for the next step.

        On a CPU the system may take the pages of the buffer until the next use.
        """
        self._entries = []
        self._used = 0
        if self._memory is not None and has_pages_to_return(self._memory):
            offer_pages(self._memory)

    def _restore_state(
        self, param: Tensor, state: dict[str, Any] | None, counters: dict[str, float]
    ) -> None:
        """Restore the state dict of a shard; None if it had none."""
        if state is None:
            self._inner.state.pop(param, None)
            self._moments.forget()
            return
        self._inner.state[param] = state
        for key, number in counters.items():
            state[key].fill_(number)

    def _written(self, shard: MasterShard) -> Iterator[StorageRange]:
        """Yield every range that an update of this shard writes, except counters."""
        yield from (stretch for stretch in storage_ranges(shard) if stretch.changes)
        yield from (stretch for stretch in staged_ranges(shard) if stretch.changes)
        yield from (stretch for stretch, _ in self._moments.storages(shard))

    def _copy(self, values: Tensor) -> Tensor:
        assert self._memory is not None
        copy = self._memory[self._used : self._used + values.nbytes]
        self._used += values.nbytes
        return copy.copy_(values.view(torch.uint8))


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


def _agree(left: Decision, right: Decision) -> bool:
    """Return whether both decisions lead to the same bits."""
    ours = left.hypers or []
    theirs = right.hypers or []
    if (left.factor, left.number, len(ours)) != (right.factor, right.number, len(theirs)):
        return False
    return all(map(_same, ours, theirs))


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether two parameter groups have the same hyper-parameters."""
    return left.keys() == right.keys() and all(
        type(one) is type(right[key])
        and (torch.equal(one, right[key]) if isinstance(one, Tensor) else one == right[key])
        for key, one in left.items()
    )
