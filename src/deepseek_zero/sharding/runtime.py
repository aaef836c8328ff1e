"""The runtime of a wrapped model, which the engine and the optimizer use.

`loss.backward()` drives everything: PyTorch's hooks call `Forward` and `Backward`, which run the
schedule of a step (planner/schedule.py). Two lanes issue collectives, each in the order of the
schedule on every rank: gathers (gather_lane.py) and reductions (reduce_lane.py). Every rank runs
the whole schedule, including actions of units that it skips. Hooks refer weakly to these objects,
so that deleting an engine frees its memory at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..planner.make_schedule import schedule_units
from ..planner.plan import Plan
from ..planner.schedule import Schedule
from .backward import Backward
from .comm_context import CommContext
from .external_params import ExternalReads
from .forward import Forward
from .gather_lane import GatherLane
from .param_group import ParamGroup
from .reduce_lane import ReduceLane
from .unit import Unit


class Runtime:
    """One wrapped model: its units, schedule, hooks and communicators.

    Args:
        model: The wrapped model.
        units: The units, the root first.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        plan: The plan by which the model was sharded.

    Attributes:
        settings: The current settings of the plan.
        machine: The properties of the machine that the plan depends on.
        comm: The communicator of all ranks of the job.
        step: The phase of the model and the progress of the current step.
        externals: Gathers units for reads outside of their forward.
        hooks: The handles of all hooks on the model; empty after they were removed.
        after_steps: Functions that extensions run after each step, on every rank.
        added_params: A weak reference to the object that adds unfrozen parameters to the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        comm_ctx: CommContext,
        plan: Plan,
    ) -> None:
        self.model = model
        self.units = units
        self.settings = plan.settings
        self.machine = plan.machine
        self._planned = plan
        self.comm = comm_ctx.world
        self.comm_ctx = comm_ctx
        self.after_steps: list[Callable[[Runtime], None]] = []
        self.added_params: Callable[[], Any] = lambda: None
        self.gathers = GatherLane(units, plan.schedule, self.comm, comm_ctx.issue_queue)
        self.reductions = ReduceLane(
            units, plan.schedule, plan.settings, self.comm, plan.machine.most_reductions
        )
        self.backward = Backward(self.gathers, self.reductions, comm_ctx)
        self.step = self.backward.step
        self.externals = ExternalReads(self.backward)
        self.forward = Forward(self.backward, self.externals, plan.settings.policy)
        self.hooks = self.forward.install_hooks()
        for unit in units:
            for group in unit.groups:
                self.add_group(unit, group)

    @property
    def plan(self) -> Plan:
        """The current plan of the model.

        It differs from the first plan after groups, their dtypes or the order of units changed.
        """
        units = tuple(unit.planned for unit in self.units)
        return replace(self._planned, settings=self.settings, units=units, schedule=self.schedule)

    @property
    def root(self) -> Unit:
        """The unit of the parameters that no other unit has."""
        return self.units[0]

    @property
    def groups(self) -> list[ParamGroup]:
        """All groups, unit by unit, in the same order on every rank."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def trained_groups(self) -> list[ParamGroup]:
        """The parameter groups that have a gradient, unit by unit."""
        return self.backward.trained_groups()

    @property
    def is_destroyed(self) -> bool:
        """Whether the hooks were removed. The slices are kept until another engine uses them."""
        return not self.hooks

    def remove_hooks(self) -> None:
        """Remove all hooks; the parameters stay as they are."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def add_group(self, unit: Unit, group: ParamGroup) -> None:
        """Register a group with this runtime, and install its gradient hooks if it is trained."""
        group.runtime = weakref.ref(self)
        if group.trainable:
            self.hooks += self.backward.watch_grads(unit.number, group)

    @property
    def schedule(self) -> Schedule:
        """The current schedule of a step; it changes when the ranks agree on an order of units."""
        return self.gathers.schedule

    def replan(self, order: Sequence[int] | None = None) -> None:
        """Make a new schedule after sizes, groups, settings or updates of the units changed.

        Every rank must call it between the same two steps; it does not communicate.

        Args:
            order: The order in which units compute; None to keep the current one.
        """
        before = self.schedule
        schedule = schedule_units(
            [unit.planned for unit in self.units],
            self.settings,
            order or before.forward.order,
            updates_in_forward=before.forward.updated,
            ahead=before.backward.updated,
        )
        self.gathers.follow(schedule)
        self.reductions.follow(schedule, self.settings)

    def after_step(self, *, drop: bool = True) -> None:
        """Discard the gradients after a step unless `drop` is false. Collective.

        After the first step, the ranks also agree on the order of units.
        """
        if drop:
            self.backward.drop_grads()
        self.step.backwards = 0
        if not self.gathers.order_is_agreed:
            order = self.gathers.agree_on_order()
            if order != self.schedule.forward.order:
                self.replan(order)
        if self.comm.meter.end_step():
            self.comm_ctx.tiers.start_counting()
        for hook in self.after_steps:
            hook(self)
