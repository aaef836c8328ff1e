"""The schedule of a training step as data: the actions of each pass over units.

`sharding/runtime.py` runs it; the memory plan and the pictures read it. `print(schedule)` shows
lines such as ``G0 F0 G1 F1 R1``:

    G  gather: all-gather a unit's weights, after fetching this rank's slice from another memory
    U  update: run a deferred update, or, after S or A, this step's update before the step
    F  forward
    B  backward
    R  release: free the gathered weights
    S  reduce: reduce-scatter a unit's gradients (all-reduce at stage 0), then store the sum if it
       is kept in another memory
    A  sum over replicas: add their sums (dp_replicate, or tp for shared parameters) once a step

If a unit takes the micro-batches of a batch one after the other, ``F1.2`` is the forward of
micro-batch 2 in unit 1.

An action runs after all actions before it in its lane. F and B run when the program calls the
module, R in forward when the unit's forward is over, S when the unit's gradients are complete, A
after all S, and U if an update is pending. schedule_proof.py checks schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby


class ActionKind(Enum):
    """The kinds of actions in a schedule, such as gather, forward and reduce."""

    GATHER = "G"
    UPDATE = "U"
    FORWARD = "F"
    RELEASE = "R"
    BACKWARD = "B"
    REDUCE = "S"
    ALL_REDUCE = "A"

    @property
    def computes(self) -> bool:
        """Whether the action is a forward or a backward, which uses the unit's weights."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD)


@dataclass(frozen=True)
class Action:
    """One action on one unit.

    Attributes:
        kind: What is done, for example gather or forward.
        unit: The number of the unit.
        micro_batch: The micro-batch of a forward or backward; None for the whole batch.
    """

    kind: ActionKind
    unit: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        part = "" if self.micro_batch is None else f".{self.micro_batch}"
        return f"{self.kind.value}{self.unit}{part}"


@dataclass(frozen=True)
class Pass:
    """The actions of one forward or one backward, in the order in which they are issued."""

    actions: tuple[Action, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The units in the order in which they compute, the root first."""
        return tuple(
            unit for unit, _ in groupby(each.unit for each in self.actions if each.kind.computes)
        )

    @cached_property
    def position(self) -> dict[int, int]:
        """The position of each unit in `order`."""
        return {unit: place for place, unit in enumerate(self.order)}

    @cached_property
    def computes(self) -> dict[int, tuple[Action, ...]]:
        """The forwards or backwards of each unit, in order (one for each micro-batch)."""
        found = dict[int, tuple[Action, ...]]()
        for action in self.actions:
            if action.kind.computes:
                found[action.unit] = (*found.get(action.unit, ()), action)
        return found

    @cached_property
    def gathers(self) -> tuple[tuple[int, ...], ...]:
        """For each position of `order`, the units to gather directly before it."""
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
        """The units in the order in which their gradients are reduced."""
        return self._units_of(ActionKind.REDUCE)

    @cached_property
    def all_reduces(self) -> tuple[int, ...]:
        """The units in the order in which their gradients are summed over replicas."""
        return self._units_of(ActionKind.ALL_REDUCE)

    @cached_property
    def released(self) -> frozenset[int]:
        """The units whose gathered weights this forward or backward frees."""
        return frozenset(self._units_of(ActionKind.RELEASE))

    @cached_property
    def updated(self) -> frozenset[int]:
        """The units whose optimizer update may run during this forward or backward."""
        return frozenset(self._units_of(ActionKind.UPDATE))

    @cached_property
    def released_before(self) -> dict[int, frozenset[int]]:
        """For each unit, the units whose gathered weights are freed before it computes."""
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
    """The actions of a training step: lists for its forwards and its backwards.

    Attributes:
        forward: The forward of a training step.
        inference: A forward without a backward.
        accumulate: A backward that does not end a step, without the actions of once per step.
        backward: A backward that ends a step.
        kept: The units that stay gathered from forward to backward.
    """

    forward: Pass
    inference: Pass
    accumulate: Pass
    backward: Pass
    kept: frozenset[int]

    def actions(self) -> list[Action]:
        """Return all actions of one micro-batch that ends a step."""
        return [*self.forward.actions, *self.backward.actions]

    def __str__(self) -> str:
        return " ".join(map(str, self.actions()))
