"""When each unit is gathered and released, as data: a pure function of sizes, order and memory window.

The order is recorded on the first step and is only a hint: a unit used out of order costs latency, never correctness.
Every rank computes the same schedule, and walks all of it, so that a unit one rank skips is still gathered by all.
`print(schedule)` shows lines such as ``G0 F0 G1 F1 R1``: gather, forward, release, backward (B) and reduce (S).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .spec import PlanSettings


class ActionKind(Enum):
    """What an action does to its unit."""

    GATHER = "G"
    FORWARD = "F"
    BACKWARD = "B"
    RELEASE = "R"
    REDUCE = "S"


@dataclass(frozen=True)
class Action:
    kind: ActionKind
    unit: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.unit}"


@dataclass(frozen=True)
class Pass:
    """One walk over the units: `order[k]` is used k-th; `issue[k]` are the units whose gather starts by then, in
    order; `ends[k]` those that are not needed after it, inner ones first.

    position, done: k of a unit's use and of its end; the root, needed throughout, has no end.
    """

    order: tuple[int, ...]
    issue: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    position: dict[int, int]
    done: dict[int, int]

    @classmethod
    def over(cls, order: Sequence[int], issue: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> Pass:
        return cls(
            tuple(order),
            tuple(map(tuple, issue)),
            tuple(map(tuple, ends)),
            {unit: k for k, unit in enumerate(order)},
            {unit: k for k, units in enumerate(ends) for unit in units},
        )


@dataclass(frozen=True)
class Schedule:
    """forward and backward walks, and the units kept gathered from forward to backward."""

    forward: Pass
    inference: Pass
    backward: Pass
    kept: frozenset[int]

    def actions(self) -> list[Action]:
        """Everything one training micro-batch does, in order; the root (first in forward) frames the rest."""
        found: list[Action] = []
        root = self.forward.order[0]
        for k, unit in enumerate(self.forward.order):
            found += [Action(ActionKind.GATHER, each) for each in self.forward.issue[k]]
            found.append(Action(ActionKind.FORWARD, unit))
            found += [Action(ActionKind.RELEASE, each) for each in self.forward.ends[k] if each not in self.kept]
        if root not in self.kept:
            found.append(Action(ActionKind.RELEASE, root))
        for k, unit in enumerate(self.backward.order):
            found += [Action(ActionKind.GATHER, each) for each in self.backward.issue[k]]
            found.append(Action(ActionKind.BACKWARD, unit))
            for each in self.backward.ends[k]:
                found += [Action(ActionKind.REDUCE, each), Action(ActionKind.RELEASE, each)]
        return [*found, Action(ActionKind.REDUCE, root), Action(ActionKind.RELEASE, root)]

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
    sizes: Sequence[int], order: Sequence[int], settings: PlanSettings, around: Mapping[int, int] | None = None
) -> Schedule:
    """The schedule for units of these gathered sizes, used in this order; `order[0]` is the root, in use throughout.

    sizes: elements that gathering unit u brings here (0 where nothing is sharded).  around: what `enclosing` found;
    such a unit is in use until the last one inside it is done, forward and backward.
    """
    around = around or {}
    forward, backward = list(order), _reverse(order, around)
    none: frozenset[int] = frozenset()
    at_turn = frozenset({order[0], *_ends(forward, around)[-1]}) if settings.streams_weights else none
    kept = _kept(sizes, backward, settings, at_turn)
    return Schedule(
        forward=_walk(sizes, forward, around, settings, none, kept),
        inference=_walk(sizes, forward, around, settings, none, none),
        backward=_walk(sizes, backward, around, settings, kept, none),
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


def _walk(
    sizes: Sequence[int],
    order: list[int],
    around: Mapping[int, int],
    settings: PlanSettings,
    resident: frozenset[int],
    stays: frozenset[int],
) -> Pass:
    """Gathers as late as the window says and as early as `ahead` allows: at least the next unit, unless it is 0."""
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
    return Pass.over(order, issue, ends)
