"""Forward hooks of the units of a wrapped model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..base.device import in_torch_func
from ..base.meter import BETWEEN
from ..base.nested import tensors_in
from ..precision.policy import Policy
from .attached import Border
from .backward import Backward
from .casts import Casts
from .external_params import ExternalReads
from .hooks import weak_hook
from .irregular_passes import is_nested, leave_forwards, post_forward_error, recover
from .saved_tensor_hooks import weight_hooks
from .step_state import ForwardFrame, Phase
from .torch_func import begin_in_torch_func, end_in_torch_func
from .unit import Unit, UnitState


class Forward:
    """Gathers units before their forward, releases them afterwards, and prepares backward.

    Attributes:
        backward: Installs the hooks of the backward; its lanes, units and state are used here.
        root: The unit of parameters outside all other units.
        policy: The dtypes of the model.
        casts: Casts the values that are passed between units.
        before_forwards: Functions that run before each forward of the model, and may change the
            schedule.
        before_first_forwards: Functions that run in the first forward of a step, before units are
            gathered.
        borders: Functions that replace arguments and output of each outermost forward, for example
            by tensors with hooks on their gradients.
    """

    def __init__(self, backward: Backward, externals: ExternalReads, policy: Policy) -> None:
        self.backward = backward
        self.externals = externals
        self.units = backward.units
        self.root = backward.units[0]
        self.step = backward.step
        self.gathers = backward.gathers
        self.comm = backward.comm
        self.policy = policy
        self.casts = Casts(self.root, policy)
        self.before_forwards: list[Callable[[], None]] = []
        self.before_first_forwards: list[Callable[[], None]] = []
        self.borders: list[Border] = []

    # -- hooks

    def install_hooks(self) -> list[Any]:
        """Register hooks on the forwards of all units, and return their handles."""
        handles: list[Any] = []
        for unit in self.units:
            module = unit.module
            before = weak_hook(self, Forward._before, unit.number)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            # Torch calls this hook before the other one, and only if the forward did not raise.
            returned = weak_hook(self, Forward._returned, raises_if_gone=False)
            handles.append(module.register_forward_hook(returned))
            after = weak_hook(self, Forward._after, unit.number, raises_if_gone=False)
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        return handles

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit = self.units[number]
        if in_torch_func():
            begin_in_torch_func(unit, self._begin)
            return self.casts.as_computed(unit, args, kwargs)
        return self._begin(unit, args, kwargs)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self.step.active[-1].has_returned = True

    def _after(self, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        unit = self.units[number]
        if in_torch_func():
            end_in_torch_func(unit, self._end)
            return self.casts.as_passed(unit, output)
        return self._end(unit, (args, kwargs), output)

    # -- one forward of a unit

    def _begin(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard the unit, and return the arguments of its forward."""
        step = self.step
        if unit is self.root and step.active and not is_nested(unit, step.active[0].unit):
            leave_forwards(step)
        begins = unit is self.root and not step.active and not step.is_in_backward
        if begins:
            self.comm.waits.withdraw_error()
            if step.phase is not Phase.IDLE:
                recover(self.backward)
            step.enter(Phase.FORWARD)
            self.comm.meter.clock.enter("forward")
        is_outermost = step.is_outermost
        is_first = step.uses.is_first(unit, step.phase)
        # Recompute one tile of a layer at a time, as in forward.
        is_recomputed = unit.is_layer_tile and step.phase is Phase.BACKWARD
        releases = is_recomputed and unit.state is UnitState.SHARDED
        frame = ForwardFrame(unit, releases, is_first)
        step.active.append(frame)
        begins_step = torch.is_grad_enabled() and step.is_between_steps
        if begins:
            self._begin_pass()
        if unit is self.root and begins_step:
            for check in self.before_first_forwards:
                check()
        self.gathers.unshard(unit, in_turn=not is_recomputed, externals=True)
        if is_outermost:
            for enter in self.borders:
                (args, kwargs), leave = enter((args, kwargs))
                frame.leaves.append(leave)
        args, kwargs = self.casts.as_computed(unit, args, kwargs)
        if step.nonfinite is not None:
            step.nonfinite.record("input", unit.number, (args, kwargs))
        for context in self._contexts(unit):
            context.__enter__()
            frame.contexts.append(context)
        return args, kwargs

    def _begin_pass(self) -> None:
        """Begin the forward of the whole model."""
        for hook in self.before_forwards:
            hook()
        walk = self.gathers.schedule.inference
        if torch.is_grad_enabled():
            walk = self.gathers.schedule.forward
        self.gathers.begin(walk)

    def _contexts(self, unit: Unit) -> Iterator[Any]:
        autocast = self.policy.autocast
        if unit is self.root and autocast is not None:
            device = self.backward.comm_ctx.pool.device
            yield torch.autocast(device.type, dtype=autocast)
        # The weights are released between forward and backward.
        is_released = unit.is_copied and unit.number not in self.gathers.schedule.kept
        # Backward recomputes this forward, and uses the gathered weights right after it.
        again = self.step.phase is Phase.BACKWARD and not unit.is_layer_tile
        if is_released and not again and torch.is_grad_enabled():
            # Autograd then saves the positions of weights instead of the gathered buffer.
            yield weight_hooks(unit, self.externals.fetch_saved)

    def _end(self, unit: Unit, given: Any, output: Any) -> Any:
        """Finish a unit's forward, whether it returned or raised.

        If the forward returns None, its arguments `given` are treated as its outputs.
        """
        frame = self.step.active.pop()
        for context in reversed(frame.contexts):
            context.__exit__(None, None, None)
        if not frame.has_returned:
            post_forward_error(unit, self.policy, self.comm)
            return output
        output = self.casts.as_passed(unit, output)
        if self.step.nonfinite is not None:
            self.step.nonfinite.record("output", unit.number, output)
        is_recorded = torch.is_grad_enabled()
        result = output if output is not None else given
        if is_recorded:
            for tensor in tensors_in(result):
                self.backward.watch_output(unit.number, tensor, is_first=frame.is_first)
        is_whole = unit is self.root and not self.step.active
        if is_whole and self.step.phase is Phase.FORWARD:
            self._end_pass(is_recorded)
        for leave in frame.leaves:
            result = leave(result)
            output = result if output is not None else None
        if frame.releases:
            unit.reshard()
        elif not is_whole and self.step.phase is not Phase.BACKWARD:  # which releases it itself
            self.gathers.after_forward(unit, training=is_recorded)
        return output

    def _end_pass(self, is_recorded: bool) -> None:
        self.gathers.end()
        self.step.enter(Phase.IDLE)
        self.comm.meter.clock.enter(BETWEEN)
        if is_recorded and self.backward.is_in_step:
            self.step.forwards += 1
