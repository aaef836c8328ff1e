"""ZeRO at work: autograd hooks -> schedule -> units.

Owns the phase one wrapped model is in.  hooks.py is where torch calls in, executor.py runs the program; optimizers read
the slices of `groups`. `loss.backward()` alone drives everything.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..base.clock import BETWEEN
from ..base.device import backward_id, queue_backward_callback
from ..base.errors import UsageError
from ..planner.plan import Plan
from . import hooks, tuning
from .buffer import CommContext
from .executor import Executor
from .forward import Forward, Phase
from .loss_factor import LossFactor
from .nonfinite import NonFiniteDetector
from .param_group import ParamGroup
from .regroup import follow_requires_grad
from .state_dict import shard_state_dicts
from .unit import Unit


class Runtime:
    """One wrapped model at work."""

    def __init__(self, model: nn.Module, units: list[Unit], comm_ctx: CommContext, plan: Plan) -> None:
        self.model, self.units, self.settings = model, units, plan.settings
        self._planned = plan
        self.comm, self.comm_ctx = comm_ctx.world, comm_ctx
        self.phase = Phase.IDLE
        self.is_boundary = True  # the backward to come ends an accumulation: replicated gradients are reduced
        self.loss_factor = LossFactor(self)
        self.nonfinite: NonFiniteDetector | None = None  # after a skipped step, under precision "auto"
        self.backwards = 0  # finished since the last step
        self.has_gradients = False  # a backward has brought one since they were dropped
        self.is_graphless = False  # a loss without a graph was given since the last step
        self.executor = Executor(units, plan.settings, plan.schedule, self.comm, comm_ctx.issue_queue)
        self.forward = Forward(self)
        self._backward_id = -1
        for group in self.groups:
            group.runtime = weakref.ref(self)
        self._handles = [*hooks.install(self), *shard_state_dicts(units)]

    @property
    def plan(self) -> Plan:
        """The plan this run follows now.

        Since it was built groups may have been divided, promoted or laid out anew, and the order of units agreed.
        """
        units = tuple(unit.planned for unit in self.units)
        return replace(self._planned, settings=self.settings, units=units, schedule=self.executor.schedule)

    @property
    def root(self) -> Unit:
        """The unit of everything that no block owns."""
        return self.units[0]

    @property
    def groups(self) -> list[ParamGroup]:
        """Every group, unit by unit; the same order on every rank."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def trained_groups(self) -> list[ParamGroup]:
        return [group for group in self.groups if group.trainable]

    @property
    def is_destroyed(self) -> bool:
        """Whether the model was let go; its slices stay until another engine takes them over."""
        return not self._handles

    def remove_hooks(self) -> None:
        """Undo the hooks; the parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def follow_requires_grad(self) -> None:
        """Let groups be what `requires_grad` says now, and not at the next forward.  Collective where it changed."""
        follow_requires_grad(self, begins_a_step=self.backwards == 0 and self.forward.count == 0)

    def watch(self, unit: Unit, group: ParamGroup) -> None:
        """Hear of the gradients of a group that is trained from now on."""
        self._handles += hooks.watch_grads(self, unit.number, group)

    def unit_of(self, group: ParamGroup) -> Unit:
        return next(unit for unit in self.units if group in unit.groups)

    def fetch(self, group: ParamGroup) -> bool:
        """Gather a group's unit because something reads a parameter at rest; False outside forward and backward."""
        if self.phase is Phase.IDLE and not self.forward.active and backward_id() == -1:
            return False
        unit = self.unit_of(group)
        if self.forward.active:
            self.executor.remember_external(self.forward.active[-1].unit, unit)
        self.executor.use(unit)
        return True

    @property
    def was_interrupted(self) -> bool:
        """A backward that an exception ended: its phase never closed, and no backward runs now."""
        return self.phase is Phase.BACKWARD and backward_id() == -1

    # -- backward

    def on_output_grad(self, unit: Unit, grad: Tensor) -> None:
        """A gradient reached a unit's output: its weights are about to be needed."""
        if self.phase is not Phase.BACKWARD or (unit is self.root and self._backward_id != backward_id()):
            self._open_backward()
        if self.nonfinite is not None:
            self.nonfinite.record("grad", unit.number, grad)
        self.executor.reshard_frozen_before(unit)
        if self._reduces_now and unit is not self.root and self.forward.count <= 1:
            self.executor.gather_before(unit)
            with torch.no_grad():
                self.executor.skip_past(unit)
        self.executor.use_with_externals(unit)

    def _open_backward(self) -> None:
        """The first gradient of a backward call reached an output of this model."""
        self.loss_factor.refuse_gradient_of_gradient()
        if self.phase is Phase.BACKWARD:
            self.recover()  # the backward before this one never ended
        self._backward_id = backward_id()
        self.phase = Phase.BACKWARD
        self.comm.meter.clock.enter("backward")
        queue_backward_callback(hooks.at_backward_end(self))
        with torch.no_grad():
            for group in self.trained_groups:
                group.gradient.hide()
        self.executor.begin_backward()

    def on_grad(self, unit: Unit, param: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete.  Called where nothing is recorded for autograd."""
        if self.phase is not Phase.BACKWARD:
            raise UsageError(
                f"parameter '{unit.group_of[id(param)].name_of(param)}' got a gradient from outside the wrapped "
                "model's forward.",
                "Loss scale, averaging and reduction start at the outputs of the model that was wrapped.",
                "compute the loss from the wrapped model's outputs, or put the term into the model's forward.",
            )
        self.comm.progress()
        self.has_gradients = True
        unit.group_of[id(param)].gradient.collect(param)
        unit.arrived.add(id(param))
        if unit.reduced_in_backward:
            self.executor.late.add(unit.number)
        elif self._reduces_now and unit.is_complete:
            self.executor.advance()

    @property
    def _reduces_now(self) -> bool:
        """Sharded gradients are reduced in every backward, partial ones at the boundary."""
        return self.is_boundary or self.executor.reduces_each_backward

    def end_backward(self, *, joined: bool = True) -> None:
        """Every gradient of this backward has been computed on this rank.  joined: False where it skipped it."""
        with torch.no_grad():
            # A rank that skipped units owes the others gathers and reductions; it waits for none before it starts all.
            self.executor.gather_rest()
            if self.settings.unused_is_error:
                self.executor.refuse_unused()
            if self._reduces_now:
                self.executor.reduce_rest()
                if self.is_boundary:
                    self.executor.sum_over_replicas()
                self.comm_ctx.copy_engine.synchronize()
            self.executor.end()
            self.executor.reshard_all()
            self.executor.update_expected()
            self.phase, self._backward_id, self.forward.count = Phase.IDLE, -1, 0
            self.backwards += 1
            for group in self.trained_groups:
                group.gradient.expose(joined=joined)
        self.comm.meter.clock.enter(BETWEEN)

    def join_skipped_passes(self) -> None:
        """Take part in a forward and a backward that this rank skipped: gathers are walked, gradients are zeros."""
        with torch.no_grad():
            if self.forward.count == 0:
                self.executor.begin(self.executor.schedule.forward)
                self.executor.end()
            for group in self.trained_groups:
                group.gradient.hide()
            self.executor.begin_backward()
            self.end_backward(joined=False)

    # -- steps

    def before_step(self) -> None:
        """Take part in what this rank has skipped, and take over what the program made of `.grad`; what came too late
        (`executor.late`) is still to be reduced.  Collective.
        """
        self.comm.meter.clock.enter("optimizer")
        if self.backwards == 0:
            self.join_skipped_passes()
        self.executor.sum_over_replicas()
        for group in self.trained_groups:
            group.gradient.take_assigned()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no gradient: no backward has brought one, and the program has made none."""
        return not self.has_gradients and not any(group.gradient.state.is_edited for group in self.trained_groups)

    def after_step(self, *, drop: bool = True) -> None:
        """Forget the gradients (`drop`) and, once, agree on the order units were used in.  Collective."""
        if drop:
            self.drop_grads()
        self.backwards = 0
        if not self.executor.order_is_agreed:
            self.executor.agree_on_order()
        if self.comm.meter.end_step():
            self.comm_ctx.tiers.start_counting()
        if (changed := self.executor.tuner.after_step()) is not None:
            tuning.apply(self, changed)

    def drop_grads(self) -> None:
        """Forget every gradient; local, but all ranks must do it."""
        self.executor.wait_for_reduce()
        self.comm_ctx.copy_engine.synchronize()
        self.executor.late.clear()
        self.loss_factor.is_recorded = self.has_gradients = self.is_graphless = False
        for group in self.trained_groups:
            group.gradient.discard()
        if not self.settings.streams_weights:  # gathered weights would have their pages again a moment later
            self.comm_ctx.pool.return_pages()

    # -- trouble

    def on_backward_dropped(self, number: int) -> None:
        """A backward call is over; unless it came to its end, an exception ended it, which others wait to hear."""
        if self.phase is Phase.BACKWARD and self._backward_id == number:
            self.comm.post_error(RuntimeError("its backward ended early; its own output tells why"))

    def recover(self) -> None:
        """After a forward or backward that an exception ended: drain, drop the half-made gradients, start clean."""
        self.comm.withdraw_error()
        if self.phase is Phase.IDLE:
            return
        interrupted, self.phase = self.phase, Phase.IDLE
        self.forward.clear()
        with torch.no_grad():
            self.executor.end()
            self.executor.reshard_all()
            if interrupted is Phase.BACKWARD:
                self.drop_grads()
                self.backwards = 0
        self.forward.count = 0
