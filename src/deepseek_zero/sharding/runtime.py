"""ZeRO at work: what happens to one wrapped model when torch calls.

`Runtime` owns the phase (idle, forward, backward) and the steps; `Forward` what happens around each
unit's forward; the hooks at the end of this file are where torch calls in.  `executor.py` runs the
program.  Optimizers read the slices of `groups`; `loss.backward()` alone drives everything.  Hooks
hold the runtime weakly, so that dropping an engine returns its memory at once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..base.device import (
    backward_id,
    ends_recomputation,
    in_torch_func,
    next_node_number,
    outside_torch_func,
    queue_backward_callback,
)
from ..base.errors import NotBuiltError, UsageError
from ..base.meter import BETWEEN
from ..base.nested import cast_inputs, map_inputs, map_tensors, tensors_in
from ..comm.collectives import Comm
from ..planner.plan import Plan
from ..planner.plan_settings import Compression, PlanSettings
from .buffer import CommContext
from .entries import record_forward, scale_entries
from .executor import Executor
from .loss_factor import LossFactor, factor_of_leaf, watch_backwards
from .model_changes import Structure
from .nonfinite import NonFiniteDetector
from .param_group import ParamGroup
from .regroup import follow_requires_grad
from .rules import ModelRules
from .saved_tensor_hooks import weight_hooks
from .sharded_parameter import Hook
from .state_dict import StateDictMode, join_stages, shard_state_dicts
from .unit import Unit, UnitState


class Phase(Enum):
    """One line per phase of a wrapped model."""

    IDLE = "idle"  # between forward and backward, and between steps
    FORWARD = "forward"  # inside the root module's forward
    BACKWARD = "backward"  # inside a backward that reached an output of the model


PHASE_MOVES = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.FORWARD, Phase.IDLE),  # it ended, or an exception ended it
    (
        Phase.FORWARD,
        Phase.BACKWARD,
    ),  # of an output so far: inside the forward, or after an exception ended it
    (Phase.BACKWARD, Phase.IDLE),  # as above
}


class Driver(Protocol):
    """Who runs the forwards and backwards of a wrapped model, where its root is not called as a
    whole.
    """

    def before_step(self) -> None:
        """Finish the gradients of the step to come, or raise.  Collective."""
        ...

    def forget(self) -> None:
        """Gradients are dropped, or used up.  Local."""
        ...


class Runtime:
    """One wrapped model at work."""

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
        self._phase = Phase.IDLE
        self.is_boundary = (
            True  # the backward to come ends an accumulation: replicated gradients are reduced
        )
        self.loss_factor = LossFactor(
            partial(_accumulation_of, weakref.ref(self)), is_strict=rules.requires_scaled_loss
        )
        self.nonfinite: NonFiniteDetector | None = (
            None  # after a skipped step, under precision "auto"
        )
        self.driver: Callable[[], Driver | None] = lambda: None  # weak, where there is one
        self.backwards = 0  # finished since the last step
        self.has_gradients = False  # a backward has brought one since they were dropped
        self.is_graphless = False  # a loss without a graph was given since the last step
        most_reductions = self.machine.most_reductions
        self.executor = Executor(
            units, plan.settings, plan.schedule, self.comm, comm_ctx.issue_queue, most_reductions
        )
        self.forward = Forward(self, rules)
        self._backward_id = -1
        for group in self.groups:
            group.runtime = weakref.ref(self)
        self.state_dicts = StateDictMode(gathers=rules.gathers_state_dict)
        self._handles = [*install_hooks(self), *shard_state_dicts(units, self.state_dicts)]
        if (pipe := self.comm.along.get("pp")) is not None:
            self._handles += join_stages(self.model, pipe, self.state_dicts)

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to another phase; only what is in this file does."""
        if (self._phase, phase) not in PHASE_MOVES:
            raise AssertionError(
                f"a wrapped model cannot go from {self._phase.value} to {phase.value}"
            )
        self._phase = phase

    @property
    def plan(self) -> Plan:
        """The plan this run follows now.

        Since it was built groups may have been divided, promoted or laid out anew, and the order of
        units agreed.
        """
        units = tuple(unit.planned for unit in self.units)
        return replace(
            self._planned, settings=self.settings, units=units, schedule=self.executor.schedule
        )

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
    def is_in_step(self) -> bool:
        """Return whether a forward or a backward now belongs to a step.

        It does not if every parameter is frozen and no backward came before: another model is
        trained through this one.
        """
        if self.backwards:
            return True
        members = (member for group in self.groups for member in group.members)
        return any(not member.is_frozen for member in members)

    @property
    def is_between_steps(self) -> bool:
        """Return whether no backward, and no forward with gradients, came after the last step."""
        return self.backwards == 0 and self.forward.count == 0

    @property
    def is_destroyed(self) -> bool:
        """Whether the model was let go; its slices stay until another engine takes them over."""
        return not self._handles

    @property
    def hooks(self) -> list[Any]:
        """The handles of all hooks on the model, those to come included."""
        return self._handles

    def remove_hooks(self) -> None:
        """Undo the hooks; the parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def add_group(self, unit: Unit, group: ParamGroup) -> None:
        """Drive a group that regrouping has put into a unit, and hook its gradients if it is
        trained.
        """
        group.runtime = weakref.ref(self)
        if group.trainable:
            self._handles += watch_grads(self, unit.number, group)

    def replan(self) -> None:
        """Plan the schedule and the checks again after units got other groups; every rank does so.
        Local.
        """
        self.comm_ctx.pool.clear()
        self.executor.replan()
        self.forward.structure.follow(self.groups)

    def promote_to_fp32(self, unit: Unit) -> None:
        """Compute a unit in fp32 from now on.  Collective; raises if the unit is not sharded."""
        unit.promote_to_fp32()
        self.forward.any_promoted = True

    def demote(self, unit: Unit) -> None:
        """Compute a promoted unit in 16 bits again.  Collective; raises if the unit is not
        sharded.
        """
        unit.demote()
        self.forward.any_promoted = any(each.is_promoted for each in self.units)

    @property
    def comm_of_units(self) -> Comm:
        """The ranks whose units are the same ones, whatever part of them each has: all but those of
        other stages.
        """
        return self.comm if "pp" in self.comm.along else self.comm.whole

    def unit_of(self, group: ParamGroup) -> Unit:
        return next(unit for unit in self.units if group in unit.groups)

    def fetch(self, group: ParamGroup) -> bool:
        """Gather a group's unit because something reads a parameter at rest; False outside forward
        and backward.
        """
        if self._phase is Phase.IDLE and not self.forward.active and backward_id() == -1:
            return False
        unit = self.unit_of(group)
        if self.forward.active:
            self.executor.gathers.remember_external(self.forward.active[-1].unit, unit)
        self.executor.gathers.unshard(unit)
        return True

    def fetch_saved(self, group: ParamGroup) -> None:
        """Gather a group's unit because the backward now running needs a weight that its forward
        saved.
        """
        if self._phase is not Phase.BACKWARD and backward_id() != -1:
            self._open_backward()
        self.fetch(group)

    @property
    def was_interrupted(self) -> bool:
        """A backward that an exception ended: its phase never closed, and no backward runs now."""
        return self._phase is Phase.BACKWARD and backward_id() == -1

    # -- backward

    def on_output_grad(self, unit: Unit, grad: Tensor, *, is_first: bool = True) -> None:
        """A gradient reached a unit's output: its weights are about to be needed.

        is_first: of its outputs in this forward, the first, which backward comes to last.
        """
        if self._phase is not Phase.BACKWARD or (
            unit is self.root and self._backward_id != backward_id()
        ):
            self._open_backward()
        if self.nonfinite is not None:
            self.nonfinite.record("grad", unit.number, grad)
        if not is_first:
            self.executor.gathers.unshard_apart(unit)
            return
        self.executor.gathers.end_apart()
        self.executor.gathers.reshard_frozen_before(unit)
        if (
            self.executor.reductions.reduces_now
            and unit is not self.root
            and self.forward.count <= 1
        ):
            self.executor.gathers.gather_for_others(unit)
            with torch.no_grad():
                self.executor.reductions.reduce_passed(unit)
        self.executor.gathers.unshard(unit, externals=True)

    def _open_backward(self) -> None:
        """The first gradient of a backward call reached an output of this model."""
        self.loss_factor.refuse_unscaled()
        self.loss_factor.refuse_gradient_of_gradient()
        if self._phase is Phase.BACKWARD:
            self.recover()  # the backward before this one never ended
        self._backward_id = backward_id()
        self.enter(Phase.BACKWARD)
        self.comm.meter.clock.enter("backward")
        queue_backward_callback(at_backward_end(self))
        with torch.no_grad():
            for group in self.trained_groups:
                group.grad_view.hide()
        self.executor.begin_backward(ends_step=self.is_boundary)

    def before_grad(self) -> None:
        """Open the backward before autograd writes a parameter's first `.grad`, if no output was
        reached before.

        A loss that uses only hidden states or parameters reaches no output.
        """
        if self._phase is not Phase.BACKWARD:
            self._open_backward()

    def on_grad(self, unit: Unit, param: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete.  Called where nothing is recorded
        for autograd.
        """
        self.comm.progress()
        self.has_gradients = True
        unit.group_of[id(param)].gradient.collect(param)
        unit.arrived.add(id(param))
        if unit.reduced_in_backward:
            self.executor.reductions.late.add(unit.number)
        elif self.executor.reductions.reduces_now and unit.is_complete:
            self.executor.reductions.advance()

    def end_backward(self, *, joined: bool = True) -> None:
        """Every gradient of this backward has been computed on this rank.  joined: False where it
        skipped it.
        """
        with torch.no_grad():
            # A rank that skipped units owes the others gathers and reductions; it waits for none
            # before it starts all.
            self.executor.gathers.gather_for_others()
            if self.settings.unused_is_error:
                self.executor.reductions.refuse_unused()
            if self.executor.reductions.reduces_now:
                self.executor.reductions.reduce_rest()
                self.comm_ctx.copy_engine.synchronize()
            self.executor.gathers.end()
            self.executor.gathers.reshard_all()
            self.executor.reductions.update_expected()
            if self._phase is not Phase.IDLE:  # a rank that skipped the backward was not in it
                self.enter(Phase.IDLE)
            self._backward_id = -1
            self.forward.count = 0
            if self.is_in_step:
                self.backwards += 1
                for group in self.trained_groups:
                    group.grad_view.show(joined=joined)
        self.comm.meter.clock.enter(BETWEEN)

    def join_skipped_passes(self) -> None:
        """Take part in a forward and a backward that this rank skipped: gathers are walked,
        gradients are zeros.
        """
        with torch.no_grad():
            if self.forward.count == 0:
                self.executor.gathers.begin(self.executor.schedule.forward)
                self.executor.gathers.end()
            for group in self.trained_groups:
                group.grad_view.hide()
            self.executor.begin_backward(ends_step=self.is_boundary)
            self.end_backward(joined=False)

    def reduce_step(self) -> None:
        """Reduce the gradients of the backwards since the last step, none of which ended it.
        Collective.

        For gradients that are changed between a step's last backward and their reduction.
        """
        with torch.no_grad():
            for group in self.trained_groups:
                group.grad_view.hide()
            self.executor.begin_backward(ends_step=True)
            self.executor.reductions.reduce_rest()
            self.comm_ctx.copy_engine.synchronize()
            self.executor.gathers.end()
            for group in self.trained_groups:
                group.grad_view.show(joined=False)

    # -- steps

    def before_step(self) -> None:
        """Take part in what this rank has skipped, and take over what the program made of `.grad`;
        what came too late (`executor.reductions.late`) is still to be reduced.  Collective.
        """
        self.comm.meter.clock.enter("optimizer")
        if (driver := self.driver()) is not None:
            driver.before_step()
        if self.backwards == 0:
            self.join_skipped_passes()
        self.executor.reductions.complete_sums()
        for group in self.trained_groups:
            group.grad_view.take_assigned()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no gradient: no backward has brought one, and the program has made
        none.
        """
        return not self.has_gradients and not any(
            group.gradient.is_edited for group in self.trained_groups
        )

    def after_step(self, *, drop: bool = True) -> None:
        """Forget the gradients (`drop`) and, once, agree on the order units were used in.
        Collective.
        """
        if drop:
            self.drop_grads()
        elif (driver := self.driver()) is not None:
            driver.forget()
        self.backwards = 0
        self.executor.agree_on_order()
        if self.comm.meter.end_step():
            self.comm_ctx.tiers.start_counting()
        tuner = self.executor.tuner
        if tuner is not None and (changed := tuner.after_step()) is not None:
            # Sizes alone: the tuner does not hear of what else has changed since it began.
            self.resize(
                replace(
                    self.settings,
                    ahead_numel=changed.ahead_numel,
                    bucket_numel=changed.bucket_numel,
                )
            )

    def send_as(self, compression: Compression) -> None:
        """Send matrices as another compression of the same layout says, between two steps; every
        rank does so.

        Local.
        """
        self.settings = replace(self.settings, compression=compression)
        for group in self.groups:
            group.send_as(self.settings)
        self.executor.replan(self.settings)
        self.comm_ctx.pool.clear()

    def resize(self, settings: PlanSettings) -> None:
        """Go on with other sizes, between two steps; every rank does so after the same step."""
        self.settings = settings
        self.executor.replan(settings)
        self.comm_ctx.pool.clear()  # buffers of the old sizes
        for group in self.groups:
            group.comm_ctx = replace(group.comm_ctx, bucket_numel=settings.bucket_numel)

    def drop_grads(self) -> None:
        """Forget every gradient; local, but all ranks must do it."""
        self.executor.reductions.wait()
        self.comm_ctx.copy_engine.synchronize()
        self.executor.reductions.late.clear()
        self.loss_factor.is_recorded = self.has_gradients = self.is_graphless = False
        for group in self.trained_groups:
            group.gradient.discard()
        if (driver := self.driver()) is not None:
            driver.forget()
        # Gathered weights would have their pages again a moment later
        if not self.settings.streams_weights:
            self.comm_ctx.pool.return_pages()

    def discard_step(self) -> None:
        """Forget the backwards since the last step and their gradients; local, but all ranks must
        do it.
        """
        self.drop_grads()
        self.backwards = 0

    # -- trouble

    def on_backward_dropped(self, number: int) -> None:
        """A backward call is over; unless it came to its end, an exception ended it, which others
        wait to hear.
        """
        if self._phase is Phase.BACKWARD and self._backward_id == number:
            self.comm.post_error(RuntimeError("its backward ended early; its own output tells why"))

    def recover(self) -> None:
        """After a forward or backward that an exception ended: drain, drop the half-made gradients,
        start clean.
        """
        self.comm.withdraw_error()
        if self._phase is Phase.IDLE:
            return
        interrupted = self._phase
        self.enter(Phase.IDLE)
        self.forward.clear()
        with torch.no_grad():
            self.executor.gathers.end()
            self.executor.gathers.unpin()
            if interrupted is Phase.BACKWARD:
                self.discard_step()
        self.forward.count = 0


def _accumulation_of(reference: weakref.ref[Runtime]) -> int:
    runtime = reference()
    return 1 if runtime is None else runtime.settings.accumulation


# -- forward


class ForwardFrame:
    """A unit whose forward runs now, and the contexts to leave after it (saved-tensor hooks,
    autocast).

    was_here: its weights were gathered before.  is_border: gradients enter and leave the engine
    around it.  is_first: it has not been used before in this forward; of tiles alone.
    has_returned: its forward came to its end.
    """

    def __init__(self, unit: Unit, *, is_border: bool, is_first: bool) -> None:
        self.unit = unit
        self.was_here = unit.state is not UnitState.SHARDED
        self.is_border = is_border
        self.is_first = is_first
        self.contexts: list[Any] = []
        self.has_returned = False
        # Number of the first node of autograd's inside
        self.begin = next_node_number() if is_border else 0


class Forward:
    """The forwards of one wrapped model.  active: under way, outermost first.

    count: forwards with gradients since a backward.
    """

    def __init__(self, runtime: Runtime, rules: ModelRules) -> None:
        self._runtime = weakref.ref(runtime)
        self.active: list[ForwardFrame] = []
        self.count = 0
        self._tiles_used: set[int] = set()  # in the forward under way
        self.any_promoted = (
            False  # so units differ in compute dtype, and what passes between them must be cast
        )
        self.structure = Structure(
            runtime.model, runtime.groups, takes_strangers=rules.allows_unmanaged_params
        )
        self._parts: list[
            nn.Module
        ] = []  # of the root, that run outside any unit's forward; outermost first
        self._begin_of_part = 0  # number of autograd's first node inside the outermost of them
        self._gathered_for: nn.Module | None = (
            None  # the one of these that the root was gathered for
        )

    @property
    def runtime(self) -> Runtime:
        runtime = self._runtime()
        assert runtime is not None  # hooks call in only while it lives
        return runtime

    def pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a unit's forward: its weights are in use when this returns."""
        begins = (
            unit is self.runtime.root
            and not self.active
            and (self.runtime.phase is not Phase.BACKWARD or self.runtime.was_interrupted)
        )
        if begins:
            self.runtime.recover()
            self.runtime.enter(Phase.FORWARD)
            self.runtime.comm.meter.clock.enter("forward")
            self._tiles_used.clear()
        is_border = self._is_outermost() and self.runtime.loss_factor.has_border
        is_first = not unit.is_tile or self._is_first_use(unit)
        self.active.append(ForwardFrame(unit, is_border=is_border, is_first=is_first))
        begins_a_step = torch.is_grad_enabled() and self.runtime.is_between_steps
        if begins:
            for group in self.runtime.groups[:1]:  # weights are moved away of all groups or of none
                group.refuse_offloaded_weight()
            if torch.is_grad_enabled():
                self.runtime.loss_factor.forward_begins()
                follow_requires_grad(self.runtime)
            schedule = self.runtime.executor.schedule
            self.runtime.executor.gathers.begin(
                schedule.forward if torch.is_grad_enabled() else schedule.inference
            )
        if unit is self.runtime.root and begins_a_step:
            self.structure.check()
            for group in self.runtime.trained_groups:
                group.gradient.release()
        # recomputed: one tile at a time, as in forward
        again = unit.is_tile and self.runtime.phase is Phase.BACKWARD
        self.runtime.executor.gathers.unshard(unit, in_turn=not again, externals=True)
        if is_border:
            args, kwargs = self._inside((args, kwargs))
        args, kwargs = self.as_computed(unit, (args, kwargs))
        if self.runtime.nonfinite is not None:
            self.runtime.nonfinite.record("input", unit.number, (args, kwargs))
        for context in self._contexts(unit):
            context.__enter__()
            self.active[-1].contexts.append(context)
        return args, kwargs

    def as_computed(self, unit: Unit, given: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return a unit's arguments in the dtype that it computes in."""
        if (
            not (unit is self.runtime.root and self.runtime.settings.policy.auto_cast)
            and not self.any_promoted
        ):
            return given
        dtype = self.compute_dtype_of(unit)
        return cast_inputs(given[0], dtype), cast_inputs(given[1], dtype)

    def as_passed(self, unit: Unit, output: Any) -> Any:
        """Return a unit's output in the dtype that passes between units."""
        is_cast = self.any_promoted and unit is not self.runtime.root
        return cast_inputs(output, self.compute_dtype_of(self.runtime.root)) if is_cast else output

    def _is_first_use(self, tile: Unit) -> bool:
        """Whether no layer has used a tile before in this forward; a recomputed use is none of its
        own.
        """
        if self.runtime.phase is not Phase.FORWARD:
            return True
        known = tile.number in self._tiles_used
        self._tiles_used.add(tile.number)
        return not known

    def _is_outermost(self) -> bool:
        """Whether a forward here is one that backward will come out of and go into: recorded, and
        not recomputed.
        """
        if self.active or self._parts or not torch.is_grad_enabled():
            return False
        return self.runtime.phase is not Phase.BACKWARD or self.runtime.was_interrupted

    def _inside(self, given: Any) -> Any:
        """Arguments whose gradients leave the engine without its factor."""
        tensors = tensors_in(given)
        if not tensors:
            return given
        found = scale_entries(tensors, factor_of_leaf)
        outside = {id(tensor): each for tensor, each in zip(tensors, found, strict=True)}

        def alias(tensor: Tensor) -> Tensor:
            is_param = isinstance(tensor, nn.Parameter)
            return (
                tensor
                if is_param
                else _alias(self.runtime, outside.get(id(tensor), tensor), _unscale)
            )

        return map_inputs(given, alias)

    def _outside(self, output: Any, begin: int) -> Any:
        """Return an output that multiplies its gradients by the engine's factor.  begin: see
        `record_forward`.
        """
        watch_backwards()
        end = next_node_number()
        output = map_tensors(output, partial(output_alias, self.runtime))
        record_forward(begin, end, next_node_number(), self.runtime.loss_factor.at_entry)
        return output

    def clear(self) -> None:
        """No forward is under way: an exception has ended them."""
        self.active.clear()
        self._parts.clear()

    def compute_dtype_of(self, unit: Unit) -> torch.dtype | None:
        return torch.float32 if unit.is_promoted else self.runtime.settings.policy.compute

    def _contexts(self, unit: Unit) -> Iterator[Any]:
        autocast = self.runtime.settings.policy.autocast
        if unit is self.runtime.root and autocast is not None:
            yield torch.autocast(self.runtime.comm_ctx.pool.device.type, dtype=autocast)
        # Between forward and backward
        goes = unit.is_copied and unit.number not in self.runtime.executor.schedule.kept
        # Recomputed, to be used by backward at once
        again = self.runtime.phase is Phase.BACKWARD and not unit.is_tile
        if goes and not again and torch.is_grad_enabled():
            yield weight_hooks(unit, self.runtime.fetch_saved)

    def returned(self) -> None:
        """The innermost forward has come to its end; without this word it has raised when it is
        left.
        """
        self.active[-1].has_returned = True

    def post_forward(self, unit: Unit, given: Any, output: Any) -> Any:
        """After a unit's forward, whether it returned or raised.  given: its arguments, where a
        unit that returns nothing has left its result.
        """
        active = self.active.pop()
        for context in reversed(active.contexts):
            context.__exit__(None, None, None)
        if not active.has_returned:
            # Torch calls this hook while it handles what the forward raised
            error = sys.exception()
            if error is not None and not ends_recomputation(error):
                self.runtime.comm.post_error(error)
            return output
        output = self.as_passed(unit, output)
        if self.runtime.nonfinite is not None:
            self.runtime.nonfinite.record("output", unit.number, output)
        training = torch.is_grad_enabled()
        result = output if output is not None else given
        if training:
            for tensor in tensors_in(result):
                watch_output(self.runtime, unit.number, tensor, is_first=active.is_first)
        if unit is self.runtime.root and not self.active:
            self._end_forward(training)
        if active.is_border:
            result = self._outside(result, active.begin)
            output = result if output is not None else None
        if unit is self.runtime.root and not self.active:
            return output
        recomputes = self.runtime.phase is Phase.BACKWARD
        was_unsharded = active.was_here
        self.runtime.executor.gathers.after_forward(
            unit, training=training, recomputes=recomputes, was_unsharded=was_unsharded
        )
        return output

    def _end_forward(self, training: bool) -> None:
        if self.runtime.phase is not Phase.FORWARD:
            return
        self.runtime.executor.gathers.end()
        self.runtime.enter(Phase.IDLE)
        self.runtime.comm.meter.clock.enter(BETWEEN)
        if training and self.runtime.is_in_step:
            self.count += 1

    def pre_forward_part(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before a part of the root.  One that is called by itself, outside any forward, has the
        root gathered for it. Collective.
        """
        runtime = self.runtime
        if self.active:
            return None
        is_border = self._is_outermost() and runtime.loss_factor.has_border
        self._parts.append(module)
        if is_border:
            self._begin_of_part = next_node_number()
        if (
            runtime.phase is Phase.IDLE
            and runtime.root.sharded
            and runtime.root.state is UnitState.SHARDED
        ):
            self._gathered_for = module
            runtime.executor.gathers.unshard(runtime.root)
        return self._inside((args, kwargs)) if is_border else None

    def post_forward_part(self, module: nn.Module, output: Any) -> Any:
        """After a part of the root: what backward must know of one that was called by itself."""
        if self.active or not self._parts:
            return output
        self._parts.pop()
        if self._gathered_for is module:
            self._gathered_for = None
            self.runtime.root.reshard()
        if self._parts or not self._is_outermost():
            return output
        for tensor in tensors_in(output):
            watch_output(self.runtime, self.runtime.root.number, tensor)
        return (
            self._outside(output, self._begin_of_part)
            if self.runtime.loss_factor.has_border
            else output
        )


# -- where torch calls in


def install_hooks(runtime: Runtime) -> list[Any]:
    """Hook every unit of a runtime; returns torch's handles."""
    handles: list[Any] = []
    for unit in runtime.units:
        before, after = (
            _bound(hook, runtime, unit.number) for hook in (_before_forward, _after_forward)
        )
        handles.append(
            unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        # Torch calls it, before the other, only where nothing was raised
        returned = _bound(_forward_returned, runtime)
        handles.append(unit.module.register_forward_hook(returned))
        handles.append(unit.module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for group in unit.trained:
            handles += watch_grads(runtime, unit.number, group)
    for part in _parts_of_root(runtime):
        handles.append(
            part.register_forward_pre_hook(
                _bound(_before_part, runtime), with_kwargs=True, prepend=True
            )
        )
        handles.append(part.register_forward_hook(_bound(_after_part, runtime), always_call=True))
    return handles


def watch_grads(runtime: Runtime, number: int, group: ParamGroup) -> list[Any]:
    """Tell the runtime of every gradient of a group that is complete; returns torch's handles."""
    handles = []
    for member in group.members:
        if not member.is_frozen:
            handles.append(member.param.register_hook(BeforeGrad(runtime)))
            hook = _bound(_on_grad, runtime, number)
            handles.append(member.param.register_post_accumulate_grad_hook(hook))
    return handles


def _parts_of_root(runtime: Runtime) -> list[nn.Module]:
    """Modules inside the root that own its parameters: a custom generate() may call an embedding by
    itself.
    """
    mine = {id(member.param) for group in runtime.root.groups for member in group.members}
    return [
        module
        for module in runtime.root.module.modules()
        if module is not runtime.root.module
        and any(id(param) in mine for param in module.parameters(recurse=False))
    ]


def watch_output(runtime: Runtime, number: int, tensor: Tensor, *, is_first: bool = True) -> None:
    """Tell the runtime when backward reaches a unit's output.  is_first: as
    `Runtime.on_output_grad` takes it.
    """
    tensor.register_hook(_bound(_on_output_grad, runtime, number, is_first))


def output_alias(runtime: Runtime, tensor: Tensor) -> Tensor:
    """A view whose gradient is multiplied by what it lacks of the engine's factor (`LossFactor`).

    An alias, because a hook on the tensor itself would also scale what other outputs (a loss
    computed from logits) send back through it.
    """
    return _alias(runtime, tensor, _scale)


def _alias(runtime: Runtime, tensor: Tensor, hook: Callable[..., Any]) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(_bound(hook, runtime))
    return alias


def at_backward_end(runtime: Runtime) -> Callable[[], None]:
    """The callback that ends a backward.

    torch drops it unrun when an exception ends the backward; that is how a plain `loss.backward()`
    that failed is seen.
    """
    callback = _bound(_on_backward_end, runtime)
    weakref.finalize(
        callback, _on_backward_dropped, weakref.ref(runtime), backward_id()
    ).atexit = False
    return callback


def _bound(function: Callable[..., Any], runtime: Runtime, *first: Any) -> Callable[..., Any]:
    return Hook(_call, weakref.ref(runtime), function, first)


def _call(
    reference: weakref.ref[Runtime],
    function: Callable[..., Any],
    first: tuple[Any, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    runtime = reference()
    if runtime is None and function in (_forward_returned, _after_forward, _after_part):
        return None  # the hook before this forward has raised already
    if runtime is None:
        raise UsageError(
            "the model is used after its engine was deleted.",
            "Its weights are slices that only the engine can gather.",
            "keep the engine as long as the model is used; take state_dict() before deleting it.",
        )
    if torch.compiler.is_compiling():
        # A compiled block runs our hooks and traces none.  Only here, because importing the
        # compiler takes a second.
        return torch.compiler.disable(function, recursive=True)(runtime, *first, *args, **kwargs)
    return function(runtime, *first, *args, **kwargs)


def _before_forward(
    runtime: Runtime, number: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    unit = runtime.units[number]
    if in_torch_func():
        if unit.sharded:
            raise NotBuiltError(
                f"torch.func differentiates the forward of '{unit.name}', whose weights are "
                "sharded.",
                "What it keeps for its backward are the weights themselves, which are released "
                "before.",
                "use loss.backward() or torch.autograd.grad at stage 3, or stages 0 to 2.",
            )
        # The transform differentiates by itself and asks for no gradient of a parameter: nothing is
        # watched.
        with outside_torch_func(), torch.no_grad():
            runtime.forward.pre_forward(unit, (), {})
        return runtime.forward.as_computed(unit, (args, kwargs))
    return runtime.forward.pre_forward(unit, args, kwargs)


def _forward_returned(runtime: Runtime, module: nn.Module, args: Any, output: Any) -> None:
    runtime.forward.returned()


def _after_forward(
    runtime: Runtime, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> Any:
    unit = runtime.units[number]
    if in_torch_func():
        if unit.sharded:  # refused before it ran
            return output
        with outside_torch_func(), torch.no_grad():
            runtime.forward.post_forward(unit, (), ())
        return runtime.forward.as_passed(unit, output)
    return runtime.forward.post_forward(unit, (args, kwargs), output)


def _before_part(runtime: Runtime, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return runtime.forward.pre_forward_part(module, args, kwargs)


def _after_part(runtime: Runtime, module: nn.Module, args: Any, output: Any) -> Any:
    return runtime.forward.post_forward_part(module, output)


def _on_output_grad(runtime: Runtime, number: int, is_first: bool, grad: Tensor) -> None:
    runtime.on_output_grad(runtime.units[number], grad, is_first=is_first)


class BeforeGrad:
    """The hook that runs before autograd writes the `.grad` of a parameter."""

    __torch_unserializable__ = True  # torch.save leaves it out without a warning

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    def __call__(self, grad: Tensor) -> None:
        runtime = self._runtime()
        if runtime is None or runtime.phase is Phase.BACKWARD:
            return
        # Torch.autograd.grad inside a forward writes no `.grad` (tiled_loss.py)
        if runtime.forward.active:
            return
        runtime.before_grad()


def _on_grad(runtime: Runtime, number: int, param: Tensor) -> None:
    assert isinstance(param, nn.Parameter)
    if torch.is_grad_enabled():  # under create_graph
        with torch.no_grad():
            runtime.on_grad(runtime.units[number], param)
    else:
        runtime.on_grad(runtime.units[number], param)


def _scale(runtime: Runtime, grad: Tensor) -> Tensor:
    factor = runtime.loss_factor.at_output()
    return grad if factor == 1.0 else grad * factor


def _unscale(runtime: Runtime, grad: Tensor) -> Tensor:
    factor = runtime.loss_factor.at_output()
    return grad if factor == 1.0 else grad * (1.0 / factor)


def _on_backward_end(runtime: Runtime) -> None:
    runtime.end_backward()


def _on_backward_dropped(reference: weakref.ref[Runtime], number: int) -> None:
    runtime = reference()
    if runtime is not None:
        runtime.on_backward_dropped(number)
