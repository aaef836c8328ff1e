"""Check that a schedule keeps the rules for any order of its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from .enclosed_units import outward
from .schedule import Action, ActionKind, Pass, Schedule


def verify(
    schedule: Schedule,
    around: Mapping[int, int] | None = None,
    *,
    reduces_each_backward: bool = True,
    all_reduced: Collection[int] = (),
) -> None:
    """Raise an error if a schedule breaks a rule, for example uses a weight that is not gathered.

    A unit computes only while it and all units around it are gathered. It is gathered once in each
    forward or backward, and nothing stays gathered after the step. Each micro-batch runs forward
    once and then backward once. Gradients are summed once, after the last micro-batch of the unit
    has run backward. Sums over replicas run once a step, after the sums of all units over the
    shards, because a rank that skips units would otherwise keep others waiting. An update runs
    before its unit's gather or after its last sum.

    Args:
        schedule: The schedule to check.
        around: For each unit inside another, the number of the innermost unit around it.
        reduces_each_backward: Whether every backward reduces gradients.
        all_reduced: The units whose gradients are also summed over replicas.

    Raises:
        AssertionError: An action breaks a rule; the message names both.
    """
    for backward, ends_step in ((schedule.accumulate, False), (schedule.backward, True)):
        proof = _Proof(around or {}, frozenset(all_reduced))
        proof.follow(schedule.forward)
        proof.follow(backward)
        proof.conclude(reduces=ends_step or reduces_each_backward, ends_step=ends_step)
    proof = _Proof(around or {}, frozenset(all_reduced))
    proof.follow(schedule.inference)
    if proof.live:
        raise AssertionError(
            f"units {sorted(proof.live)} remain gathered after a forward without backward"
        )


@dataclass
class _Proof:
    """The state of the check.

    Attributes:
        done: The forwards and backwards so far.
        open: For each unit, the forwards without a backward so far.
    """

    around: Mapping[int, int]
    all_reduced: frozenset[int]
    live: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)  # units, in this pass
    updated: set[int] = field(default_factory=set)  # units, in this pass
    done: set[Action] = field(default_factory=set)
    open: Counter[int] = field(default_factory=Counter)
    reduced: set[int] = field(default_factory=set)
    totals: set[int] = field(default_factory=set)
    is_forward: bool = True

    def follow(self, walk: Pass) -> None:
        self.gathered = set()
        self.updated = set()
        root = walk.order[0]
        self.is_forward = walk.computes[root][0].kind is ActionKind.FORWARD
        for place, action in enumerate(walk.actions):
            if broken := self._rule_broken_by(action, root):
                before = " ".join(map(str, walk.actions[max(0, place - 6) : place]))
                raise AssertionError(f"{action} {broken}, in ... {before} {action} ...")

    def conclude(self, *, reduces: bool, ends_step: bool) -> None:
        """Raise an error if a micro-batch is incomplete."""
        units = set(self.open)
        totals = units & self.all_reduced if ends_step else set[int]()
        left = [
            ("remain gathered", self.live),
            ("have no backward", {unit for unit, count in self.open.items() if count}),
            ("are reduced or not, unlike the plan", self.reduced ^ (units if reduces else set())),
            ("are summed over replicas or not, unlike the plan", self.totals ^ totals),
        ]
        for what, found in left:
            if found:
                raise AssertionError(f"units {sorted(found)} {what}")

    def _rule_broken_by(self, action: Action, root: int) -> str:
        """Apply one action and return the rule that it breaks, or an empty string."""
        unit = action.unit
        broken = ""
        match action.kind:
            case ActionKind.GATHER:
                broken = "gathers a gathered unit" if unit in self.live else ""
                broken = broken or (
                    "is the second gather of a pass" if unit in self.gathered else ""
                )
                self.live.add(unit)
                self.gathered.add(unit)
            case ActionKind.RELEASE:
                broken = "" if unit in self.live else "releases a unit that is not gathered"
                self.live.discard(unit)
            case ActionKind.FORWARD | ActionKind.BACKWARD:
                missing = {root, *outward(unit, self.around)} - self.live
                broken = f"uses {sorted(missing)}, which is not gathered" if missing else ""
                broken = broken or ("computes a second time" if action in self.done else "")
                if (
                    action.kind is ActionKind.BACKWARD
                    and replace(action, kind=ActionKind.FORWARD) not in self.done
                ):
                    broken = broken or "has no forward"
                self.done.add(action)
                self.open[unit] += 1 if action.kind is ActionKind.FORWARD else -1
            case ActionKind.REDUCE:
                broken = "is the second reduction of a backward" if unit in self.reduced else ""
                broken = broken or (
                    "is before the last backward of its unit" if self.open[unit] else ""
                )
                self.reduced.add(unit)
            case ActionKind.ALL_REDUCE:
                broken = "is the second sum over replicas" if unit in self.totals else ""
                if len(self.reduced) < len(self.open):
                    missing = set(self.open) - self.reduced
                    broken = broken or f"is before the reductions of {sorted(missing)}"
                self.totals.add(unit)
            case ActionKind.UPDATE:
                summed = self.totals if unit in self.all_reduced else self.reduced
                if self.is_forward:
                    broken = "updates a gathered unit" if unit in self.live else ""
                else:
                    broken = (
                        "is before the last reduction of its unit" if unit not in summed else ""
                    )
                broken = broken or (
                    "is the second update of a pass" if unit in self.updated else ""
                )
                self.updated.add(unit)
        return broken
