"""The program of a training step, as data: a pure function of units' sizes, their order and the
memory window.

It is a list of actions for each pass; `sharding/executor.py` runs it, the memory plan and the
pictures read it. `print(schedule)` shows lines such as ``G0 F0 G1 F1 R1``:

    G  gather: all-gather a unit's weights; out of another memory, fetch this rank's slice first
    U  update: carry out the update that an earlier step deferred, or, behind S or A, this step's,
       ahead of its end
    F  forward        B  backward; ``F1.2``: of micro-batch 2, where a unit takes the micro-batches
       of a batch in turn
    R  release: let the gathered weights go
    S  reduce: reduce-scatter a unit's gradients; to another memory, then store this rank's slice
    A  all-reduce: add up the sums that replicas (dp_replicate; tp, of what its ranks share) have
       of a unit, once a step

Each action runs when all before it in its lane have run, and not before: F and B when the program
comes there, R in forward when the unit's forward is over, S when the unit's gradients are complete,
A when all S have run, U where an update is pending.

Schedules are made in make_schedule.py and proven in schedule_proof.py. Stages on several ranks, and
the messages between them, are pipeline/schedule.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby


class ActionKind(Enum):
    """The kinds of actions on a unit."""

    GATHER = "G"
    UPDATE = "U"
    FORWARD = "F"
    RELEASE = "R"
    BACKWARD = "B"
    REDUCE = "S"
    ALL_REDUCE = "A"

    @property
    def computes(self) -> bool:
        """Whether the model computes: the unit's weights are in use."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD)


@dataclass(frozen=True)
class Action:
    """One thing done with one unit.

    micro_batch: the part of the batch that a forward or backward takes; None: all of it.
    """

    kind: ActionKind
    unit: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}{self.unit}" + (
            "" if self.micro_batch is None else f".{self.micro_batch}"
        )


@dataclass(frozen=True)
class Pass:
    """One walk over the units, as a program.  The rest is read off its actions."""

    actions: tuple[Action, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Units in the order they compute in; the root first."""
        return tuple(
            unit for unit, _ in groupby(each.unit for each in self.actions if each.kind.computes)
        )

    @cached_property
    def position(self) -> dict[int, int]:
        """Unit -> its place in `order`."""
        return {unit: place for place, unit in enumerate(self.order)}

    @cached_property
    def computes(self) -> dict[int, tuple[Action, ...]]:
        """Unit -> its forwards or backwards, in order: one, or one for each micro-batch."""
        found = dict[int, tuple[Action, ...]]()
        for action in self.actions:
            if action.kind.computes:
                found[action.unit] = (*found.get(action.unit, ()), action)
        return found

    @cached_property
    def gathers(self) -> tuple[tuple[int, ...], ...]:
        """For each place of `order` the units whose gather stands before it and behind the place
        before.
        """
        found: list[list[int]] = [[]]
        computing: int | None = None
        for action in self.actions:
            if action.kind is ActionKind.GATHER:
                found[-1].append(action.unit)
            elif action.kind.computes and action.unit != computing:
                found.append([])
                computing = action.unit
        return tuple(map(tuple, found[:-1]))

    @cached_property
    def reduces(self) -> tuple[int, ...]:
        """Units in the order their gradients are reduced in."""
        return self._units_of(ActionKind.REDUCE)

    @cached_property
    def all_reduces(self) -> tuple[int, ...]:
        """Units in the order their sums are added up over the replicas."""
        return self._units_of(ActionKind.ALL_REDUCE)

    @cached_property
    def released(self) -> frozenset[int]:
        """Units that the walk lets go."""
        return frozenset(self._units_of(ActionKind.RELEASE))

    @cached_property
    def updated(self) -> frozenset[int]:
        """Units whose update this walk may carry out."""
        return frozenset(self._units_of(ActionKind.UPDATE))

    def released_before(self, unit: int) -> frozenset[int]:
        """Units that are let go before one computes."""
        return self._released_before[unit]

    @cached_property
    def _released_before(self) -> dict[int, frozenset[int]]:
        found = dict[int, frozenset[int]]()
        gone = set[int]()
        for action in self.actions:
            if action.kind is ActionKind.RELEASE:
                gone.add(action.unit)
            elif action.kind.computes and action.unit not in found:
                found[action.unit] = frozenset(gone)
        return found

    def _units_of(self, kind: ActionKind) -> tuple[int, ...]:
        return tuple(action.unit for action in self.actions if action.kind is kind)


@dataclass(frozen=True)
class Schedule:
    """The programs of forward, of a forward without backward, and of backward.

    accumulate: of a backward that does not end a step: it leaves out what is done once a step.
    kept: units that stay gathered from forward to backward.
    """

    forward: Pass
    inference: Pass
    accumulate: Pass
    backward: Pass
    kept: frozenset[int]

    def actions(self) -> list[Action]:
        """Everything one training micro-batch that ends a step does, in order; the root (first in
        forward) frames the rest.
        """
        return [*self.forward.actions, *self.backward.actions]

    def passes(self, accumulation: int) -> list[tuple[Pass, int]]:
        """Return the passes of a step of so many forwards and backwards, and how often each runs in
        it.
        """
        return [
            (self.forward, accumulation),
            (self.accumulate, accumulation - 1),
            (self.backward, 1),
        ]

    def __str__(self) -> str:
        return " ".join(map(str, self.actions()))
