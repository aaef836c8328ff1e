"""Weights on their way in and out: walks the schedule, on demand where a model strays from it.

Every rank walks the whole schedule, entries it skips included, so the gather lane carries the same sequence
everywhere.  Records the order units are used in, until the ranks have agreed on it, and who reads whose parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..comm.collectives import Comm
from ..planner.plan import Plan
from ..planner.schedule import Pass, Schedule, enclosing, plan_schedule
from ..planner.spec import PlanSettings
from .buffer import OrderedIssueQueue
from .tuning import Tuner
from .unit import Unit, UnitState


class Gatherer:
    """The gather lane of one wrapped model."""

    def __init__(self, units: Sequence[Unit], plan: Plan, comm: Comm, turns: OrderedIssueQueue) -> None:
        self.units, self.settings, self.comm, self.issue_queue = list(units), plan.settings, comm, turns
        self._around = enclosing([unit.name for unit in units])
        self.schedule: Schedule = plan.schedule
        self.order_is_agreed = False
        self.tuner = Tuner(plan.settings, [unit.numel for unit in units], comm)
        self._recorded: list[int] = []
        self._externals: dict[int, list[Unit]] = {}
        self._walk: Pass | None = None
        self._cursor = 0
        self._to_issue: deque[int] = deque()  # units whose gather the walk has asked for, in order
        self._resident_before: frozenset[int] = frozenset()
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        self._frozen = [unit for unit in self.units[1:] if unit.has_frozen_shards]
        sharded = [group for unit in self.units for group in unit.sharded]
        self._rests_in_common = any(group.weight.common is not None for group in sharded)

    @property
    def sizes(self) -> list[int]:
        """Gathered elements of each unit; what the schedule is a function of."""
        return [unit.gathered_numel for unit in self.units]

    def begin(self, walk: Pass) -> None:
        """Start a walk; the one before must have ended.  Collective within the gather lane."""
        if self._rests_in_common:
            self.comm.barrier_begin("backward" if walk is self.schedule.backward else "forward")
        self._walk, self._cursor = walk, 0
        self._to_issue.clear()
        self._resident_before = frozenset(unit.number for unit in self.units if unit.state is not UnitState.SHARDED)

    def use(self, unit: Unit, *, in_turn: bool = True) -> None:
        """Have the unit's weights in use when this returns.  Collective within the gather lane.

        in_turn: the walk goes on to it.  A tile that backward recomputes is used out of turn: its own comes later.
        """
        if not self.order_is_agreed and unit.number not in self._recorded:
            self._recorded.append(unit.number)
        with torch.inference_mode(False), torch.no_grad():
            if self._walk is not None and in_turn:
                self._issue_up_to(self._walk.position[unit.number])
            unit.unshard()  # not in the walk, or released since: on demand
            unit.wait_for_unshard()

    def use_with_externals(self, unit: Unit, *, in_turn: bool = True) -> None:
        """The unit, and the units whose parameters its forward is known to read."""
        self.use(unit, in_turn=in_turn)
        for other in self._externals.get(unit.number, ()):
            self.use(other)

    def remember_external(self, reader: Unit, owner: Unit) -> None:
        """`reader`'s forward reads a parameter of `owner`; its backward will too, where autograd saved the parameter
        itself.
        """
        known = self._externals.setdefault(reader.number, [])
        if owner not in known and owner is not reader:
            known.append(owner)

    def forget_external(self, reader: Unit, owner: Unit) -> None:
        """Undo `remember_external`; a read that happens after all is found again."""
        known = self._externals.get(reader.number, [])
        if owner in known:
            known.remove(owner)

    def issue_before(self, unit: Unit) -> None:
        """Start the gathers of units that this rank skipped on its way to `unit`: others may need them to go on."""
        if self._walk is not None:
            self._issue_for_others(self._walk.position[unit.number] - 1)

    def issue_rest(self) -> None:
        """Start the gathers this rank has not come to, without waiting: other ranks may need them to go on."""
        if self._walk is not None:
            self._issue_for_others(len(self._walk.order) - 1)

    def end(self, keep: frozenset[int]) -> None:
        """Walk to the end, then put to rest what neither `keep` nor an unfinished earlier walk holds."""
        if self._walk is None:
            return
        self.issue_rest()
        with torch.inference_mode(False), torch.no_grad():
            self._walk = None
            self.comm.barrier_end()
            for unit in self.units:
                if unit.number not in keep and unit.number not in self._resident_before:
                    unit.reshard()

    def reshard_all(self) -> None:
        """Put every unit to rest; gathers under way are waited for."""
        self._walk = None
        self.comm.barrier_end()
        for unit in self.units:
            unit.reshard()

    def reshard_frozen_before(self, unit: Unit) -> None:
        """Frozen weights give no sign when backward is done with them; the next unit's turn is the sign."""
        backward = self.schedule.backward
        for other in self._frozen:
            behind = backward.done[other.number] < backward.position[unit.number]
            if behind and (other.is_complete or not other.trained):
                other.reshard()

    def agree_on_order(self) -> None:
        """The order of the rank that used most units becomes everybody's; the rest comes last.  Collective."""
        row = torch.full((len(self.units),), -1, dtype=torch.int64)
        row[: len(self._recorded)] = torch.tensor(self._recorded, dtype=torch.int64)
        rows = self.comm.all_gather_rows(row, "order of units")
        fullest = int((rows >= 0).sum(dim=1).argmax())  # the first rank that used most units
        seen = [int(number) for number in rows[fullest] if number >= 0]
        order = [0, *(number for number in seen if number)]
        order += [number for number in range(len(self.units)) if number not in order]
        self.schedule = plan_schedule(self.sizes, order, self.settings, self._around)
        self.order_is_agreed = True

    def replan(self, settings: PlanSettings) -> None:
        """Go on with other sizes, or other groups of the units, in the same order; between two steps."""
        self.settings = settings
        self._look_at_groups()
        self.schedule = plan_schedule(self.sizes, self.schedule.forward.order, settings, self._around)

    def _issue_for_others(self, position: int) -> None:
        """Nobody here waits for these gathers, so their transfers are waited for: a reduction may be next, for which
        ranks that are behind come only after them.
        """
        if position >= self._cursor:
            with torch.inference_mode(False), torch.no_grad():
                self._issue_up_to(position)
                self.issue_queue.issue_all()

    def _issue_up_to(self, position: int) -> None:
        """Start the gathers that the walk has up to a use; those ahead of it stop where an update is pending, which is
        made when its unit is used: states of the next tiles travel meanwhile.
        """
        assert self._walk is not None
        for index in range(self._cursor, position + 1):
            self._to_issue.extend(self._walk.issue[index])
        self._cursor = max(self._cursor, position + 1)
        while self._to_issue:
            unit = self.units[self._to_issue[0]]
            if unit.has_pending_update and self._walk.position[unit.number] > position:
                break
            self._to_issue.popleft()
            unit.unshard()
