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

A program is made in two steps.  An order (`whole_batch`, `layerwise`) lists who computes when: F
and B alone. `plan_schedule` adds what that asks for, whatever the order: gathers ahead of uses,
releases and reductions behind them. `verify` proves the result, so that another order is another
list and no other rule.  (Stages on several ranks, and the messages between them, are
pipeline/schedule.py's.)

The order of units is recorded on the first step and is only a hint: a unit used out of order costs
latency, never correctness.  Every rank computes the same program and walks all of it, so that a
unit one rank skips is still gathered by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import groupby

from ..base.errors import UsageError
from .plan_settings import PlanSettings
from .spec import S
from .units import UnitPlan


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
    """The unit that the module of another stands in, from their full names, by number; the root (0)
    is left out.
    """
    numbers = {name: number for number, name in enumerate(names) if number}
    found = {}
    for name, number in numbers.items():
        outer = name.rpartition(".")[0]
        while outer and outer not in numbers:
            outer = outer.rpartition(".")[0]
        if outer:
            found[number] = numbers[outer]
    return found


# -- who computes when


def whole_batch(kind: ActionKind, order: Sequence[int]) -> list[Action]:
    """Return the order in which a whole batch goes through the units, one after the other."""
    return [Action(kind, unit) for unit in order]


def layerwise(
    kind: ActionKind, order: Sequence[int], micro_batches: int, cut: Collection[int]
) -> list[Action]:
    """Return the order in which each of the units in `cut` takes all micro-batches before the next
    unit does.

    Backward takes the last one first, as autograd does.
    """
    numbers = range(micro_batches) if kind is ActionKind.FORWARD else reversed(range(micro_batches))
    turns = list(numbers)
    return [
        Action(kind, unit, part) for unit in order for part in (turns if unit in cut else [None])
    ]


def cut_units(units: Sequence[UnitPlan]) -> frozenset[int]:
    """Return the units that take micro-batches in turn: all but the root, and tiles, which need no
    cutting.

    Raises `UsageError` if one stands inside another, or if there is none.
    """
    fix = "leave vertical_micro_batches out (gradient_accumulation_steps accumulates too)"
    for inner, outer in enclosing([unit.name for unit in units]).items():
        raise UsageError(
            f"unit '{units[inner].name}' stands inside unit '{units[outer].name}'.",
            "In vertical order it would be loaded again for every micro-batch of the outer one.",
            f"name units that do not contain each other (`units`), or {fix}.",
        )
    found = frozenset(number for number, unit in enumerate(units) if number and not unit.is_tile)
    if not found:
        raise UsageError(
            "the model has no units to take its micro-batches in turn.",
            "Nothing repeats in it, so all its weights belong to the root, which runs over the "
            "whole batch.",
            f"name its blocks in `units`, or {fix}.",
        )
    return found


# -- what that asks for


def schedule_units(
    units: Sequence[UnitPlan],
    settings: PlanSettings,
    order: Sequence[int] | None = None,
    *,
    updates_in_forward: Collection[int] = (),
    ahead: Collection[int] = (),
) -> Schedule:
    """Return the schedule of planned units.  order: None: as they are declared; the others as in
    `plan_schedule`.
    """
    grads = [group.plan.grad for unit in units for group in unit.trained]
    chosen_order = range(len(units)) if order is None else order
    cut = cut_units(units) if settings.layerwise_micro_batches > 1 else ()
    return plan_schedule(
        [unit.gathered_numel for unit in units],
        chosen_order,
        settings,
        enclosing([unit.name for unit in units]),
        updates_in_forward=updates_in_forward,
        ahead=ahead,
        cut=cut,
        reduces_each_backward=any(grad is not None and grad.placement is S for grad in grads),
        all_reduced=[
            number
            for number, unit in enumerate(units)
            if any(group.replicas > 1 for group in unit.groups)
        ],
    )


def plan_schedule(
    sizes: Sequence[int],
    order: Sequence[int],
    settings: PlanSettings,
    around: Mapping[int, int] | None = None,
    *,
    updates_in_forward: Collection[int] = (),
    ahead: Collection[int] = (),
    cut: Collection[int] = (),
    reduces_each_backward: bool = True,
    all_reduced: Collection[int] = (),
) -> Schedule:
    """The schedule for units of these gathered sizes, used in this order; `order[0]` is the root,
    in use throughout.

    sizes: elements that gathering unit u brings here (0 where nothing is sharded).  around: what
    `enclosing` found; such a unit is in use until the last one inside it is done, forward and
    backward.  updates_in_forward: units whose update may wait for the next forward.  ahead: units
    that may be updated in backward, ahead of their step.  cut: units that take the settings'
    micro-batches in turn.  reduces_each_backward: gradients are sharded, so that no
    backward leaves them to the one
    that ends a step.  all_reduced: units of whose sums replicas have summands.
    """
    around = around or {}
    forward = list(order)
    backward = _reverse(order, around)
    at_turn = (
        frozenset({order[0], *_ends(forward, around)[-1]})
        if settings.streams_weights
        else frozenset[int]()
    )
    kept = _kept(sizes, backward, settings, at_turn)
    work = _Work(
        sizes,
        around,
        settings,
        frozenset(updates_in_forward),
        frozenset(ahead),
        frozenset(all_reduced),
    )

    def computes(kind: ActionKind, units: Sequence[int]) -> list[Action]:
        return (
            layerwise(kind, units, settings.layerwise_micro_batches, cut)
            if cut
            else whole_batch(kind, units)
        )

    schedule = Schedule(
        forward=work.lower(computes(ActionKind.FORWARD, forward), stays=kept),
        inference=work.lower(whole_batch(ActionKind.FORWARD, forward)),
        accumulate=work.lower(
            computes(ActionKind.BACKWARD, backward), resident=kept, reduces=reduces_each_backward
        ),
        backward=work.lower(
            computes(ActionKind.BACKWARD, backward), resident=kept, reduces=True, ends_step=True
        ),
        kept=kept,
    )
    verify(schedule, around, reduces_each_backward=reduces_each_backward, all_reduced=all_reduced)
    return schedule


@dataclass(frozen=True)
class _Work:
    """What an order of computing is given to become a program; as in `plan_schedule`."""

    sizes: Sequence[int]
    around: Mapping[int, int]
    settings: PlanSettings
    updates_in_forward: frozenset[int]
    ahead: frozenset[int]
    all_reduced: frozenset[int]

    def lower(
        self,
        computes: Sequence[Action],
        *,
        resident: frozenset[int] = frozenset(),
        stays: frozenset[int] = frozenset(),
        reduces: bool = False,
        ends_step: bool = False,
    ) -> Pass:
        """Return the pass that computes in this order.

        resident, stays: units that are gathered as it begins, and as it ends.  reduces: sum
        gradients.  ends_step: do what is done once a step.
        """
        turns = [
            (unit, list(mine)) for unit, mine in groupby(computes, key=lambda action: action.unit)
        ]
        units = [unit for unit, _ in turns]
        gathers = _gathers(self.sizes, units, self.around, self.settings, resident, stays)
        ends = _ends(units, self.around)
        root = units[0]
        actions = list[Action]()
        for place, (_, mine) in enumerate(turns):
            for unit in gathers[place]:
                if mine[0].kind is ActionKind.FORWARD and unit in self.updates_in_forward:
                    actions.append(Action(ActionKind.UPDATE, unit))
                actions.append(Action(ActionKind.GATHER, unit))
            actions += mine
            is_last = place == len(turns) - 1
            for unit in [*ends[place], *([root] if is_last else [])]:
                if reduces:
                    actions += self._sums(
                        ActionKind.REDUCE, [unit], ends_step and unit not in self.all_reduced
                    )
                if is_last and unit == root and ends_step:
                    sums = [each.unit for each in actions if each.kind is ActionKind.REDUCE]
                    summed = [each for each in sums if each in self.all_reduced]
                    actions += self._sums(ActionKind.ALL_REDUCE, summed, True)
                actions += [Action(ActionKind.RELEASE, unit)] if unit not in stays else []
        return Pass(tuple(actions))

    def _sums(self, kind: ActionKind, units: Sequence[int], is_total: bool) -> Iterator[Action]:
        """Yield the sums of units, and behind each the update that it is the last sum for."""
        for unit in units:
            yield Action(kind, unit)
            if is_total and unit in self.ahead:
                yield Action(ActionKind.UPDATE, unit)


# -- what every program keeps to


def verify(
    schedule: Schedule,
    around: Mapping[int, int] | None = None,
    *,
    reduces_each_backward: bool = True,
    all_reduced: Collection[int] = (),
) -> None:
    """Prove a schedule, whichever order it came from; raise `AssertionError` that names the action
    which breaks a rule.

    A unit computes only while it is gathered, with all that is around it; it is gathered once in a
    pass, and nothing stays gathered behind the last.  Each micro-batch goes forward once, and then
    backward once.  Gradients are summed once, when the last micro-batch of the unit has gone
    backward; over replicas once a step, when every unit's sum over the shards has been made, since
    a rank that skips units would keep others waiting.  An update comes before its unit's gather, or
    behind the last sum.
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
            f"units {sorted(proof.live)} stay gathered behind a forward without backward"
        )


@dataclass
class _Proof:
    """Where a program has come to.  done: forwards and backwards.  open: forwards of each unit
    without backward yet.
    """

    around: Mapping[int, int]
    all_reduced: frozenset[int]
    live: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)  # in this pass
    updated: set[int] = field(default_factory=set)  # in this pass
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
                behind = " ".join(map(str, walk.actions[max(0, place - 6) : place]))
                raise AssertionError(f"{action} {broken}, in ... {behind} {action} ...")

    def conclude(self, *, reduces: bool, ends_step: bool) -> None:
        """Raise if something is left over that a micro-batch must do."""
        units = set(self.open)
        totals = units & self.all_reduced if ends_step else set[int]()
        left = [
            ("stay gathered", self.live),
            ("never went backward", {unit for unit, count in self.open.items() if count}),
            ("are summed or not, against the plan", self.reduced ^ (units if reduces else set())),
            ("are summed over replicas or not, against the plan", self.totals ^ totals),
        ]
        for what, found in left:
            if found:
                raise AssertionError(f"units {sorted(found)} {what}")

    def _rule_broken_by(self, action: Action, root: int) -> str:
        """Take one action; return the rule it breaks, "" for none."""
        unit = action.unit
        broken = ""
        match action.kind:
            case ActionKind.GATHER:
                broken = "gathers what is gathered" if unit in self.live else ""
                broken = broken or (
                    "is the second gather of a pass" if unit in self.gathered else ""
                )
                self.live.add(unit)
                self.gathered.add(unit)
            case ActionKind.RELEASE:
                broken = "" if unit in self.live else "releases what is not gathered"
                self.live.discard(unit)
            case ActionKind.FORWARD | ActionKind.BACKWARD:
                missing = {root, *_outward(unit, self.around)} - self.live
                broken = f"uses {sorted(missing)}, which is not gathered" if missing else ""
                broken = broken or ("computes a second time" if action in self.done else "")
                if (
                    action.kind is ActionKind.BACKWARD
                    and replace(action, kind=ActionKind.FORWARD) not in self.done
                ):
                    broken = broken or "goes backward without a forward"
                self.done.add(action)
                self.open[unit] += 1 if action.kind is ActionKind.FORWARD else -1
            case ActionKind.REDUCE:
                broken = "is the second sum of a backward" if unit in self.reduced else ""
                broken = broken or (
                    "comes before the last backward of its unit" if self.open[unit] else ""
                )
                self.reduced.add(unit)
            case ActionKind.ALL_REDUCE:
                broken = "is the second sum over replicas" if unit in self.totals else ""
                if len(self.reduced) < len(self.open):
                    missing = set(self.open) - self.reduced
                    broken = broken or f"comes before the sums of {sorted(missing)} over the shards"
                self.totals.add(unit)
            case ActionKind.UPDATE:
                summed = self.totals if unit in self.all_reduced else self.reduced
                if self.is_forward:
                    broken = "updates what is gathered" if unit in self.live else ""
                else:
                    broken = "comes before the last sum of its unit" if unit not in summed else ""
                broken = broken or (
                    "is the second update of a pass" if unit in self.updated else ""
                )
                self.updated.add(unit)
        return broken


# -- orders, ends and gathers of a walk


def _reverse(order: Sequence[int], around: Mapping[int, int]) -> list[int]:
    """The order of backward: last used first, but a unit before those inside it, since its output
    is.
    """
    root, *rest = order
    inside: dict[int, list[int]] = {unit: [] for unit in order}
    for unit in rest:
        inside[around.get(unit, root)].append(unit)
    found = []
    to_come = [root]
    while to_come:
        found.append(to_come.pop())
        to_come += inside[found[-1]]
    return found


def _ends(order: Sequence[int], around: Mapping[int, int]) -> list[list[int]]:
    """For each place of a walk the units that are not needed after it, inner ones first."""
    last = {each: k for k, unit in enumerate(order[1:], 1) for each in _outward(unit, around)}
    found = [
        [each for each in _outward(unit, around) if last[each] == k]
        for k, unit in enumerate(order[1:], 1)
    ]
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
    """Units worth keeping between forward and backward: the last used first, while window and reuse
    distance allow.

    at_turn: units in use as forward ends and again as backward begins, kept whatever the window:
    they are alive together in any case, so that letting them go would repeat a load and lower no
    peak.
    """
    kept = set[int]()
    total = 0
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
    """For each place of a walk the units whose gather stands there: as late as the window says and
    as early as `ahead` allows, which is at least the next unit, unless it is 0.
    """
    window = settings.window_numel
    ahead = settings.ahead_numel if settings.overlap else 0
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
            # The next one may be larger than `ahead`
            is_far = early + sizes[later] > ahead and (early or not ahead)
            if is_far or live + sizes[later] > window:
                break
            now.append(later)
            issued.add(later)
            early += sizes[later]
            live += sizes[later]
        issue.append(now)
        live -= sum(sizes[each] for each in ends[k] if each not in stays)
    return issue
