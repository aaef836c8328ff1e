"""Runs the program of a step: the actions of planner/schedule.py, when torch's hooks say that they
may run.

A `Unit` is parameter groups that are gathered, released and reduced together (a transformer block,
say), and owns their state machine.  `Executor` is the order in which units move.  Two lanes carry
collectives, each in the program's order
on every rank: "gather" (G) and "reduce" (S, and A among the replicas).  Every rank runs the whole
program, actions of units that it skips included.  Releases (R) are decided here and nowhere else,
updates (U) are the optimizer's, which `Updates` stands for.  Forwards and backwards (F, B) are the
model's; where a unit takes micro-batches in turn, it asks `forwards` which come next.

A model that strays from the program is served on demand: a unit that is used before its turn has
the program run up to it; one that is used again is gathered again.  Until the ranks have agreed on
an order, the order of uses is recorded; so is who reads whose parameters.

A gradient that arrives after its unit was reduced (a block shared by two reentrant checkpoints) is
added in a second reduction, which all ranks agree on before the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from ..base.errors import UsageError
from ..base.progress import LongWork
from ..comm.collectives import Comm, OrderedIssueQueue, Pending
from ..planner.plan_settings import PlanSettings
from ..planner.schedule import Action, Pass, Schedule, schedule_units
from ..planner.units import UnitPlan
from .group import ParamInfo
from .param_group import ParamGroup
from .tuning import Tuner


class UnitState(Enum):
    """The states of a unit."""

    SHARDED = "at rest"  # each rank holds its slices; parameters are AtRest
    UNSHARDING = "gathering"  # the all-gather is under way; the buffer belongs to the transport
    UNSHARDED = "in use"  # parameters view the gathered buffer


MOVES = {
    (UnitState.SHARDED, UnitState.UNSHARDING),
    (UnitState.UNSHARDING, UnitState.UNSHARDED),
    (UnitState.UNSHARDED, UnitState.SHARDED),
}


class Unit:
    """Groups of parameters that move together. `module`: its forward needs them; the root unit has
    the remaining ones.

    is_tile: a unit for the sake of memory alone, wherever it stands (auto_wrap_policy.py).
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        number: int,
        *,
        is_tile: bool = False,
    ) -> None:
        self.name = name
        self.module = module
        self.number = number
        self._state = UnitState.SHARDED
        self._gathers: list[Pending] = []
        self._reduces: list[Pending] = []
        # Id(param) of gradients that arrived in the backward under way
        self.arrived: set[int] = set()
        self.set_groups(groups)
        self.reduced_in_backward = False
        self.is_held = False  # stays gathered whatever the program says (`Executor.hold`)
        self.is_promoted = False  # precision "auto" found that 16 bits do not do here
        self.is_tile = is_tile
        self.watch: Callable[[Unit], None] | None = (
            None  # is called when its weights have been gathered
        )

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replace the unit's groups."""
        self.groups = list(groups)
        self.sharded = [group for group in self.groups if group.is_sharded]
        self.trained = [group for group in self.groups if group.trainable]
        trained = [(member, group) for group in self.trained for member in group.members]
        self.group_of = {id(member.param): group for member, group in trained}
        self.expected: set[int] = {
            id(member.param) for member, _ in trained if not member.is_frozen
        }

    @property
    def has_frozen_shards(self) -> bool:
        return any(group.is_idle or not group.trainable for group in self.sharded)

    @property
    def waits_for_states(self) -> bool:
        """Return whether an update of a sharded weight is pending whose states come from another
        memory.
        """
        return any(
            group.guard.pending is not None and group.plan.is_offloaded for group in self.sharded
        )

    @property
    def state(self) -> UnitState:
        return self._state

    def _enter(self, state: UnitState) -> None:
        if (self._state, state) not in MOVES:
            raise AssertionError(
                f"unit '{self.name}' cannot go from {self._state.value} to {state.value}"
            )
        self._state = state

    @property
    def planned(self) -> UnitPlan:
        """Return the plans of its groups as they are now."""
        return UnitPlan(self.name, tuple(group.planned for group in self.groups), self.is_tile)

    @property
    def gathered_numel(self) -> int:
        """Return the elements that a gather brings to this rank."""
        return sum(group.layout.padded_numel for group in self.sharded)

    @property
    def is_copied(self) -> bool:
        """Return whether a gather makes copies, which a release frees; else weights are used in the
        memory they lie in.
        """
        return any(group.weight_gather.makes_copies for group in self.sharded)

    @property
    def numel(self) -> int:
        """Return the elements of all its groups, padding included: the largest message about it."""
        return sum(group.layout.padded_numel for group in self.groups)

    def explain(self) -> list[str]:
        """Return one line per group: memory and dtype of weight, gradient, master and moments."""
        return self.planned.explain(self.number)

    def members(self) -> list[ParamInfo]:
        return [member for group in self.groups for member in group.members]

    def promote_to_fp32(self) -> None:
        """Compute in fp32 from now on. Collective; the unit must be sharded."""
        self.is_promoted = True
        for group in self.trained:
            group.promote_to_fp32(self.name)

    def demote(self) -> None:
        """Compute in 16 bits again. Collective; the unit must be sharded."""
        self.is_promoted = False
        for group in self.trained:
            group.demote(self.name)

    # -- weights

    def unshard(self) -> None:
        """Start the all-gathers of its groups; do nothing if they are under way or done. Collective
        within the gather lane.
        """
        if self._state is UnitState.SHARDED and self.sharded:
            for group in self.sharded:
                group.refuse_offloaded_weight()
            self._enter(UnitState.UNSHARDING)
            self._gathers = [group.gather(self.name) for group in self.sharded]

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers and point the parameters at the gathered weights; raise
        `PeerError` if a rank failed.
        """
        if self._state is UnitState.UNSHARDING:
            for pending in self._gathers:
                pending.wait()
            self._gathers = []
            self._enter(UnitState.UNSHARDED)
            for group in self.sharded:
                group.point_to_unsharded()
            if self.watch is not None:
                self.watch(self)

    def reshard(self) -> None:
        """Shard the parameters again; a gather under way is waited for first, since the transport
        still writes its buffer.
        """
        self.wait_for_unshard()
        if self._state is UnitState.UNSHARDED and not self.is_held:
            self._enter(UnitState.SHARDED)
            for group in self.sharded:
                group.reshard()

    # -- gradients

    @property
    def is_complete(self) -> bool:
        """Return whether every gradient that is expected in this backward has arrived."""
        return (
            bool(self.trained)
            and len(self.expected) <= len(self.arrived)
            and self.expected <= self.arrived
        )

    def reduce_grads(self) -> None:
        """Start to sum the ranks' gradients. Collective within the reduce lane."""
        self._reduces += [
            group.gradient.reduce(self.name) for group in self.trained if not group.is_idle
        ]

    def complete_sums(self) -> None:
        """Start to complete the sums of one step. Collective among the ranks with the same
        slices.
        """
        self._reduces += [
            group.gradient.complete_sum(self.name) for group in self.trained if not group.is_idle
        ]

    def issue_reduces(self) -> None:
        """Issue the messages of its sums that are still to be issued.  Collective within the reduce
        lane.
        """
        for pending in self._reduces:
            pending.issue_all()

    def wait_for_reduce(self) -> None:
        for pending in self._reduces:
            pending.wait()
        self._reduces = []


class Updates(Protocol):
    """The optimizer, as the heart knows it (optim/sharded.py)."""

    def after_reduce(self, unit: Unit) -> None:
        """Carry out the U behind a unit's S, where its time has come.  Local."""

    def refuse_regrouping(self) -> None:
        """Raise where the optimizer could not follow parameters into other groups; nothing has
        changed yet.
        """

    def regroup(self, groups: Sequence[ParamGroup]) -> None:
        """These groups are new."""


class Executor:
    """Runs the program of one wrapped model.  updates: the optimizer, held weakly; None where
    nothing is updated.
    most_reductions: of units, under way at once.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        settings: PlanSettings,
        schedule: Schedule,
        comm: Comm,
        queue: OrderedIssueQueue,
        most_reductions: int = 1,
    ) -> None:
        self.units = list(units)
        self.settings = settings
        self.comm = comm
        self.issue_queue = queue
        self.most_reductions = most_reductions
        self.updates: Callable[[], Updates | None] = lambda: None
        tuner = Tuner(settings, [unit.numel for unit in units], comm)
        self.tuner = tuner if tuner.knobs else None  # None: no size is open
        self.order_is_agreed = False
        self._recorded: list[int] = []
        self._externals: dict[int, list[Unit]] = {}
        self._walk: Pass | None = None  # the pass under way
        self._part: frozenset[int] | None = None  # the units that passes go to; None: all
        self._walks_of_parts: dict[tuple[int, frozenset[int]], tuple[Pass, Pass]] = {}
        self._reached = 0  # places of the walk whose gathers have been asked for
        # Asked for, and held back by an update that comes first
        self._to_gather: deque[int] = deque()
        self._resident_before: frozenset[int] = frozenset()
        self.late: set[int] = set()  # units with gradients that came after their sum
        self._ends_step = True  # the backward under way does what is done once a step
        self._reduced = 0  # reductions of this backward that have been started
        self._in_flight: deque[Unit] = deque()  # whose reductions are under way
        self._apart: Unit | None = None
        self._passes_begun: set[str] = set()
        # The progress of a first pass; without a total there is none
        self._first_pass = LongWork("", 0)
        self._follow(schedule)

    def _follow(self, schedule: Schedule) -> None:
        """Run this program from now on; between two passes."""
        self.schedule = schedule
        self._frozen = [unit for unit in self.units[1:] if unit.has_frozen_shards]
        sharded = [group for unit in self.units for group in unit.sharded]
        self._gathers_in_place = any(not group.weight_gather.makes_copies for group in sharded)
        backward = schedule.backward
        self.reduces = [number for number in backward.reduces if self.units[number].trained]
        self.all_reduces = [number for number in backward.all_reduces if self.units[number].trained]
        self._reduced_before = {  # how many reductions stand before backward comes to a unit
            unit: sum(number in backward.released_before(unit) for number in self.reduces)
            for unit in backward.order
        }

    @property
    def sizes(self) -> list[int]:
        """Gathered elements of each unit; what the program is a function of."""
        return [unit.gathered_numel for unit in self.units]

    # -- the order of units

    def agree_on_order(self) -> None:
        """Follow the order of the rank that used most units; the units it did not use come last.
        Collective.
        """
        row = torch.full((len(self.units),), -1, dtype=torch.int64)
        row[: len(self._recorded)] = torch.tensor(self._recorded, dtype=torch.int64)
        rows = self.comm.all_gather_rows(row, "order of units")
        fullest = int((rows >= 0).sum(dim=1).argmax())  # the first rank that used most units
        seen = [int(number) for number in rows[fullest] if number >= 0]
        order = [0, *(number for number in seen if number)]
        order += [number for number in range(len(self.units)) if number not in order]
        self.order_is_agreed = True
        self._plan(order)

    def replan(self, settings: PlanSettings | None = None) -> None:
        """Go on with other sizes, groups or updates of the units, in the same order; between two
        steps.
        """
        self.settings = settings or self.settings
        self._plan(self.schedule.forward.order)

    def _plan(self, order: Sequence[int]) -> None:
        deferred = self.schedule.forward.updated
        ahead = self.schedule.backward.updated
        planned = [unit.planned for unit in self.units]
        self._follow(schedule_units(planned, self.settings, order, deferred=deferred, ahead=ahead))

    # -- weights: G, U before it, R

    def begin(self, walk: Pass) -> None:
        """Start a pass; the one before must have ended.  Collective within the gather lane."""
        if self._gathers_in_place:
            is_backward = walk is self.schedule.backward or walk is self.schedule.accumulate
            self.comm.shard.barrier_begin("backward" if is_backward else "forward")
        self._show_first(walk)
        self._walk = self._walk_of_part(walk)
        self._reached = 0
        self._to_gather.clear()
        self._resident_before = frozenset(
            unit.number for unit in self.units if unit.state is not UnitState.SHARDED
        )

    def _show_first(self, walk: Pass) -> None:
        """Show the progress of the first forward and the first backward: weights may come from slow
        memories.
        """
        self._first_pass.finish()
        is_backward = walk is self.schedule.backward or walk is self.schedule.accumulate
        name = "backward" if is_backward else "forward"
        total = 0
        if name not in self._passes_begun:
            self._passes_begun.add(name)
            total = sum(unit.numel for unit in self.units)
        self._first_pass = LongWork(f"first {name} pass", total, "parameters")

    def keep_to(self, part: frozenset[int] | None) -> None:
        """Let passes go to these units alone, by number and the root among them, as a model's
        forward does of which a part is left out; None: to all.  Between two passes, on every rank.
        """
        self._part = part

    def _walk_of_part(self, walk: Pass) -> Pass:
        if self._part is None:
            return walk
        key = id(walk), self._part
        known = self._walks_of_parts.get(key)
        if known is None or known[0] is not walk:  # ids come again
            short = Pass(tuple(action for action in walk.actions if action.unit in self._part))
            known = self._walks_of_parts[key] = walk, short
        return known[1]

    def forwards(self, unit: Unit) -> tuple[Action, ...]:
        """Return the forwards of a unit that the program has for a batch that is trained on, in
        their order: one of the whole batch, or one of each micro-batch.  Local.
        """
        return self.schedule.forward.computes[unit.number]

    def use(self, unit: Unit, *, in_turn: bool = True) -> None:
        """Have the unit's weights unsharded when this returns.  Collective within the gather lane.

        in_turn: the pass goes on to it.  A tile that backward recomputes is used out of turn: its
        own comes later.
        """
        if not self.order_is_agreed and unit.number not in self._recorded:
            self._recorded.append(unit.number)
        with torch.inference_mode(False), torch.no_grad():
            if self._walk is not None and in_turn:
                self._gather_up_to(self._walk.position[unit.number])
            unit.unshard()  # not in the pass, or released since: on demand
            unit.wait_for_unshard()
        if self._first_pass.total and in_turn:
            self._first_pass.advance(unit.numel)

    def use_apart(self, unit: Unit) -> None:
        """Have the weights of a tile that several layers share unsharded for the backward of a
        later use of it, until `end_apart`; its turn is that of its first use.  Collective within
        the gather lane.
        """
        if self._apart is unit:
            return
        self.end_apart()
        self._apart = unit if unit.state is UnitState.SHARDED else None
        self.use(unit, in_turn=False)

    def end_apart(self) -> None:
        """Release what `use_apart` has gathered."""
        if self._apart is not None:
            unit = self._apart
            self._apart = None
            with torch.no_grad():
                unit.reshard()

    def use_with_externals(self, unit: Unit, *, in_turn: bool = True) -> None:
        """The unit, and the units whose parameters its forward is known to read."""
        self.use(unit, in_turn=in_turn)
        for other in self._externals.get(unit.number, ()):
            self.use(other)

    def remember_external(self, reader: Unit, owner: Unit) -> None:
        """`reader`'s forward reads a parameter of `owner`; its backward will too, where autograd
        saved the parameter itself.
        """
        known = self._externals.setdefault(reader.number, [])
        if owner not in known and owner is not reader:
            known.append(owner)

    def forget_external(self, reader: Unit, owner: Unit) -> None:
        """Undo `remember_external`; a read that happens after all is found again."""
        known = self._externals.get(reader.number, [])
        if owner in known:
            known.remove(owner)

    def after_forward(
        self, unit: Unit, *, training: bool, recomputes: bool, was_unsharded: bool
    ) -> None:
        """Release a unit whose forward is over, where the program says so.

        recomputes: backward runs this forward again; it releases units itself, but for a tile that
        came for this alone.
        """
        if recomputes:
            if unit.is_tile and not was_unsharded:
                unit.reshard()
            return
        walk = self.schedule.forward if training else self.schedule.inference
        if unit.number in walk.released and unit.number:  # the root stays until the pass ends
            unit.reshard()

    def gather_before(self, unit: Unit) -> None:
        """Start the gathers of units that this rank skipped on its way to `unit`: others may need
        them to go on.
        """
        if self._walk is not None:
            self._gather_for_others(self._walk.position[unit.number] - 1)

    def end(self) -> None:
        """Run the pass to its end: gather what this rank has not come to, release what the program
        lets go.
        """
        walk = self._walk
        if walk is None:
            return
        self._first_pass.finish()
        self.gather_rest()
        with torch.inference_mode(False), torch.no_grad():
            self._walk = None
            self.comm.shard.barrier_end()
            for unit in self.units:
                if unit.number in walk.released and unit.number not in self._resident_before:
                    unit.reshard()

    def gather_rest(self) -> None:
        """Start the gathers this rank has not come to, without waiting: other ranks may need them
        to go on.
        """
        if self._walk is not None:
            self._gather_for_others(len(self._walk.order) - 1)

    def reshard_all(self) -> None:
        """Release every unit; gathers under way are waited for."""
        self._walk = None
        self.comm.shard.barrier_end()
        for unit in self.units:
            unit.reshard()

    def hold(self, part: Collection[int] | None = None) -> None:
        """Let units stay gathered once they are, until `let_go`: many forwards and backwards use
        them in turn.  Local,
        and on every rank.  part: the units, by number; None: all.
        """
        for unit in self.units:
            unit.is_held = unit.is_held or part is None or unit.number in part

    def let_go(self, part: Collection[int] | None = None) -> None:
        """End `hold`, and release the units.  Before a step: what is gathered is of the weights
        before it.
        """
        for unit in self.units:
            unit.is_held = unit.is_held and part is not None and unit.number not in part
        if part is None:
            self.reshard_all()
            return
        for unit in self.units:
            if unit.number in part:
                unit.reshard()

    def reshard_frozen_before(self, unit: Unit) -> None:
        """Release frozen units that stand before a unit: they have no gradient whose reduction
        would be the sign.
        """
        gone = (
            self.schedule.backward.released_before(unit.number)
            if self._frozen
            else frozenset[int]()
        )
        for other in self._frozen:
            if other.number in gone and (other.is_complete or not other.trained):
                other.reshard()

    def _gather_for_others(self, place: int) -> None:
        """Nobody here waits for these gathers, so their transfers are waited for: a reduction may
        be next, for which ranks that are behind come only after them.
        """
        if place >= self._reached:
            with torch.inference_mode(False), torch.no_grad():
                self._gather_up_to(place)
                self.issue_queue.issue_all()

    def _gather_up_to(self, place: int) -> None:
        """Run G and U up to a use.  Gathers beyond it stop before an update that waits for states:
        that is made when its unit is used, so that the states of the next tiles travel meanwhile.
        Where it is gathers that travel, an update is made beside those before it.
        """
        assert self._walk is not None
        for index in range(self._reached, place + 1):
            self._to_gather.extend(self._walk.gathers[index])
        self._reached = max(self._reached, place + 1)
        while self._to_gather:
            unit = self.units[self._to_gather[0]]
            if unit.waits_for_states and self._walk.position[unit.number] > place:
                break
            self._to_gather.popleft()
            unit.unshard()  # which makes the update first

    # -- gradients: S, A, U behind them, R

    @property
    def reduces_now(self) -> bool:
        """Return whether the backward under way sums gradients: the one that ends a step does, and
        every one where gradients are sharded.
        """
        return self._ends_step or bool(self.schedule.accumulate.reduces)

    def begin_backward(self, *, ends_step: bool) -> None:
        """Start the backward pass.  Collective within the gather lane.

        ends_step: no other backward comes before the step.
        """
        self._ends_step = ends_step
        self._reduced = 0
        for unit in self.units:
            unit.arrived.clear()
            unit.reduced_in_backward = False
        self.begin(self.schedule.backward if ends_step else self.schedule.accumulate)

    def advance(self) -> None:
        """Reduce the units whose turn has come and whose gradients are all here, and release
        them.
        """
        while (
            self._reduced < len(self.reduces)
            and self.units[self.reduces[self._reduced]].is_complete
        ):
            unit = self._reduce_next()
            if unit.number and not unit.has_frozen_shards:  # the root stays until the pass ends
                unit.reshard()

    def skip_past(self, unit: Unit) -> None:
        """Stop waiting for the gradients of the units that backward passed well before `unit`.

        A rank that skips a parameter would otherwise keep the others waiting for a reduction that
        it starts only at the end, while it waits for their next gather.  Should a gradient come
        after all, it is late (`reduce_late`).
        """
        margin = 2 if self.settings.overlap else 1
        reached = self._reduced_before[unit.number] if unit.trained else 0
        while self._reduced < min(reached - margin + 1, len(self.reduces)):
            self._reduce_next()

    def reduce_rest(self) -> None:
        """Reduce what is left, in order, and wait for all of it; then run A where this backward
        ends a step.
        """
        while self._reduced < len(self.reduces):
            self._reduce_next()
        self.wait_for_reduce()
        if self._ends_step:
            self.all_reduce()

    def reduce_late(self) -> None:
        """Before a step: reduce what any rank collected too late.  Collective; where none did,
        nobody need call.
        """
        mask = torch.zeros(len(self.units), dtype=torch.uint8)
        mask[list(self.late)] = 1
        agreed = self.comm.all_gather_rows(mask, "late gradients").amax(dim=0)
        for number in self.reduces:
            if agreed[number]:
                self._reduce(self.units[number])
        self.wait_for_reduce()
        self.late.clear()
        self.all_reduce()

    def all_reduce(self) -> None:
        """Run A: add up the sums that replicas have of this step, each slice among the ranks that
        hold it, two units under way at a time; what they have added up already is left alone.

        Collective among them.
        """
        under_way: deque[Unit] = deque()
        for number in self.all_reduces:
            self.units[number].complete_sums()
            under_way.append(self.units[number])
            if len(under_way) > 1:
                self._wait_for_total(under_way.popleft())
        while under_way:
            self._wait_for_total(under_way.popleft())

    def _wait_for_total(self, unit: Unit) -> None:
        unit.wait_for_reduce()
        self._update(unit)

    def refuse_unused(self) -> None:
        """Raise if a trainable parameter got no gradient in this backward
        (ignore_unused_parameters: false).
        """
        members = [
            member for unit in self.units for group in unit.trained for member in group.members
        ]
        got = {number for unit in self.units for number in unit.arrived}
        unused = [
            each.name for each in members if id(each.param) not in got and each.param.requires_grad
        ]
        if unused:
            raise UsageError(
                f"{len(unused)} parameters got no gradient in this backward, among them "
                f"'{unused[0]}'.",
                "ignore_unused_parameters is false: an unused parameter is an error.",
                "use them in forward, freeze them (requires_grad_(False)), or set "
                "ignore_unused_parameters to true.",
            )

    def update_expected(self) -> None:
        """Expect next time what arrived this time; a unit that got nothing keeps its
        expectation.
        """
        for unit in self.units:
            if unit.arrived:
                unit.expected = set(unit.arrived)

    def wait_for_reduce(self) -> None:
        """Wait for the reductions in flight."""
        while self._in_flight:
            self._after_reduce(self._wait_for_first())

    def _reduce_next(self) -> Unit:
        unit = self.units[self.reduces[self._reduced]]
        self._reduced += 1
        self._reduce(unit)
        return unit

    def _reduce(self, unit: Unit) -> None:
        landed = self._wait_for_first() if len(self._in_flight) >= self.most_reductions else None
        for other in self._in_flight:  # or the line would stand still until somebody waits for it
            other.issue_reduces()
        unit.reduce_grads()
        unit.reduced_in_backward = True
        self._in_flight.append(unit)
        if landed is not None:
            # When the next one is on its way, since other ranks wait for that
            self._after_reduce(landed)
        if not self.settings.overlap:
            self.wait_for_reduce()

    def _wait_for_first(self) -> Unit:
        """Wait for the first of the reductions in flight; whose it was."""
        self._in_flight[0].wait_for_reduce()
        return self._in_flight.popleft()

    def _after_reduce(self, landed: Unit) -> None:
        """Run the U behind an S, unless it stands behind an A."""
        if landed.number not in self.all_reduces:
            self._update(landed)

    def _update(self, unit: Unit) -> None:
        if (updates := self.updates()) is not None:
            updates.after_reduce(unit)
