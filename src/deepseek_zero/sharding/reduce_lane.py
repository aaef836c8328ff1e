"""The reduce lane of a model: scheduled reductions of gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..comm.collectives import Comm
from ..planner.plan_settings import PlanSettings
from ..planner.schedule import Schedule
from .completed_sums import complete_sums
from .unit import Unit


class ReduceLane:
    """Issues the gradient reductions, and updates that follow them, in the order of a schedule.

    Every reduction is issued in the same order on every rank of the shard group.

    Attributes:
        units: The units of the model, the root first.
        comm: The communicator of all ranks of the job.
        most_reductions: The number of units that may be reduced at the same time.
        schedule: The schedule of a step, which lists the reductions of each backward.
        settings: The settings of the plan, which decide when gradients are reduced.
        ends_step: Whether the last backward that began ends a step.
        late: The numbers of units with gradients that arrived after the unit's reduction.
        after_reduce: Functions that extensions run for each unit after its gradient was reduced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        settings: PlanSettings,
        comm: Comm,
        most_reductions: int,
    ) -> None:
        self.units = units
        self.comm = comm
        self.most_reductions = most_reductions
        self.after_reduce: list[Callable[[Unit], None]] = []
        self.late: set[int] = set()
        self.ends_step = True  # no other backward comes before the step
        self._reduced = 0  # reductions that this backward has started
        self._in_flight: deque[Unit] = deque()  # units that are being reduced
        self.follow(schedule, settings)

    def follow(self, schedule: Schedule, settings: PlanSettings) -> None:
        """Replace the schedule and the settings, between a forward and a backward."""
        self.schedule = schedule
        self.settings = settings
        backward = schedule.backward
        self.order = [self.units[n] for n in backward.reduces if self.units[n].trained]
        self._completed = [self.units[n] for n in backward.all_reduces if self.units[n].trained]
        self._reduced_before = {  # the number of reductions before each unit's turn
            number: sum(unit.number in backward.released_before[number] for unit in self.order)
            for number in backward.order
        }

    def begin(self, *, ends_step: bool) -> None:
        """Prepare for the gradient reductions of a new backward, which may end the step."""
        self.ends_step = ends_step
        self._reduced = 0
        for unit in self.units:
            unit.arrived.clear()
            unit.reduced_in_backward = False

    @property
    def reduces_now(self) -> bool:
        """Whether this backward reduces: it ends a step, or gradients are sharded."""
        return self.ends_step or bool(self.schedule.accumulate.reduces)

    def advance(self) -> None:
        """Reduce and release the next units of the schedule while they are complete. Collective."""
        while self._reduced < len(self.order) and self.order[self._reduced].is_complete:
            unit = self._reduce_next()
            if unit.number and not unit.has_frozen_shards:  # the root stays until the end
                unit.reshard()

    def reduce_passed(self, unit: Unit) -> None:
        """Reduce the units that backward should have completed before `unit`, complete or not.

        A rank that skips a parameter would otherwise deadlock with the other ranks: they would wait
        for its reduction, and it would wait for their next gather. A gradient that arrives after
        this reduction is reduced before the step (irregular_passes.py).
        """
        margin = 2 if self.settings.overlap else 1
        reached = self._reduced_before[unit.number] if unit.trained else 0
        while self._reduced < min(reached - margin + 1, len(self.order)):
            self._reduce_next()

    def reduce_remaining(self) -> None:
        """Reduce the remaining units in order, and wait for all of them.

        If this backward ends a step, the gradients are then summed over replicas.
        """
        while self._reduced < len(self.order):
            self._reduce_next()
        self.wait()
        if self.ends_step:
            self.complete_sums()

    def complete_sums(self) -> None:
        """Sum the reduced gradients over replicas, once per step. Collective."""
        if self._completed:
            complete_sums(self._completed, self._update_after_sum)

    def update_expected(self) -> None:
        """Expect the gradients that arrived in this backward in the next one, too."""
        for unit in self.units:
            if unit.arrived:
                unit.expected = set(unit.arrived)

    def wait(self) -> None:
        """Wait for the reductions in flight."""
        while self._in_flight:
            self._after_reduce(self._wait_for_first())

    def _reduce_next(self) -> Unit:
        unit = self.order[self._reduced]
        self._reduced += 1
        self.reduce(unit)
        return unit

    def reduce(self, unit: Unit) -> None:
        """Start to reduce the gradients of a unit. Collective."""
        landed = self._wait_for_first() if len(self._in_flight) >= self.most_reductions else None
        for other in self._in_flight:  # their messages would otherwise be issued only by a wait
            other.issue_reduces()
        is_last = self.ends_step
        unit.start_reduces(lambda group: group.gradient.reduce(unit.name, is_last=is_last))
        unit.reduced_in_backward = True
        self._in_flight.append(unit)
        if landed is not None:
            # The next reduction is in flight by now, because other ranks wait for it.
            self._after_reduce(landed)
        if not self.settings.overlap:
            self.wait()

    def _wait_for_first(self) -> Unit:
        """Wait for the first of the reductions in flight, and return its unit."""
        self._in_flight[0].wait_for_reduce()
        return self._in_flight.popleft()

    def _after_reduce(self, landed: Unit) -> None:
        """Update after a reduction unless the update follows a completed sum."""
        if landed not in self._completed:
            self._update_after_sum(landed)

    def _update_after_sum(self, unit: Unit) -> None:
        unit.wait_for_reduce()
        for hook in self.after_reduce:
            hook(unit)
