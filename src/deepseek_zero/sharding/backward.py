"""The backwards of a wrapped model, and its gradients until they are dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..base.device import backward_id, queue_backward_callback
from ..base.meter import BETWEEN
from .buffer import CommContext
from .executor import Executor
from .hooks import weak_hook
from .loss_factor import LossFactor
from .param_group import ParamGroup
from .step_state import Phase, StepState
from .unit import Unit


class Driver(Protocol):
    """Runs forwards and backwards of a wrapped model whose root is not called itself."""

    def before_step(self) -> None:
        """Finish the gradients of the next step, or raise.  Collective."""

    def forget(self) -> None:
        """Forget gradients that were dropped, or used.  Local."""


class Backward:
    """Gathers, collects and reduces when autograd's hooks say that a backward has come so far.

    Attributes:
        driver: Returns the driver, or None; it is held weakly.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        executor: Executor,
        comm_ctx: CommContext,
        loss_factor: LossFactor,
        step: StepState,
    ) -> None:
        self.units = units
        self.executor = executor
        self.comm = comm_ctx.world
        self.comm_ctx = comm_ctx
        self.loss_factor = loss_factor
        self.step = step
        self.driver: Callable[[], Driver | None] = lambda: None
        self._number = -1  # `backward_id` of the backward under way

    def _trained_groups(self) -> list[ParamGroup]:
        return [group for unit in self.units for group in unit.trained]

    # -- hooks

    def watch_grads(self, unit: int, group: ParamGroup) -> list[Any]:
        """Hook the gradients of a group's parameters. Returns torch's handles."""
        handles: list[Any] = []
        for member in group.members:
            if not member.is_frozen:
                handles.append(member.param.register_hook(BeforeGrad(self)))
                hook = weak_hook(self, Backward.on_grad, unit)
                handles.append(member.param.register_post_accumulate_grad_hook(hook))
        return handles

    def watch_output(self, unit: int, output: Tensor, *, is_first: bool = True) -> None:
        """Hook the gradient of a unit's output.

        Args:
            unit: The number of the unit.
            output: The output.
            is_first: It is the unit's first output in this forward. Backward comes to it last.
        """
        output.register_hook(weak_hook(self, Backward.on_output_grad, unit, is_first))

    def on_output_grad(self, number: int, is_first: bool, grad: Tensor) -> None:
        """A gradient reached a unit's output: its weights are about to be needed."""
        unit = self.units[number]
        gathers = self.executor.gathers
        reductions = self.executor.reductions
        is_new = number == 0 and self._number != backward_id()
        if is_new or self.step.phase is not Phase.BACKWARD:
            self.begin()
        if self.step.nonfinite is not None:
            self.step.nonfinite.record("grad", number, grad)
        if not is_first:
            gathers.unshard_apart(unit)
            return
        gathers.end_apart()
        gathers.reshard_frozen_before(unit)
        if reductions.reduces_now and number and self.step.forwards <= 1:
            gathers.gather_for_others(unit)
            with torch.no_grad():
                reductions.reduce_passed(unit)
        gathers.unshard(unit, externals=True)

    def on_grad(self, number: int, param: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete."""
        if torch.is_grad_enabled():  # under create_graph
            with torch.no_grad():
                self.on_grad(number, param)
            return
        unit = self.units[number]
        reductions = self.executor.reductions
        self.comm.progress()
        self.step.has_gradients = True
        unit.group_of[id(param)].gradient.summand.collect(param)
        unit.arrived.add(id(param))
        if unit.reduced_in_backward:
            reductions.late.add(number)
        elif reductions.reduces_now and unit.is_complete:
            reductions.advance()

    # -- one backward

    def begin(self) -> None:
        """The first gradient of a backward call reached this model."""
        self.loss_factor.refuse_unscaled()
        self.loss_factor.refuse_gradient_of_gradient()
        if self.step.phase is Phase.BACKWARD:
            self.recover()  # the backward before this one never ended
        self._number = backward_id()
        self.step.enter(Phase.BACKWARD)
        self.comm.meter.clock.enter("backward")
        callback = weak_hook(self, Backward.end)
        queue_backward_callback(callback)
        # Torch drops the callback unrun if an exception ends the backward.
        dropped = weak_hook(self, Backward._on_dropped, self._number, raises_if_gone=False)
        weakref.finalize(callback, dropped).atexit = False
        self._begin_passes(ends_step=self.step.is_boundary)

    def _on_dropped(self, number: int) -> None:
        """End a backward call.

        If backward did not come to its end, an exception ended it. The other ranks wait to be
        informed.
        """
        if self.step.phase is Phase.BACKWARD and self._number == number:
            error = RuntimeError("its backward ended early; its own output tells why")
            self.comm.waits.post_error(error)

    def _begin_passes(self, *, ends_step: bool) -> None:
        with torch.no_grad():
            for group in self._trained_groups():
                group.grad_view.hide()
        self.executor.begin_backward(ends_step=ends_step)

    def end(self, *, joined: bool = True) -> None:
        """Every gradient of this backward has been computed on this rank.

        Args:
            joined: This rank has run the backward; False if it skipped it.
        """
        gathers = self.executor.gathers
        reductions = self.executor.reductions
        with torch.no_grad():
            # A rank that skipped units owes the others gathers and reductions; it waits for none
            # before it starts all.
            gathers.gather_for_others()
            if self.executor.settings.unused_is_error:
                reductions.refuse_unused()
            if reductions.reduces_now:
                self._reduce_rest()
            gathers.end()
            gathers.reshard_all()
            reductions.update_expected()
            if self.step.phase is not Phase.IDLE:  # a rank that skipped the backward was not in it
                self.step.enter(Phase.IDLE)
            self._number = -1
            self.step.forwards = 0
            if self.is_in_step:
                self.step.backwards += 1
                self._show_grads(joined=joined)
        self.comm.meter.clock.enter(BETWEEN)

    def _reduce_rest(self) -> None:
        self.executor.reductions.reduce_rest()
        self.comm_ctx.copy_engine.synchronize()

    def _show_grads(self, *, joined: bool) -> None:
        for group in self._trained_groups():
            group.grad_view.show(joined=joined)

    @property
    def is_in_step(self) -> bool:
        """Return whether a forward or a backward now belongs to a step.

        It does not if every parameter is frozen and no backward came before: another model is
        trained through this one.
        """
        return bool(self.step.backwards) or any(unit.expected for unit in self.units)

    # -- without a backward

    def join_skipped_passes(self) -> None:
        """Take part in a forward and a backward that this rank skipped.

        It takes part in all gathers, and its gradients are zeros.
        """
        with torch.no_grad():
            if self.step.forwards == 0:
                self.executor.gathers.begin(self.executor.schedule.forward)
                self.executor.gathers.end()
            self._begin_passes(ends_step=self.step.is_boundary)
            self.end(joined=False)

    def reduce_step(self) -> None:
        """Reduce the gradients of the backwards since the last step.

        None of these backwards ended the step. This is for gradients that are changed between a
        step's last backward and their reduction.

        Note:
            Collective.
        """
        with torch.no_grad():
            self._begin_passes(ends_step=True)
            self._reduce_rest()
            self.executor.gathers.end()
            self._show_grads(joined=False)

    def before_step(self) -> None:
        """Take part in skipped passes, and apply the program's changes of `.grad`.

        Gradients that came too late (`ReduceLane.late`) are still to be reduced.

        Note:
            Collective.
        """
        self.comm.meter.clock.enter("optimizer")
        if (driver := self.driver()) is not None:
            driver.before_step()
        if self.step.backwards == 0:
            self.join_skipped_passes()
        self.executor.reductions.complete_sums()
        for group in self._trained_groups():
            group.grad_view.take_assigned()

    def drop_grads(self) -> None:
        """Forget every gradient; local, but all ranks must do it."""
        self.executor.reductions.wait()
        self.comm_ctx.copy_engine.synchronize()
        self.executor.reductions.late.clear()
        self.loss_factor.is_recorded = False
        self.step.has_gradients = False
        self.step.is_graphless = False
        for group in self._trained_groups():
            group.gradient.discard()
        if (driver := self.driver()) is not None:
            driver.forget()
        # Gathered weights would have their pages again a moment later
        if not self.executor.settings.streams_weights:
            self.comm_ctx.pool.return_pages()

    def discard_step(self) -> None:
        """Drop the backwards since the last step and their gradients.

        Local, but all ranks must call it.
        """
        self.drop_grads()
        self.step.backwards = 0

    def recover(self) -> None:
        """Return to a clean state after an exception in forward or backward.

        Transfers in progress are finished, and incomplete gradients are dropped.
        """
        self.comm.waits.withdraw_error()
        interrupted = self.step.phase
        if interrupted is Phase.IDLE:
            return
        self.step.enter(Phase.IDLE)
        self.step.active.clear()
        self.step.parts.clear()
        with torch.no_grad():
            self.executor.gathers.end()
            for unit in self.units:
                unit.unpin()
            if interrupted is Phase.BACKWARD:
                self.discard_step()
        self.step.forwards = 0


class BeforeGrad:
    """The hook that begins a backward before autograd writes the first `.grad` of a parameter.

    A loss that uses only hidden states or parameters reaches no output.
    """

    __torch_unserializable__ = True  # torch.save leaves it out without a warning

    def __init__(self, backward: Backward) -> None:
        self._backward = weakref.ref(backward)

    def __call__(self, grad: Tensor) -> None:
        backward = self._backward()
        if backward is None or backward.step.phase is Phase.BACKWARD:
            return
        # Torch.autograd.grad inside a forward writes no `.grad` (tiled_loss.py)
        if not backward.step.active:
            backward.begin()
