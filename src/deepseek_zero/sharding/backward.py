"""Backward hooks of a wrapped model, and its gradients until they are dropped."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import backward_id, queue_backward_callback
from ..base.log import log_once
from ..base.meter import BETWEEN
from .comm_context import CommContext
from .gather_lane import GatherLane
from .hooks import weak_hook
from .irregular_passes import join_skipped_passes, recover
from .param_group import ParamGroup
from .reduce_lane import ReduceLane
from .step_state import Phase, StepState

OLD_FORWARD = (
    "a backward belongs to a forward that ran before the last step(): its gradients are computed "
    "with the updated weights, so they are not those of that forward.  PyTorch raises an error in "
    "this case.\n"
    "  What to do: call backward before step(), or run the forward again after step()."
)


class Backward:
    """Registers autograd hooks that gather weights and reduce gradients during backward.

    Attributes:
        units: The units of the model, the root first.
        gathers: Issues the all-gathers of weights, in order.
        reductions: Issues the reductions of gradients, in order.
        comm: The communicator of all ranks of the job.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        step: The phase of the model and the progress of the current step.
        before_backwards: Functions that run at the beginning of each backward.
        before_ends: Functions that run at its end, before the remaining units are reduced.
        before_steps: Functions that run before each step of the optimizer.
        after_drops: Functions that run after gradients were discarded.
    """

    def __init__(
        self,
        gathers: GatherLane,
        reductions: ReduceLane,
        comm_ctx: CommContext,
    ) -> None:
        self.units = gathers.units
        self.gathers = gathers
        self.reductions = reductions
        self.comm = comm_ctx.world
        self.comm_ctx = comm_ctx
        self.step = StepState()
        self.before_backwards: list[Callable[[], None]] = []
        self.before_ends: list[Callable[[], None]] = []
        self.before_steps: list[Callable[[], None]] = []
        self.after_drops: list[Callable[[], None]] = []
        self._number = -1  # `backward_id` of the current backward
        self._warned_of_old_forward = False

    def trained_groups(self) -> list[ParamGroup]:
        """Return the parameter groups that have a gradient, unit by unit."""
        return [group for unit in self.units for group in unit.trained]

    # -- hooks

    def watch_grads(self, unit: int, group: ParamGroup) -> list[Any]:
        """Register hooks on the gradients of a group's parameters, and return their handles."""
        handles: list[Any] = []
        for member in group.members:
            if not member.is_frozen:
                before = weak_hook(self, Backward.before_grad, raises_if_gone=False)
                handles.append(member.param.register_hook(before))
                hook = weak_hook(self, Backward.on_grad, unit)
                handles.append(member.param.register_post_accumulate_grad_hook(hook))
        return handles

    def watch_output(self, unit: int, output: Tensor, *, is_first: bool = True) -> None:
        """Register a hook on the gradient of an output of a unit.

        Args:
            unit: The number of the unit.
            output: A tensor that the unit's forward returned.
            is_first: Whether it is the unit's first use in this forward, which backward reaches
                last.
        """
        updates = self.step.updates
        output.register_hook(weak_hook(self, Backward.on_output_grad, unit, is_first, updates))

    def on_output_grad(self, number: int, is_first: bool, updates: int, grad: Tensor) -> None:
        """Unshard a unit, because a gradient has reached an output (see `watch_output`).

        Args:
            number: The number of the unit.
            is_first: As in `watch_output`.
            updates: The number of updates of the weights before the unit's forward.
            grad: The gradient of the output.
        """
        if updates != self.step.updates and not self._warned_of_old_forward:
            self._warned_of_old_forward = True
            log_once(OLD_FORWARD, logging.WARNING)
        unit = self.units[number]
        gathers = self.gathers
        reductions = self.reductions
        is_new = number == 0 and self._number != backward_id()
        if is_new or self.step.phase is not Phase.BACKWARD:
            self.begin()
        if self.step.nonfinite is not None:
            self.step.nonfinite.record("grad", number, grad)
        if not is_first:
            self.step.uses.unshard_again(unit)
            return
        self.step.uses.end_again()
        gathers.reshard_frozen_before(unit)
        if reductions.reduces_now and number and self.step.forwards <= 1:
            gathers.gather_for_others(unit)
            with torch.no_grad():
                reductions.reduce_passed(unit)
        gathers.unshard(unit, externals=True)

    def before_grad(self, grad: Tensor) -> None:
        """Start the backward before autograd writes a parameter's `.grad`.

        A loss that uses only hidden states or parameters does not reach any output of the model,
        whose hooks would otherwise start the backward.
        """
        # `torch.autograd.grad` inside a forward writes no `.grad` (tiled_loss.py).
        if self.step.phase is not Phase.BACKWARD and not self.step.active:
            self.begin()

    def on_grad(self, number: int, param: nn.Parameter) -> None:
        """Collect the gradient that autograd has accumulated in a parameter's `.grad`."""
        if torch.is_grad_enabled():  # under create_graph
            with torch.no_grad():
                self.on_grad(number, param)
            return
        unit = self.units[number]
        reductions = self.reductions
        self.comm.progress()  # receives messages of other ranks without waiting
        self.step.has_gradients = True
        unit.group_of[id(param)].gradient.summand.collect(param)
        unit.arrived.add(id(param))
        if unit.reduced_in_backward:
            reductions.late.add(number)
        elif reductions.reduces_now and unit.is_complete:
            reductions.advance()

    # -- one backward

    def begin(self) -> None:
        """Start a backward when its first gradient reaches this model."""
        for check in self.before_backwards:
            check()
        if self.step.phase is Phase.BACKWARD:
            recover(self)  # the backward before this one never ended
        self._number = backward_id()
        self.step.enter(Phase.BACKWARD)
        self.comm.meter.clock.enter("backward")
        callback = weak_hook(self, Backward.end)
        queue_backward_callback(callback)
        # Torch drops the callback without a call if an exception ends the backward.
        dropped = weak_hook(self, Backward._on_dropped, self._number, raises_if_gone=False)
        weakref.finalize(callback, dropped).atexit = False
        self.begin_passes(ends_step=self.step.is_boundary)

    def _on_dropped(self, number: int) -> None:
        """Post an error to the other ranks if an exception ended a backward call."""
        if self.step.phase is Phase.BACKWARD and self._number == number:
            error = RuntimeError("its backward ended early; its own output tells why")
            self.comm.waits.post_error(error)

    def begin_passes(self, *, ends_step: bool) -> None:
        """Prepare for the gathers and reductions of a backward. Collective."""
        with torch.no_grad():
            for group in self.trained_groups():
                group.grad_view.hide()
        self.reductions.begin(ends_step=ends_step)
        schedule = self.gathers.schedule
        self.gathers.begin(schedule.backward if ends_step else schedule.accumulate)

    def end(self, *, joined: bool = True) -> None:
        """Complete a backward; `joined` is false if this rank skipped it. Collective."""
        gathers = self.gathers
        reductions = self.reductions
        with torch.no_grad():
            # A rank that skipped units must still take part in their gathers and reductions. It
            # starts all of them before it waits for one.
            gathers.gather_for_others()
            for check in self.before_ends:
                check()
            if reductions.reduces_now:
                reductions.reduce_remaining()
                self.comm_ctx.copy_engine.synchronize()
            gathers.end()
            gathers.reshard_all()
            reductions.update_expected()
            if self.step.phase is not Phase.IDLE:  # not entered if this rank skipped the backward
                self.step.enter(Phase.IDLE)
            self._number = -1
            self.step.forwards = 0
            if self.is_in_step:
                self.step.backwards += 1
                self.show_grads(joined=joined)
        self.comm.meter.clock.enter(BETWEEN)

    def show_grads(self, *, joined: bool) -> None:
        """Show the collected gradients as `.grad`; `joined` as in `end`."""
        for group in self.trained_groups():
            group.grad_view.show(joined=joined)

    @property
    def is_in_step(self) -> bool:
        """Whether the current forward or backward belongs to a training step of this model.

        If all parameters are frozen, another model may be trained through this one.
        """
        return bool(self.step.backwards) or any(unit.expected for unit in self.units)

    # -- the gradients of a step

    def before_step(self) -> None:
        """Complete the gradients of a step, with values assigned to `.grad`. Collective.

        If this rank skipped a forward and backward, it runs their collectives.
        """
        self.comm.meter.clock.enter("optimizer")
        for hook in self.before_steps:
            hook()
        if self.step.backwards == 0:
            join_skipped_passes(self)
        self.reductions.complete_sums()
        for group in self.trained_groups():
            group.grad_view.take_assigned()

    def drop_grads(self) -> None:
        """Discard every gradient. Every rank must call it; it does not communicate."""
        self.reductions.wait()
        self.comm_ctx.copy_engine.synchronize()
        self.reductions.late.clear()
        self.step.has_gradients = False
        self.step.is_graphless = False
        for group in self.trained_groups():
            group.gradient.discard()
        for hook in self.after_drops:
            hook()

    def discard_step(self) -> None:
        """Discard the gradients of all backwards since the last step, as `drop_grads`."""
        self.drop_grads()
        self.step.backwards = 0
