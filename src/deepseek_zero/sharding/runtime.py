"""ZeRO at work: autograd hooks -> schedule -> units.

Owns the hooks of one wrapped model and the phase it is in.  What is gathered when is gatherer.py's, what is reduced when is
reducer.py's; optimizers read the slices of `groups`.  `loss.backward()` alone drives everything.  Called by engine/assemble.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import backward_id, queue_backward_callback
from ..base.errors import PeerError, UsageError
from ..comm.collectives import Comm
from ..precision.policy import cast_inputs
from .gatherer import Gatherer
from .group import FlatGroup
from .outputs import map_tensors, tensors_in
from .plan import PlanSettings
from .reducer import Reducer
from .saved import weight_hooks
from .schedule import plan_schedule
from .unit import Unit, UnitState


class Phase(Enum):
    """One line per phase of a wrapped model."""

    IDLE = "idle"  # between forward and backward, and between steps
    FORWARD = "forward"  # inside the root module's forward
    BACKWARD = "backward"  # inside a backward that reached the root's outputs


class Runtime:
    """One wrapped model at work."""

    def __init__(self, model: nn.Module, units: list[Unit], comm: Comm, settings: PlanSettings) -> None:
        self.model, self.units, self.comm, self.settings = model, units, comm, settings
        self.root = units[0]
        self.phase = Phase.IDLE
        self.is_boundary = True  # the backward to come ends an accumulation: replicated gradients are reduced
        self.output_factor: Callable[[], float] | None = None  # loss scale / accumulation, for a plain loss.backward()
        self.step_settings: Any = None  # for an optimizer that attaches later (seed 000's door)
        self.scaler: Any = None
        self.backwards = 0  # finished since the last step
        self._forwards = 0  # with gradients, since the last backward
        self._recorded: list[int] = []
        self._agreed = False
        self._depth = 0
        self._backward_id = -1
        self._active: list[Unit] = []  # units whose forward runs now, outermost first
        self._contexts: list[list[Any]] = []  # per active unit: saved-tensor hooks and autocast to leave
        self._hooks: list[Any] = []
        order = list(range(len(units)))
        self.gatherer = Gatherer(units, plan_schedule(self.sizes, order, settings))
        self.reducer = Reducer(units, comm, settings.overlap)
        self.reducer.set_order(self.gatherer.schedule.backward.order)
        self._unit_of = {id(group): unit for unit in units for group in unit.groups}
        self._external: dict[int, list[Unit]] = {}
        self._install()

    @property
    def sizes(self) -> list[int]:
        """Gathered elements of each unit; what the schedule is a function of."""
        return [unit.gathered_numel for unit in self.units]

    @property
    def groups(self) -> list[FlatGroup]:
        """Every group, in the agreed order of units."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def trained_groups(self) -> list[FlatGroup]:
        return [group for group in self.groups if group.trainable]

    # -- hooks ----------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Hooks hold the runtime weakly, so that dropping the engine returns its memory at once."""
        me = weakref.proxy(self)
        for group in self.groups:
            group.runtime = weakref.ref(self)
        for unit in self.units:
            module, number = unit.module, unit.number
            self._hooks += [
                module.register_forward_pre_hook(_bound(_before, me, number), with_kwargs=True, prepend=True),
                module.register_forward_hook(_bound(_after, me, number), always_call=True),
            ]
            for group in unit.trained:
                for member in group.members:
                    hook = _bound(_on_grad, me, number)
                    self._hooks.append(member.param.register_post_accumulate_grad_hook(hook))

    def remove_hooks(self) -> None:
        """Undo the hooks (destroy); the parameters stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def fetch(self, group: FlatGroup) -> bool:
        """Gather a group's unit because something reads a parameter at rest; False outside forward and backward."""
        unit = self._unit_of[id(group)]
        if self.phase is Phase.IDLE and self._depth == 0 and backward_id() == -1:
            return False
        if self._active and self._active[-1] is not unit:
            self._remember_external(self._active[-1], unit)
        self._use(unit)
        return True

    def _remember_external(self, reader: Unit, owner: Unit) -> None:
        # The reader's backward needs it too: autograd may have saved the parameter itself, not a view.
        known = self._external.setdefault(reader.number, [])
        if owner not in known:
            known.append(owner)

    def add_external(self, module: nn.Module, param: nn.Parameter, group: FlatGroup) -> None:
        """Announce that `module`'s unit reads a parameter of another unit."""
        owner = self._unit_of[id(group)]
        for unit in self.units:
            if any(each is module for each in unit.module.modules()) and unit is not self.root:
                self._remember_external(unit, owner)

    # -- forward --------------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a unit's forward: its weights are in use when this returns."""
        is_pass = unit is self.root and self._depth == 0 and self.phase is not Phase.BACKWARD
        if is_pass:
            self._recover()
            schedule = self.gatherer.schedule
            self.phase = Phase.FORWARD
            self.gatherer.begin(schedule.forward if torch.is_grad_enabled() else schedule.inference)
        self._depth += 1
        self._active.append(unit)
        self._contexts.append([])
        self._use_with_externals(unit)
        if unit is self.root and self.settings.policy.auto_cast:
            dtype = self.settings.policy.compute
            args, kwargs = cast_inputs(args, dtype), cast_inputs(kwargs, dtype)
        self._push_contexts(unit)
        return args, kwargs

    def leave(self, unit: Unit, output: Any) -> Any:
        """After a unit's forward, normal or not."""
        for context in reversed(self._contexts.pop()):
            context.__exit__(None, None, None)
        self._depth -= 1
        self._active.pop()
        error = sys.exc_info()[1]
        if error is not None:
            self.post_error(error)
            return output
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                tensor.register_hook(_bound(_on_output_grad, weakref.proxy(self), unit.number))
        if unit is self.root and self._depth == 0:
            return self._end_forward(output)
        keep = self.gatherer.schedule.kept if torch.is_grad_enabled() else frozenset()
        if self.phase is not Phase.BACKWARD and unit is not self.root and unit.number not in keep:
            unit.release()
        return output

    def _end_forward(self, output: Any) -> Any:
        if self.phase is not Phase.FORWARD:
            return output
        training = torch.is_grad_enabled()
        self.gatherer.end(self.gatherer.schedule.kept if training else frozenset())
        self.phase = Phase.IDLE
        if training:
            self._forwards += 1
            if self.output_factor is not None:
                # An alias per output: a hook on the tensor itself would also scale what other outputs (loss from logits)
                # send back through it.
                return map_tensors(output, self._scaled_alias)
        return output

    def _scaled_alias(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        alias = tensor.view_as(tensor)
        me = weakref.proxy(self)
        alias.register_hook(lambda grad: grad * me.output_factor() if me.output_factor is not None else grad)
        return alias

    def _push_contexts(self, unit: Unit) -> None:
        contexts: list[Any] = []
        autocast = self.settings.policy.autocast
        if unit is self.root and autocast is not None:
            contexts.append(torch.autocast(self.comm_device.type, dtype=autocast))
        kept = unit.number in self.gatherer.schedule.kept
        if unit.sharded and self.comm.size > 1 and not kept and torch.is_grad_enabled() and self.phase is not Phase.BACKWARD:
            contexts.append(weight_hooks(unit, self.fetch_in_backward))
        for context in contexts:
            context.__enter__()
            self._contexts[-1].append(context)

    def fetch_in_backward(self, group: FlatGroup) -> None:
        """A saved weight is needed and its unit is at rest."""
        self._use(self._unit_of[id(group)])

    @property
    def comm_device(self) -> torch.device:
        return self.root.groups[0].route.pool.device if self.root.groups else self.units[-1].groups[0].route.pool.device

    def _use_with_externals(self, unit: Unit) -> None:
        self._use(unit)
        for other in self._external.get(unit.number, ()):
            self._use(other)

    def _use(self, unit: Unit) -> None:
        if not self._agreed and unit.number not in self._recorded:
            self._recorded.append(unit.number)
        with torch.inference_mode(False), torch.no_grad():
            self.gatherer.need(unit)

    # -- backward -------------------------------------------------------------------------------------------------------

    def open_backward(self) -> None:
        """The first gradient of a backward call reached an output of this model."""
        if self.phase is Phase.BACKWARD and self._backward_id == backward_id():
            return
        if self.phase is Phase.BACKWARD:
            self._recover()  # the backward before this one never ended
        self._backward_id = backward_id()
        self.phase = Phase.BACKWARD
        queue_backward_callback(_bound(_on_backward_end, weakref.proxy(self)))
        self.reducer.begin()
        for group in self.trained_groups:
            group.hide_grads()
        self.gatherer.begin(self.gatherer.schedule.backward)

    def on_output_grad(self, unit: Unit) -> None:
        """A gradient reached a unit's output: its weights are about to be needed."""
        if self.phase is not Phase.BACKWARD or (unit is self.root and self._backward_id != backward_id()):
            self.open_backward()
        self._release_frozen_before(unit)
        self._use_with_externals(unit)

    def _release_frozen_before(self, unit: Unit) -> None:
        """Frozen weights give no sign when backward is done with them; the next unit's turn is the sign."""
        position = self.gatherer.schedule.backward.position
        for other in self.units[1:]:
            behind = position[other.number] < position[unit.number]
            if other.has_frozen_shards and behind and (other.is_complete or not other.trained):
                other.release()

    def on_grad(self, unit: Unit, param: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete."""
        group = next(group for group in unit.trained if id(param) in group.index)
        if self.phase is not Phase.BACKWARD:
            raise UsageError(
                f"parameter '{group.name_of(param)}' got a gradient from outside the wrapped model's forward.",
                "Loss scale, averaging and reduction start at the outputs of the model that was wrapped.",
                "compute the loss from the wrapped model's outputs, or put the term into the model's forward.",
            )
        with torch.no_grad():
            group.collect(param)
            unit.collected.add(id(param))
            if unit.reduced_in_backward:
                self.reducer.late.add(unit.number)
            elif self._reduces_now:
                for done in self.reducer.advance():
                    self._rest_after_backward(done)

    def _rest_after_backward(self, unit: Unit) -> None:
        if unit is not self.root and not unit.has_frozen_shards:
            unit.release()

    @property
    def _reduces_now(self) -> bool:
        """Sharded gradients are reduced in every backward, partial ones at the boundary."""
        return self.is_boundary or (self.settings.stage >= 2 and self.comm.size > 1)

    def end_backward(self) -> None:
        """Every gradient of this backward has been computed on this rank."""
        with torch.no_grad():
            self.gatherer.end(frozenset())
            self.gatherer.release_all()
            if self._reduces_now:
                self.reducer.finish()
            self.reducer.learn()
            self.phase, self._backward_id, self._forwards = Phase.IDLE, -1, 0
            self.backwards += 1
            if self.is_boundary:
                for group in self.trained_groups:
                    group.show_grads()

    def catch_up(self) -> None:
        """Take part in a forward and a backward that this rank skipped: gathers are walked, gradients are zeros."""
        if self.phase is Phase.BACKWARD:
            return
        with torch.no_grad():
            if self._forwards == 0:
                self.gatherer.begin(self.gatherer.schedule.forward)
                self.gatherer.end(self.gatherer.schedule.kept)
            self.reducer.begin()
            self.gatherer.begin(self.gatherer.schedule.backward)
            self.end_backward()

    # -- steps ----------------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Everything that must hold before an optimizer reads the gradients.  Collective."""
        if self.backwards == 0:
            self.catch_up()
        self.reducer.settle()

    def after_step(self, *, drop: bool = True) -> None:
        """Forget the gradients (`drop`) and, once, agree on the order units were used in.  Collective."""
        if drop:
            self.drop_grads()
        self.backwards = 0
        if not self._agreed:
            self._agree_on_order()

    def drop_grads(self) -> None:
        self.reducer.wait()
        self.reducer.late.clear()
        for group in self.trained_groups:
            group.drop_grad()

    def _agree_on_order(self) -> None:
        """Rank 0's recorded order becomes everybody's; units it never used keep their place at the end."""
        row = torch.full((len(self.units),), -1, dtype=torch.int64)
        row[: len(self._recorded)] = torch.tensor(self._recorded, dtype=torch.int64)
        seen = [int(number) for number in self.comm.rows(row, "order of units")[0] if number >= 0]
        order = [0, *(number for number in seen if number)]
        order += [number for number in range(len(self.units)) if number not in order]
        self.gatherer.schedule = plan_schedule(self.sizes, order, self.settings)
        self.reducer.set_order(self.gatherer.schedule.backward.order)
        self._agreed = True

    # -- trouble --------------------------------------------------------------------------------------------------------

    def post_error(self, error: BaseException) -> None:
        """Tell ranks that wait for this one why it will not come."""
        if self.comm.board is not None and not isinstance(error, PeerError):
            self.comm.board.post("raised", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])

    def _recover(self) -> None:
        """After a forward or backward that an exception ended: drain, drop the half-made gradients, start clean."""
        if self.comm.board is not None:
            self.comm.board.withdraw("raised")
        if self.phase is Phase.IDLE:
            return
        interrupted, self.phase, self._depth = self.phase, Phase.IDLE, 0
        self._contexts.clear()
        self._active.clear()
        with torch.no_grad():
            self.gatherer.end(frozenset())
            self.gatherer.release_all()
            if interrupted is Phase.BACKWARD:
                self.drop_grads()
                self.backwards = 0
        self._forwards = 0

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """Hold units in use outside forward and backward.  Collective."""
        woken = [unit for unit in units if unit.state is UnitState.AT_REST]
        with torch.inference_mode(False), torch.no_grad():
            for unit in woken:
                unit.start_gather()
            for unit in woken:
                unit.finish_gather()
        try:
            yield
        finally:
            with torch.no_grad():
                for unit in woken:
                    unit.release()


# Hooks are module-level functions bound to a weak proxy: a bound method would keep the runtime alive through the model.


def _bound(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*first, *args, **kwargs)

    return call


def _before(runtime: Runtime, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return runtime.enter(runtime.units[number], args, kwargs)


def _after(runtime: Runtime, number: int, module: nn.Module, args: Any, output: Any) -> Any:
    return runtime.leave(runtime.units[number], output)


def _on_output_grad(runtime: Runtime, number: int, grad: Tensor) -> None:
    runtime.on_output_grad(runtime.units[number])


def _on_grad(runtime: Runtime, number: int, param: Tensor) -> None:
    assert isinstance(param, nn.Parameter)
    runtime.on_grad(runtime.units[number], param)


def _on_backward_end(runtime: Runtime) -> None:
    runtime.end_backward()
