"""Loss scale and accumulation: what every gradient of an engine is multiplied by, once, however backward is reached.

Gradients inside an engine's forward carry its factor, loss scale / accumulation steps.  Outside they carry what the
loss that is differentiated was multiplied by: nothing in a plain `loss.backward()`, the factor of the engine whose
`scale` or `backward` was called otherwise.  So at the border, which is where an outermost forward returns and where it
takes arguments, a gradient is multiplied by what is missing, or divided again:

    differentiated                   outside carries          at an output x          at an input x
    plain                            1                        scale / accumulation    accumulation / scale
    engine.scale, engine.backward    scale' (/ accumulation') scale / scale'          scale' / scale

with ' for the engine that scaled the loss, which may be another one: a loss over the outputs of several engines is
divided by the accumulation of the engine that was asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.device import backward_id, queue_backward_callback
from ..base.errors import UsageError
from ..precision.loss_scale import LossScaler
from ..precision.policy import LOW_PRECISION

if TYPE_CHECKING:
    from .runtime import Runtime


class _UnderWay:
    """The backward of a scaled loss that runs in this process.  scale: what it was scaled by; None: there is none."""

    def __init__(self) -> None:
        self.scale: float | None = None
        self.number = -1

    def begin(self, scale: float) -> None:
        """A backward has come to a scaled loss."""
        number = backward_id()
        if self.scale is not None and self.number == number:
            if self.scale != scale:
                raise UsageError(
                    f"one backward got losses scaled by {self.scale:g} and by {scale:g}.",
                    "Two engines have scaled them, and where their gradients meet nobody can tell the parts apart.",
                    "add the losses up first and scale the sum with one engine, or call backward on each.",
                )
            return
        self.scale, self.number = scale, number
        callback = _End(self, number)
        queue_backward_callback(callback)
        weakref.finalize(callback, self.end, number).atexit = False  # torch drops it unrun when backward raises

    def end(self, number: int) -> None:
        if self.number == number:
            self.scale, self.number = None, -1


class _End:
    """The callback of a backward's end."""

    def __init__(self, under_way: _UnderWay, number: int) -> None:
        self.under_way, self.number = under_way, number

    def __call__(self) -> None:
        self.under_way.end(self.number)


_UNDER_WAY = _UnderWay()
_SCALERS: weakref.WeakSet[LossFactor] = weakref.WeakSet()  # of the engines in this process that scale their losses


class LossFactor:
    """One engine's factor."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._scaler: LossScaler | None = None
        self.is_recorded = False  # a backward since the last step was recorded, to be differentiated again
        self._scaled: Callable[[], Tensor | None] = lambda: None  # the last loss it has scaled

    @property
    def scaler(self) -> LossScaler | None:
        """fp16's; None where losses are not scaled."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        (_SCALERS.add if scaler is not None else _SCALERS.discard)(self)

    @property
    def scale(self) -> float:
        """The loss scale of now."""
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        runtime = self._runtime()
        assert runtime is not None  # it owns this
        return runtime.settings.accumulation

    @property
    def has_border(self) -> bool:
        """Return whether gradients may have to be multiplied where they enter this engine, or leave it."""
        return self.accumulation != 1 or bool(_SCALERS)

    def at_output(self) -> float:
        """What a gradient is multiplied by that comes in through an output; it is divided by it at an input."""
        applied = _UNDER_WAY.scale
        return self.scale / self.accumulation if applied is None else self.scale / applied

    def refuse_gradient_of_gradient(self) -> None:
        """As a backward begins: UsageError if it is plain and may differentiate an earlier one, which was recorded.

        Such gradients reach the parameters without having passed an output.
        """
        if torch.is_grad_enabled():
            self.is_recorded = True
        elif self.is_recorded and _UNDER_WAY.scale is None and self.at_output() != 1.0:
            raise UsageError(
                "a plain backward() came after a backward with create_graph=True, so it may hold a gradient of a "
                "gradient.",
                f"Gradients are multiplied by {self.at_output():g} (loss scale / accumulation steps) where they enter "
                "the model through its outputs, and a gradient of a gradient enters elsewhere.",
                "call engine.backward(loss) or engine.scale(loss).backward(); without an engine leave "
                "gradient_accumulation_steps out and divide the loss yourself, in fp32 or bf16.",
            )

    def apply(self, loss: Tensor, *, by_accumulation: bool = True) -> Tensor:
        """The loss times the loss scale and, if it is to be, divided by the accumulation steps."""
        if loss is self._scaled():
            raise UsageError(
                "a loss was scaled a second time.",
                "engine.scale has multiplied it by loss scale and 1/accumulation, as engine.backward does too.",
                "call backward() on what engine.scale returned, or engine.backward(loss) on the loss itself.",
            )
        if not self.has_border:
            return loss
        scale = self.scale
        factor = scale / self.accumulation if by_accumulation else scale
        wide = loss.float() if loss.dtype in LOW_PRECISION else loss
        scaled = wide.view_as(wide) if factor == 1.0 else wide * factor

        def reached(grad: Tensor) -> None:
            _UNDER_WAY.begin(scale)

        if scaled.requires_grad:
            scaled.register_hook(reached)
        self._scaled = weakref.ref(scaled)
        return scaled
