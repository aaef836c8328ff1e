"""Runs the schedule of a step (planner/schedule.py), driven by PyTorch's hooks.

Two lanes issue collectives, each in the order of the schedule on every rank: gathers
(gather_lane.py) and reductions (reduce_lane.py). Every rank runs the whole schedule, including
actions of units that it skips. The model itself runs the forwards and backwards (F, B). A unit that
takes micro-batches in turn calls `forwards` to get its order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.collectives import Comm
from ..comm.pending import OrderedIssueQueue
from ..planner.make_schedule import schedule_units
from ..planner.plan_settings import PlanSettings
from ..planner.schedule import Action, Schedule
from .gather_lane import GatherLane
from .reduce_lane import ReduceLane
from .unit import Unit


class Executor:
    """Issues the all-gathers and gradient reductions of a model in the order of a schedule.

    A schedule lists the gathers, forwards, backwards, releases and reductions of a training step.
    All ranks follow the same one, so their collectives match even if a rank skips a unit.

    Attributes:
        gathers: Issues the all-gathers of weights, in order.
        reductions: Issues the reductions of gradients, in order.
        schedule: The current schedule. It changes when the ranks have agreed on the order in which
            units are used.
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
        """Create the objects that issue gathers and reductions.

        Args:
            units: The units of the model, the root first.
            settings: The settings of the plan, such as the size of the prefetch window.
            schedule: The schedule that is used until the ranks have agreed on an order.
            comm: The communicator of all ranks of the job.
            queue: The gathers whose slices are still fetched from an offload memory.
            most_reductions: The number of units that may be reduced at the same time.
        """
        self.units = list(units)
        self.settings = settings
        self.comm = comm
        self.schedule = schedule
        self.gathers = GatherLane(self.units, schedule, comm, queue)
        self.reductions = ReduceLane(self.units, schedule, settings, comm, most_reductions)

    def agree_on_order(self) -> None:
        """Choose the order of units in which all ranks issue collectives from now on.

        It is the order of the rank that used most units in the first step, followed by unused
        units. Later calls do nothing.

        Note:
            Collective: every rank must call it.
        """
        if self.gathers.order_is_agreed:
            return
        recorded = self.gathers.recorded
        row = torch.full((len(self.units),), -1, dtype=torch.int64)
        row[: len(recorded)] = torch.tensor(recorded, dtype=torch.int64)
        rows = self.comm.all_gather_rows(row, "order of units")
        fullest = int((rows >= 0).sum(dim=1).argmax())  # the first such rank
        seen = [int(number) for number in rows[fullest] if number >= 0]
        order = [0, *(number for number in seen if number)]
        order += [number for number in range(len(self.units)) if number not in order]
        self.gathers.order_is_agreed = True
        self._plan(order)

    def replan(self, settings: PlanSettings | None = None) -> None:
        """Make a new schedule with the same order of units, between two steps.

        Call it after sizes, groups or updates of the units changed.

        Args:
            settings: The new settings; None to keep the current ones.
        """
        self.settings = settings or self.settings
        self._plan(self.schedule.forward.order)

    def _plan(self, order: Sequence[int]) -> None:
        later = self.schedule.forward.updated
        ahead = self.schedule.backward.updated
        planned = [unit.planned for unit in self.units]
        self.schedule = schedule_units(
            planned, self.settings, order, updates_in_forward=later, ahead=ahead
        )
        self.gathers.follow(self.schedule)
        self.reductions.follow(self.schedule, self.settings)

    def forwards(self, unit: Unit) -> tuple[Action, ...]:
        """Return the forwards of a unit that the schedule contains for a training batch, in order.

        Args:
            unit: The unit.

        There is one for the whole batch, or one for each micro-batch.
        """
        return self.schedule.forward.computes[unit.number]

    def begin_backward(self, *, ends_step: bool) -> None:
        """Prepare the gathers and gradient reductions of a new backward.

        Args:
            ends_step: Whether this is the last backward before the optimizer step.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        self.reductions.begin(ends_step=ends_step)
        walk = self.schedule.backward if ends_step else self.schedule.accumulate
        self.gathers.begin(walk)
