"""Forward: what happens around each unit's forward, and which forwards are under way."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.clock import BETWEEN
from ..base.device import ends_recomputation
from ..precision.policy import cast_inputs, map_inputs
from . import hooks
from .outputs import map_tensors, tensors_in
from .regroup import follow_requires_grad
from .saved_tensor_hooks import weight_hooks
from .structure import Structure
from .unit import Unit, UnitState

if TYPE_CHECKING:
    from .runtime import Runtime


class Phase(Enum):
    """One line per phase of a wrapped model."""

    IDLE = "idle"  # between forward and backward, and between steps
    FORWARD = "forward"  # inside the root module's forward
    BACKWARD = "backward"  # inside a backward that reached an output of the model


class ForwardFrame:
    """A unit whose forward runs now, and the contexts to leave after it (saved-tensor hooks, autocast).

    was_here: its weights were gathered before.  is_border: gradients enter and leave the engine around it.
    has_returned: its forward came to its end.
    """

    def __init__(self, unit: Unit, *, is_border: bool) -> None:
        self.unit, self.was_here, self.is_border = unit, unit.state is not UnitState.SHARDED, is_border
        self.contexts: list[Any] = []
        self.has_returned = False


class Forward:
    """The forwards of one wrapped model.  active: under way, outermost first.

    count: forwards with gradients since a backward.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self.active: list[ForwardFrame] = []
        self.count = 0
        self.any_promoted = False  # so units differ in compute dtype, and what passes between them must be cast
        self.structure = Structure(runtime.model, runtime.groups)
        self._parts: list[nn.Module] = []  # of the root, that run outside any unit's forward; outermost first
        self._gathered_for: nn.Module | None = None  # the one of these that the root was gathered for

    @property
    def runtime(self) -> Runtime:
        runtime = self._runtime()
        assert runtime is not None  # hooks.py calls in only while it lives
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
            self.runtime.phase = Phase.FORWARD
            self.runtime.comm.meter.clock.enter("forward")
        is_border = self._is_outermost() and self.runtime.loss_factor.has_border
        self.active.append(ForwardFrame(unit, is_border=is_border))
        begins_a_step = torch.is_grad_enabled() and self.runtime.backwards == 0 and self.count == 0
        if begins:
            if torch.is_grad_enabled():
                follow_requires_grad(self.runtime, begins_a_step=begins_a_step)
            schedule = self.runtime.executor.schedule
            self.runtime.executor.begin(schedule.forward if torch.is_grad_enabled() else schedule.inference)
        if unit is self.runtime.root and begins_a_step:
            self.structure.check()
        again = unit.is_tile and self.runtime.phase is Phase.BACKWARD  # recomputed: one tile at a time, as in forward
        self.runtime.executor.use_with_externals(unit, in_turn=not again)
        if is_border:
            args, kwargs = self._inside((args, kwargs))
        if (unit is self.runtime.root and self.runtime.settings.policy.auto_cast) or self.any_promoted:
            dtype = self.compute_dtype_of(unit)
            args, kwargs = cast_inputs(args, dtype), cast_inputs(kwargs, dtype)
        if self.runtime.nonfinite is not None:
            self.runtime.nonfinite.record("input", unit.number, (args, kwargs))
        for context in self._contexts(unit):
            context.__enter__()
            self.active[-1].contexts.append(context)
        return args, kwargs

    def _is_outermost(self) -> bool:
        """Whether a forward here is one that backward will come out of and go into: recorded, and not recomputed."""
        if self.active or self._parts or not torch.is_grad_enabled():
            return False
        return self.runtime.phase is not Phase.BACKWARD or self.runtime.was_interrupted

    def _inside(self, given: Any) -> Any:
        """Arguments whose gradients leave the engine without its factor."""
        return map_inputs(given, partial(hooks.input_alias, self.runtime)) if tensors_in(given) else given

    def _outside(self, output: Any) -> Any:
        """An output whose gradients get the engine's factor on their way in."""
        return map_tensors(output, partial(hooks.output_alias, self.runtime))

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
        goes = unit.is_copied and unit.number not in self.runtime.executor.schedule.kept  # between forward and backward
        again = self.runtime.phase is Phase.BACKWARD and not unit.is_tile  # recomputed, to be used by backward at once
        if goes and not again and torch.is_grad_enabled():
            yield weight_hooks(unit, self.runtime.fetch)

    def returned(self) -> None:
        """The innermost forward has come to its end; without this word it has raised when it is left."""
        self.active[-1].has_returned = True

    def post_forward(self, unit: Unit, given: Any, output: Any) -> Any:
        """After a unit's forward, whether it returned or raised.  given: its arguments, where a unit that returns
        nothing has left its result.
        """
        active = self.active.pop()
        for context in reversed(active.contexts):
            context.__exit__(None, None, None)
        if not active.has_returned:
            error = sys.exception()  # torch calls this hook while it handles what the forward raised
            if error is not None and not ends_recomputation(error):
                self.runtime.comm.post_error(error)
            return output
        if self.any_promoted and unit is not self.runtime.root:
            output = cast_inputs(output, self.compute_dtype_of(self.runtime.root))
        if self.runtime.nonfinite is not None:
            self.runtime.nonfinite.record("output", unit.number, output)
        training = torch.is_grad_enabled()
        result = output if output is not None else given
        if training:
            for tensor in tensors_in(result):
                hooks.watch_output(self.runtime, unit.number, tensor)
        if unit is self.runtime.root and not self.active:
            self._end_forward(training)
        if active.is_border:
            result = self._outside(result)
            output = result if output is not None else None
        if unit is self.runtime.root and not self.active:
            return output
        recomputes = self.runtime.phase is Phase.BACKWARD
        was_unsharded = active.was_here
        self.runtime.executor.after_forward(unit, training=training, recomputes=recomputes, was_unsharded=was_unsharded)
        return output

    def _end_forward(self, training: bool) -> None:
        if self.runtime.phase is not Phase.FORWARD:
            return
        self.runtime.executor.end()
        self.runtime.phase = Phase.IDLE
        self.runtime.comm.meter.clock.enter(BETWEEN)
        if training:
            self.count += 1

    def pre_forward_part(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before a part of the root.  One that is called by itself, outside any forward, has the root gathered for it.
        Collective.
        """
        runtime = self.runtime
        if self.active:
            return None
        is_border = self._is_outermost() and runtime.loss_factor.has_border
        self._parts.append(module)
        if runtime.phase is Phase.IDLE and runtime.root.sharded and runtime.root.state is UnitState.SHARDED:
            self._gathered_for = module
            runtime.executor.use(runtime.root)
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
            hooks.watch_output(self.runtime, self.runtime.root.number, tensor)
        return self._outside(output) if self.runtime.loss_factor.has_border else output
