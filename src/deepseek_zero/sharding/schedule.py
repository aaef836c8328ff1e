"""When each unit is gathered and released, as data: a pure function of sizes, order and memory window.

The order is recorded on the first step and is only a hint: a unit used out of order costs latency, never correctness.
Every rank computes the same schedule, and walks all of it, so that a unit one rank skips is still gathered by all.
`print(schedule)` shows lines such as ``G0 F0 G1 F1 R1``: gather, forward, release, backward (B) and reduce (S).
Called by runtime.py and report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .plan import PlanSettings


class Kind(Enum):
    """What an action does to its unit."""

    GATHER = "G"
    FORWARD = "F"
    BACKWARD = "B"
    RELEASE = "R"
    REDUCE = "S"


@dataclass(frozen=True)
class Action:
    kind: Kind
    unit: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.unit}"


@dataclass(frozen=True)
class Pass:
    """One walk over the units: `order[k]` is used k-th; `issue[k]` are the units whose gather starts by then, in
    order.
    """

    order: tuple[int, ...]
    issue: tuple[tuple[int, ...], ...]
    position: dict[int, int]

    @classmethod
    def over(cls, order: Sequence[int], issue: Sequence[Sequence[int]]) -> Pass:
        return cls(tuple(order), tuple(tuple(units) for units in issue), {unit: k for k, unit in enumerate(order)})


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
            found += [Action(Kind.GATHER, each) for each in self.forward.issue[k]]
            found.append(Action(Kind.FORWARD, unit))
            if unit not in self.kept and unit != root:
                found.append(Action(Kind.RELEASE, unit))
        if root not in self.kept:
            found.append(Action(Kind.RELEASE, root))
        for k, unit in enumerate(self.backward.order):
            found += [Action(Kind.GATHER, each) for each in self.backward.issue[k]]
            found.append(Action(Kind.BACKWARD, unit))
            if unit != root:
                found += [Action(Kind.REDUCE, unit), Action(Kind.RELEASE, unit)]
        return [*found, Action(Kind.REDUCE, root), Action(Kind.RELEASE, root)]

    def peak_live_numel(self, sizes: Sequence[int]) -> int:
        """Largest number of gathered elements alive at once."""
        live = peak = 0
        for action in self.actions():
            if action.kind is Kind.GATHER:
                live += sizes[action.unit]
            elif action.kind is Kind.RELEASE:
                live -= sizes[action.unit]
            peak = max(peak, live)
        return peak

    def __str__(self) -> str:
        return " ".join(map(str, self.actions()))


def plan_schedule(sizes: Sequence[int], order: Sequence[int], settings: PlanSettings) -> Schedule:
    """The schedule for units of these gathered sizes, used in this order; `order[0]` is the root, in use throughout.

    sizes: elements that gathering unit u brings here (0 where nothing is sharded).
    """
    root, rest = order[0], list(order[1:])
    kept = _kept(sizes, [root, *reversed(rest)], settings)
    ahead = settings.ahead_numel if settings.overlap else 0
    forward = _walk(sizes, list(order), frozenset(), settings.window_numel, ahead, kept)
    inference = _walk(sizes, list(order), frozenset(), settings.window_numel, ahead, frozenset())
    backward = _walk(sizes, [root, *reversed(rest)], kept, settings.window_numel, ahead, frozenset())
    return Schedule(forward, inference, backward, kept)


def _kept(sizes: Sequence[int], backward: Sequence[int], settings: PlanSettings) -> frozenset[int]:
    """Units worth keeping between forward and backward: the last used first, while window and reuse distance allow."""
    kept, total = set(), 0
    for unit in backward:
        distance = 2 * total  # elements used between this unit's forward and its backward
        total += sizes[unit]
        if total > settings.window_numel or distance > settings.keep_numel:
            break
        kept.add(unit)
    return frozenset(kept)


def _walk(
    sizes: Sequence[int],
    order: list[int],
    resident: frozenset[int],
    window: int,
    ahead: int,
    stays: frozenset[int],
) -> Pass:
    """Gathers as late as the window says and as early as `ahead` allows: at least the next unit, unless it is 0."""
    root = order[0]
    issued = set(resident)
    live = sum(sizes[unit] for unit in resident)
    issue: list[list[int]] = []
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
        if unit != root and unit not in stays:
            live -= sizes[unit]
    return Pass.over(order, issue)
