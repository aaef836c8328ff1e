"""The factor of an engine's gradients: loss scale / accumulation steps.

`LossFactor` multiplies every gradient of an engine by this factor exactly once, however backward is
called. Gradients inside an engine's forward carry the factor. Outside, they carry the factor of the
loss that is differentiated: 1 for a plain `loss.backward()`, otherwise the factor of the engine
whose `scale` or `backward` was called. Gradients are therefore converted at the borders of an
outermost forward. At its outputs they are multiplied by the missing factor, and at its inputs they
are divided by it. Gradients that enter past the outputs are multiplied as well (entries.py).

    differentiated           outside carries           at an output x        at an input x
    plain                    1                         scale / accumulation  accumulation / scale
    engine.scale, .backward  scale' (/ accumulation')  scale / scale'        scale' / scale

A prime marks the engine that scaled the loss, which may be another one. A loss over the outputs of
several engines is divided by the accumulation steps of the engine that scaled it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import (
    backward_id,
    hook_every_backward,
    next_node_number,
    queue_backward_callback,
)
from ..base.errors import UsageError
from ..base.nested import map_inputs, map_tensors, tensors_in
from ..precision.loss_scale import LossScaler
from ..precision.policy import LOW_PRECISION
from ..sharding.hooks import Hook, weak_hook
from ..sharding.param_group import ParamGroup
from ..sharding.runtime import Runtime
from ..sharding.sharded_parameter import owner_of
from .entries import Factor, record_forward, scale_entries

# Of all engines in this process
_FACTORS: weakref.WeakKeyDictionary[Runtime, LossFactor] = weakref.WeakKeyDictionary()
_SCALERS: weakref.WeakSet[LossFactor] = weakref.WeakSet()  # of those that scale their losses


class _UnderWay:
    """The running backward of a scaled loss in this process.

    Attributes:
        scale: The loss scale; None if no such backward is running.
        number: Its `backward_id`.
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        self.number = -1

    def begin(self, scale: float) -> None:
        """Record that a backward has reached a loss with this scale."""
        number = backward_id()
        if self.scale is not None and self.number == number:
            if self.scale != scale:
                raise UsageError(
                    f"one backward got losses scaled by {self.scale:g} and by {scale:g}.",
                    "Two engines have scaled them, and where their gradients meet nobody can tell "
                    "the parts apart.",
                    "add the losses up first and scale the sum with one engine, or call backward "
                    "on each.",
                )
            return
        self.scale = scale
        self.number = number
        callback = partial(self.end, number)
        queue_backward_callback(callback)
        # Torch drops the callback without a call if backward raises.
        weakref.finalize(callback, self.end, number).atexit = False

    def end(self, number: int) -> None:
        if self.number == number:
            self.scale = None
            self.number = -1


_UNDER_WAY = _UnderWay()


class LossFactor:
    """Multiplies the gradients of one engine by loss scale / accumulation steps, exactly once.

    Attributes:
        is_recorded: Whether a backward since the last step ran with `create_graph=True`, so that it
            may be differentiated.
        is_carried: Incoming gradients were already multiplied by the factor (`carried`).
        at_entry: A function that returns the factor of gradients that reach the model other than
            through its outputs.
    """

    def __init__(
        self, runtime: Runtime, scaler: LossScaler | None = None, *, is_strict: bool = False
    ) -> None:
        """Attach a factor to an engine.

        Args:
            runtime: The runtime of the model, which is held weakly.
            scaler: The loss scaler of fp16; None if losses are not scaled.
            is_strict: Whether a loss of the engine's own forward must be scaled.
        """
        self._runtime = weakref.ref(runtime)
        self._is_strict = is_strict
        self._is_entered = False  # inside `entered`
        self._is_of_engine = False  # the last recorded forward was the engine's, not the model's
        self.is_recorded = False
        self._scaled: Callable[[], Tensor | None] = lambda: None  # the last loss that was scaled
        self.is_carried = False
        self.at_entry = _factor_from(weakref.ref(self))
        _FACTORS[runtime] = self
        self.scaler = scaler
        runtime.forward.before_forwards.append(self._forward_begins)
        runtime.forward.borders.append(self._enter)
        runtime.backward.before_backwards += [self._refuse_unscaled, self._refuse_second_order]
        runtime.backward.after_drops.append(self._forget)

    @property
    def accumulation(self) -> int:
        """The current number of micro-batches per step."""
        runtime = self._runtime()
        return 1 if runtime is None else runtime.settings.accumulation

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler of fp16; None if losses are not scaled."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        if scaler is None:
            _SCALERS.discard(self)
        else:
            _SCALERS.add(self)
        if self.has_border:
            watch_backwards()

    @property
    def scale(self) -> float:
        """The current loss scale; 1.0 without a scaler."""
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def has_border(self) -> bool:
        """Return whether gradients are scaled at the outputs and inputs of the model."""
        return self.accumulation != 1 or bool(_SCALERS)

    @property
    def is_plain(self) -> bool:
        """Return whether the current backward differentiates a loss that no engine scaled."""
        return _UNDER_WAY.scale is None and not self.is_carried

    def at_output(self) -> float:
        """Return the factor by which gradients are multiplied at an output of the model.

        Gradients are divided by it at the inputs.
        """
        applied = self.scale if self.is_carried else _UNDER_WAY.scale
        return self.scale / self.accumulation if applied is None else self.scale / applied

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Return a context for backwards whose gradients already contain this engine's factor.

        Such gradients come from a later stage of the same model, whose loss was multiplied by the
        factor.
        """
        before = self.is_carried
        self.is_carried = True
        try:
            yield
        finally:
            self.is_carried = before

    def has_scaled(self, loss: Tensor) -> bool:
        """Return whether a tensor is the last loss that `apply` returned."""
        return loss is self._scaled()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which the engine itself, not the program, calls the model."""
        before = self._is_entered
        self._is_entered = True
        try:
            yield
        finally:
            self._is_entered = before

    def _forward_begins(self) -> None:
        """Record whether the forward that begins was called through the engine."""
        if torch.is_grad_enabled():
            self._is_of_engine = self._is_entered

    def _forget(self) -> None:
        self.is_recorded = False

    def _refuse_unscaled(self) -> None:
        """Raise an error if the loss of the engine's own forward was not scaled in fp16.

        Only a strict engine raises: programs that use the DeepSpeed API must scale such a loss.
        After `engine.module(...)` they need not, because several engines cannot all scale one loss.
        The factor is then applied at the outputs.

        Raises:
            UsageError: The loss was not scaled.
        """
        if self._is_strict and self._is_of_engine and self._scaler is not None and self.is_plain:
            raise UsageError(
                "Loss scaling is required for this configuration, and backward() was called "
                "without it.",
                "Gradients in fp16 are lost below its smallest number.",
                "call engine.backward(loss) or engine.scale(loss).backward().",
            )

    def _refuse_second_order(self) -> None:
        """Raise an error if this backward may differentiate an earlier one without the factor.

        It is called when a backward begins, and records whether that ran with `create_graph=True`.
        Gradients of gradients reach the parameters without passing an output, so they would lack
        the factor.

        Raises:
            UsageError: No engine scaled the loss, and an earlier backward ran with
                `create_graph=True`.
        """
        if torch.is_grad_enabled():
            self.is_recorded = True
        elif self.is_recorded and _UNDER_WAY.scale is None and self.at_output() != 1.0:
            raise UsageError(
                "a plain backward() came after a backward with create_graph=True, so it may hold a "
                "gradient of a gradient.",
                f"Gradients are multiplied by {self.at_output():g} (loss scale / accumulation "
                "steps) where they enter the model through its outputs, and a gradient of a "
                "gradient enters elsewhere.",
                "call engine.backward(loss) or engine.scale(loss).backward(); without an engine "
                "leave gradient_accumulation_steps out and divide the loss yourself, in fp32 or "
                "bf16.",
            )

    def _enter(self, given: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the arguments of an outermost forward, and the function that converts its output.

        Gradients may be scaled where they enter the forward through its output (`outside`). This
        is undone where they leave it to its arguments (`inside`).
        """
        if not self.has_border:
            return given, unchanged
        begin = next_node_number()
        return self.inside(given), partial(self.outside, begin=begin)

    def inside(self, given: Any) -> Any:
        """Return the arguments of a model's forward, with hooks on their gradients.

        Args:
            given: The arguments, which may be nested.

        In backward the hooks divide the gradients by the factor that the hooks of `outside` have
        applied.
        """
        tensors = tensors_in(given)
        if not tensors:
            return given
        found = scale_entries(tensors, factor_of_leaf)
        outside = {id(tensor): each for tensor, each in zip(tensors, found, strict=True)}

        def alias(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            return _alias(outside.get(id(tensor), tensor), weak_hook(self, LossFactor._divide))

        return map_inputs(given, alias)

    def outside(self, output: Any, begin: int) -> Any:
        """Return the output of a model's forward, with hooks on its gradients.

        In backward the hooks multiply the gradients by the part of the factor that the program has
        not applied.

        Args:
            output: The value that the forward returned.
            begin: The number of autograd's first node inside the forward.
        """
        watch_backwards()
        end = next_node_number()

        def alias(tensor: Tensor) -> Tensor:
            return _alias(tensor, weak_hook(self, LossFactor._multiply))

        output = map_tensors(output, alias)
        record_forward(begin, end, next_node_number(), self.at_entry)
        return output

    def _multiply(self, grad: Tensor) -> Tensor:
        factor = self.at_output()
        return grad if factor == 1.0 else grad * factor

    def _divide(self, grad: Tensor) -> Tensor:
        factor = self.at_output()
        return grad if factor == 1.0 else grad * (1.0 / factor)

    def apply(self, loss: Tensor, *, by_accumulation: bool = True) -> Tensor:
        """Return the loss times the loss scale; in fp32 if its dtype has 16 bits.

        The loss is returned unchanged if gradients need no factor.

        Args:
            loss: The loss, a scalar.
            by_accumulation: Whether to also divide the loss by the accumulation steps.

        Raises:
            UsageError: The loss is no tensor, or was already scaled. A strict engine also raises if
                it is not a scalar.
        """
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"engine.scale got a {type(loss).__name__} where a tensor is needed.",
                "The scaled loss is differentiated through the operations that computed it.",
                "pass the loss itself, not loss.item().",
            )
        if self._is_strict and loss.numel() != 1:
            raise UsageError(
                f"a loss must be a scalar tensor, and this one has the shape {tuple(loss.shape)}.",
                "Losses alone are scaled, as in DeepSpeed.",
                "call backward(gradient) on the output itself.",
            )
        if self.has_scaled(loss):
            raise UsageError(
                "a loss was scaled a second time.",
                "engine.scale has multiplied it by loss scale and 1/accumulation, as "
                "engine.backward does too.",
                "call backward() on what engine.scale returned, or engine.backward(loss) on the "
                "loss itself.",
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


def loss_factor_of(runtime: Runtime) -> LossFactor:
    """Return the factor that is attached to an engine.

    Args:
        runtime: The runtime of its model.
    """
    return _FACTORS[runtime]


def unchanged(output: Any) -> Any:
    """Return the argument."""
    return output


def _alias(tensor: Tensor, hook: Hook) -> Tensor:
    """Return a view with a hook on its gradient.

    A hook on the tensor itself would also scale the gradients of its other uses, for example of a
    loss computed from logits.
    """
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(hook)
    return alias


def watch_backwards() -> None:
    """Hook every backward of this process, to scale gradients that bypass model outputs."""
    hook_every_backward(_scale_entries_of)


def _scale_entries_of(roots: list[Tensor]) -> tuple[list[Tensor], None]:
    """Scale the gradients that enter an engine past its outputs, before a backward."""
    factors = [factor for runtime, factor in _FACTORS.items() if not runtime.is_destroyed]
    if any(factor.is_carried for factor in factors):
        return roots, None
    if any(factor.has_scaled(root) for factor in factors for root in roots):
        is_missing = len({factor.scale for factor in factors}) > 1
    else:
        is_missing = any(factor.has_border for factor in factors)
    return scale_entries(roots, factor_of_leaf) if is_missing else roots, None


def factor_of_leaf(leaf: Tensor) -> Factor | None:
    """Return the function that computes the gradient factor of a parameter's engine, or None.

    Args:
        leaf: A leaf of the autograd graph, for example a parameter.

    Inside the engine's forward it is None, because gradients there need no factor.
    """
    owner = owner_of(leaf)
    runtime = owner.runtime() if isinstance(owner, ParamGroup) else None
    if runtime is None or runtime.step.active:
        return None
    factor = _FACTORS.get(runtime)
    return None if factor is None else factor.at_entry


def _factor_from(reference: weakref.ref[Any]) -> Factor:
    """Return the `at_output` of a `LossFactor` as a function that holds it weakly."""

    def factor() -> float | None:
        owner = reference()
        return None if owner is None else owner.at_output()

    return factor
