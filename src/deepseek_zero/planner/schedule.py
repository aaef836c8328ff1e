"""The program of a training step, as data: a pure function of units' sizes, their order and the memory window.

It is a list of actions for each pass; `sharding/executor.py` runs it, the memory plan and the pictures read it.
`print(schedule)` shows lines such as ``G0 F0 G1 F1 R1``:

    G  gather: all-gather a unit's weights; out of another memory, fetch this rank's slice first
    U  update: carry out the update that an earlier step deferred, or (after S) the one of this step, ahead of its end
    F  forward        B  backward
    R  release: let the gathered weights go
    S  reduce: reduce-scatter a unit's gradients; to another memory, store this rank's slice after it

Each action runs when all before it in its lane have run, and not before: F and B when the program comes there, R in
forward when the unit's forward is over, S when the unit's gradients are complete, U where an update is pending.

The order of units is recorded on the first step and is only a hint: a unit used out of order costs latency, never
correctness.  Every rank computes the same program and walks all of it, so that a unit one rank skips is still gathered
by all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from .spec import PlanSettings


class ActionKind(Enum):
    """The kinds of actions on a unit."""

    GATHER = "G"
    UPDATE = "U"
    FORWARD = "F"
    RELEASE = "R"
    BACKWARD = "B"
    REDUCE = "S"


@dataclass(frozen=True)
class Action:
    kind: ActionKind
    unit: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.unit}"


@dataclass(frozen=True)
class Pass:
    """One walk over the units, as a program.  The rest is read off its actions."""

    actions: tuple[Action, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Units in the order they compute in; the root first."""
        return tuple(action.unit for action in self.actions if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD))

    @cached_property
    def position(self) -> dict[int, int]:
        """Unit -> its place in `order`."""
        return {unit: place for place, unit in enumerate(self.order)}

    @cached_property
    def gathers(self) -> tuple[tuple[int, ...], ...]:
        """For each place of `order` the units whose gather stands before it and behind the place before."""
        found: list[list[int]] = [[]]
        for action in self.actions:
            if action.kind is ActionKind.GATHER:
                found[-1].append(action.unit)
            elif action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                found.append([])
        return tuple(map(tuple, found[:-1]))

    @cached_property
    def reduces(self) -> tuple[int, ...]:
        """Units in the order their gradients are reduced in."""
        return self._units_of(ActionKind.REDUCE)

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
        found, gone = {}, set[int]()
        for action in self.actions:
            if action.kind is ActionKind.RELEASE:
                gone.add(action.unit)
            elif action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                found[action.unit] = frozenset(gone)
        return found

    def _units_of(self, kind: ActionKind) -> tuple[int, ...]:
        return tuple(action.unit for action in self.actions if action.kind is kind)


@dataclass(frozen=True)
class Schedule:
    """The programs of forward, of a forward without backward, and of backward.

    kept: units that stay gathered from forward to backward.
    """

    forward: Pass
    inference: Pass
    backward: Pass
    kept: frozenset[int]

    def actions(self) -> list[Action]:
        """Everything one training micro-batch does, in order; the root (first in forward) frames the rest."""
        return [*self.forward.actions, *self.backward.actions]

    def peak_live_numel(self, sizes: Sequence[int]) -> int:
        """Largest number of gathered elements alive at once."""
        live = peak = 0
        for action in self.actions():
            if action.kind is ActionKind.GATHER:
                live += sizes[action.unit]
            elif action.kind is ActionKind.RELEASE:
                live -= sizes[action.unit]
            peak = max(peak, live)
        return peak

    def __str__(self) -> str:
        return " ".join(map(str, self.actions()))


def enclosing(names: Sequence[str]) -> dict[int, int]:
    """The unit that the module of another stands in, from their full names, by number; the root (0) is left out."""
    numbers = {name: number for number, name in enumerate(names) if number}
    found = {}
    for name, number in numbers.items():
        outer = name.rpartition(".")[0]
        while outer and outer not in numbers:
            outer = outer.rpartition(".")[0]
        if outer:
            found[number] = numbers[outer]
    return found


def plan_schedule(
    sizes: Sequence[int],
    order: Sequence[int],
    settings: PlanSettings,
    around: Mapping[int, int] | None = None,
    *,
    deferred: Collection[int] = (),
    ahead: Collection[int] = (),
) -> Schedule:
    """The schedule for units of these gathered sizes, used in this order; `order[0]` is the root, in use throughout.

    sizes: elements that gathering unit u brings here (0 where nothing is sharded).  around: what `enclosing` found;
    such a unit is in use until the last one inside it is done, forward and backward.  deferred: units whose update may
    wait for the next forward.  ahead: units that may be updated in backward, ahead of their step.
    """
    around = around or {}
    forward, backward = list(order), _reverse(order, around)
    none: frozenset[int] = frozenset()
    at_turn = frozenset({order[0], *_ends(forward, around)[-1]}) if settings.streams_weights else none
    kept = _kept(sizes, backward, settings, at_turn)

    def walk(kind: ActionKind, resident: frozenset[int], stays: frozenset[int]) -> Pass:
        units = backward if kind is ActionKind.BACKWARD else forward
        gathers, ends = _gathers(sizes, units, around, settings, resident, stays), _ends(units, around)
        actions: list[Action] = []
        for place, unit in enumerate(units):
            for each in gathers[place]:
                if kind is ActionKind.FORWARD and each in deferred:
                    actions.append(Action(ActionKind.UPDATE, each))
                actions.append(Action(ActionKind.GATHER, each))
            actions.append(Action(kind, unit))
            for each in [*ends[place], *([units[0]] if place == len(units) - 1 else [])]:
                if kind is ActionKind.BACKWARD:
                    actions.append(Action(ActionKind.REDUCE, each))
                    actions += [Action(ActionKind.UPDATE, each)] if each in ahead else []
                actions += [Action(ActionKind.RELEASE, each)] if each not in stays else []
        return Pass(tuple(actions))

    return Schedule(
        forward=walk(ActionKind.FORWARD, none, kept),
        inference=walk(ActionKind.FORWARD, none, none),
        backward=walk(ActionKind.BACKWARD, kept, none),
        kept=kept,
    )


def _reverse(order: Sequence[int], around: Mapping[int, int]) -> list[int]:
    """The order of backward: last used first, but a unit before those inside it, since its output is."""
    root, *rest = order
    inside: dict[int, list[int]] = {unit: [] for unit in order}
    for unit in rest:
        inside[around.get(unit, root)].append(unit)
    found, to_come = [], [root]
    while to_come:
        found.append(to_come.pop())
        to_come += inside[found[-1]]
    return found


def _ends(order: Sequence[int], around: Mapping[int, int]) -> list[list[int]]:
    """For each place of a walk the units that are not needed after it, inner ones first."""
    last = {each: k for k, unit in enumerate(order[1:], 1) for each in _outward(unit, around)}
    found = [[each for each in _outward(unit, around) if last[each] == k] for k, unit in enumerate(order[1:], 1)]
    return [[], *found]


def _outward(unit: int, around: Mapping[int, int]) -> Iterator[int]:
    """A unit and those around it, the root left out."""
    yield unit
    while unit in around:
        unit = around[unit]
        yield unit


def _kept(
    sizes: Sequence[int], backward: Sequence[int], settings: PlanSettings, at_turn: frozenset[int]
) -> frozenset[int]:
    """Units worth keeping between forward and backward: the last used first, while window and reuse distance allow.

    at_turn: units in use as forward ends and again as backward begins, kept whatever the window: they are alive
    together in any case, so that letting them go would repeat a load and lower no peak.
    """
    kept, total = set[int](), 0
    for unit in backward:
        distance = 2 * total  # elements used between this unit's forward and its backward
        total += sizes[unit]
        fits = total <= settings.window_numel or {*kept, unit} <= at_turn
        if not fits or distance > settings.keep_numel:
            break
        kept.add(unit)
    return frozenset(kept)


def _gathers(
    sizes: Sequence[int],
    order: list[int],
    around: Mapping[int, int],
    settings: PlanSettings,
    resident: frozenset[int],
    stays: frozenset[int],
) -> list[list[int]]:
    """For each place of a walk the units whose gather stands there: as late as the window says and as early as `ahead`
    allows, which is at least the next unit, unless it is 0.
    """
    window, ahead = settings.window_numel, settings.ahead_numel if settings.overlap else 0
    issued = set(resident)
    live = sum(sizes[unit] for unit in resident)
    issue: list[list[int]] = []
    ends = _ends(order, around)
    for k, unit in enumerate(order):
        now = []
        if unit not in issued:
            now.append(unit)
            issued.add(unit)
            live += sizes[unit]
        early = 0
        for later in order[k + 1 :]:
            if later in issued:
                continue
            is_far = early + sizes[later] > ahead and (early or not ahead)  # the next one may be larger than `ahead`
            if is_far or live + sizes[later] > window:
                break
            now.append(later)
            issued.add(later)
            early += sizes[later]
            live += sizes[later]
        issue.append(now)
        live -= sum(sizes[each] for each in ends[k] if each not in stays)
    return issue
