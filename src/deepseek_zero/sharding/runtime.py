"""The runtime of a wrapped model, which the engine and the optimizer use.

`loss.backward()` drives everything: PyTorch's hooks call `Forward` and `Backward`, which run the
schedule (`executor.py`). Hooks refer weakly to these objects, so that deleting an engine frees its
memory at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..base.device import backward_id
from ..comm.collectives import Comm
from ..planner.plan import Plan
from .backward import Backward
from .comm_context import CommContext
from .executor import Executor
from .forward import Forward
from .loss_factor import LossFactor
from .model_changes import ModelRules, Structure
from .param_group import ParamGroup
from .regroup import promote
from .step_state import Phase, StepState
from .unit import Unit


class Runtime:
    """One wrapped model: its units, schedule, hooks and communicators.

    Args:
        model: The wrapped model.
        units: The units, the root first.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        plan: The plan by which the model was sharded.
        rules: The behavior that the calling API chooses.

    Attributes:
        model: The wrapped model.
        units: The units of the model, the root first.
        settings: The current settings of the plan.
        machine: The properties of the machine that the plan depends on.
        comm: The communicator of all ranks of the job.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        step: The phase of the model and the progress of the current step.
        hooks: The handles of all hooks on the model; empty after they were removed.
        after_steps: Functions that extensions run after each step, on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        comm_ctx: CommContext,
        plan: Plan,
        rules: ModelRules = ModelRules(),  # noqa: B008  # frozen
    ) -> None:
        self.model = model
        self.units = units
        self.settings = plan.settings
        self.machine = plan.machine
        self._planned = plan
        self.comm = comm_ctx.world
        self.comm_ctx = comm_ctx
        self.step = StepState()
        self.after_steps: list[Callable[[Runtime], None]] = []
        reference = weakref.ref(self)

        def accumulation() -> int:
            runtime = reference()
            return 1 if runtime is None else runtime.settings.accumulation

        self.loss_factor = LossFactor(accumulation, is_strict=rules.requires_scaled_loss)
        most_reductions = self.machine.most_reductions
        self.executor = Executor(
            units, plan.settings, plan.schedule, self.comm, comm_ctx.issue_queue, most_reductions
        )
        self.backward = Backward(units, self.executor, comm_ctx, self.loss_factor, self.step)
        self.structure = Structure(
            model, self.groups, ignores_new_params=rules.allows_unmanaged_params
        )
        self.forward = Forward(self, self.backward, self.structure, plan.settings.policy)
        self.hooks = self.forward.install_hooks()
        for unit in units:
            for group in unit.groups:
                self.add_group(unit, group)

    @property
    def plan(self) -> Plan:
        """The current plan of the model.

        It differs from the first plan if parameter groups were divided, laid out again or switched
        to fp32, or if the ranks have agreed on the order of units.
        """
        units = tuple(unit.planned for unit in self.units)
        return replace(
            self._planned, settings=self.settings, units=units, schedule=self.executor.schedule
        )

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
        return [group for group in self.groups if group.trainable]

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
        """Register a group with this runtime, and install its gradient hooks if it is trained.

        Args:
            unit: The unit to which the group belongs.
            group: The parameter group to register.
        """
        group.runtime = weakref.ref(self)
        if group.trainable:
            self.hooks += self.backward.watch_grads(unit.number, group)

    def replan(self) -> None:
        """Plan the schedule and the checks again after the groups of units changed.

        Note:
            Every rank must call it; it does not communicate.
        """
        self.comm_ctx.pool.clear()
        self.executor.replan()
        self.structure.follow(self.groups)

    def promote(self, unit: Unit, *, to_fp32: bool) -> None:
        """Change the dtype in which a sharded unit computes to fp32, or back to 16 bits.

        Args:
            unit: The unit, the same on every rank.
            to_fp32: Whether to use fp32; False for the original dtype.

        Note:
            Collective: every rank must call it.
        """
        unit.is_promoted = to_fp32
        for group in unit.trained:
            promote(group, unit.name, to_fp32=to_fp32)
        self.forward.any_promoted = any(each.is_promoted for each in self.units)

    @property
    def comm_of_units(self) -> Comm:
        """The communicator of the ranks that hold parts of the same units.

        These are all ranks except those of other pipeline stages.
        """
        return self.comm if "pp" in self.comm.along else self.comm.whole

    def unit_of(self, group: ParamGroup) -> Unit:
        """Return the unit to which a group belongs."""
        return next(unit for unit in self.units if group in unit.groups)

    def fetch(self, group: ParamGroup) -> bool:
        """Gather the unit of a group when a program reads one of its sharded parameters.

        Args:
            group: The parameter group of the sharded parameter.

        Returns:
            Whether the unit was gathered. Outside forward and backward it is not.

        Note:
            Collective if the unit is gathered: every rank of the shard group must call it in the
            same order.
        """
        active = self.step.active
        if self.step.phase is Phase.IDLE and not active and backward_id() == -1:
            return False
        unit = self.unit_of(group)
        if active:
            self.executor.gathers.remember_external(active[-1].unit, unit)
        self.executor.gathers.unshard(unit)
        return True

    def fetch_saved(self, group: ParamGroup) -> None:
        """Gather the unit of a group when backward needs a weight that forward saved.

        Args:
            group: The parameter group of the weight.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        if self.step.phase is not Phase.BACKWARD and backward_id() != -1:
            self.backward.begin()
        self.fetch(group)

    def after_step(self, *, drop: bool = True) -> None:
        """Discard the gradients after a step and, once, agree on the order of units.

        Args:
            drop: Whether to discard the gradients; False to keep them.

        Note:
            Collective: every rank must call it.
        """
        if drop:
            self.backward.drop_grads()
        elif (driver := self.backward.driver()) is not None:
            driver.forget()
        self.step.backwards = 0
        self.executor.agree_on_order()
        if self.comm.meter.end_step():
            self.comm_ctx.tiers.start_counting()
        for hook in self.after_steps:
            hook(self)
