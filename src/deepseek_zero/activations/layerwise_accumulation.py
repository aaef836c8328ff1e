"""Layerwise accumulation: each layer runs all micro-batches of a batch before the next layer.

The engine is called once per step, with all micro-batches in one batch. The unit of execution is
the module whose weights are gathered together, typically a layer. Modules around the units
(embedding, head, loss) run over the whole batch. Each unit runs one micro-batch after the other on
one gather of its weights. The schedule decides which units, how many micro-batches and in which
order (`layerwise` in `planner/schedule.py`), and its executor is queried here.

This module splits a unit's arguments, runs each micro-batch in a separate checkpoint, and joins the
outputs. Forward keeps nothing inside a unit, and backward holds the activations of one micro-batch.
Autograd processes the micro-batches from last to first, and passes a parameter's gradient on after
it has added all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..base.nested import Args, Kwargs, all_tensors, map_tensors
from ..sharding.runtime import Runtime
from ..sharding.unit import Unit
from .offload import replaced
from .recompute import checkpoint

ForwardCall = tuple[Args, Kwargs]
FIX = "leave vertical_micro_batches out (gradient_accumulation_steps accumulates too)"


class LayerwiseAccumulation:
    """Runs all micro-batches of a batch through one layer before it runs the next layer.

    The weights of each layer are therefore gathered once for all micro-batches, instead of once for
    each micro-batch.
    The constructor replaces the forward of each layer by a function that splits the batch and runs
    one micro-batch after the other. Each of these runs is an activation checkpoint, which backward
    recomputes. If gradients are disabled, the function runs the whole batch at once.
    The constructor also registers a forward pre-hook on the model. With gradients enabled, this
    hook raises `UsageError` unless the number of samples is a positive multiple of `micro_batches`.

    Args:
        runtime: The ZeRO runtime of the wrapped model, whose schedule determines the layers and the
            number of micro-batches.

    Attributes:
        micro_batches: Number of micro-batches per batch.
        samples: Number of samples on this rank in the current or last forward. It is the size of
            the first dimension of the first tensor argument, and 0 without such a tensor.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.micro_batches = runtime.settings.layerwise_micro_batches
        self.samples = 0
        self._runtime = weakref.ref(runtime)
        forwards = runtime.schedule.forward.computes
        self._forwards = [
            LayerwiseForward(self, unit) for unit in runtime.units if len(forwards[unit.number]) > 1
        ]
        # Registered after the runtime's hook, so that an error for an invalid batch reaches other
        # ranks
        self._handle = runtime.model.register_forward_pre_hook(
            self._before_forward, with_kwargs=True
        )

    def remove(self) -> None:
        """Restore the forward of every layer, and remove the hook of the model.

        A layer whose forward was replaced again in the meantime is not changed. A second call has
        no effect.
        """
        self._handle.remove()
        for forward in self._forwards:
            forward.remove()
        self._forwards = []

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the batch size of the model's forward."""
        self.samples = next(
            (len(tensor) for tensor in all_tensors((args, kwargs)) if tensor.dim()), 0
        )
        if torch.is_grad_enabled() and (not self.samples or self.samples % self.micro_batches):
            raise UsageError(
                f"the model was given {self.samples} samples, which do not make "
                f"{self.micro_batches} micro-batches of one size.",
                "vertical_micro_batches cuts the first dimension of the first tensor that the "
                "model gets, and of every other that is as long.",
                f"call the engine with a multiple of {self.micro_batches} samples; a loader drops "
                "a short last batch with dataloader_drop_last.",
            )

    def turns(self, number: int) -> list[int]:
        """Return the indices of the micro-batches in the order in which a layer runs them.

        Args:
            number: The index of the layer in the runtime's list of units.
        """
        runtime = self._runtime()
        assert runtime is not None  # Otherwise its hooks would have raised already
        forwards = runtime.schedule.forward.computes[number]
        return [action.micro_batch for action in forwards if action.micro_batch is not None]

    def cut(self, unit: str, call: ForwardCall) -> list[ForwardCall]:
        """Split the arguments of a layer's forward into one set of arguments per micro-batch.

        A tensor is split along its first dimension if the size of this dimension is `samples`. It
        may be in nested tuples, lists and dicts. Parameters and all other arguments are passed to
        each call unchanged.

        Args:
            unit: The name of the layer, for error messages.
            call: The positional and keyword arguments for the whole batch.

        Returns:
            One pair of positional and keyword arguments for each micro-batch, in order.

        Raises:
            UsageError: The arguments contain no tensor to split.
        """
        parts: dict[int, Sequence[Tensor]] = {}

        def look(leaf: Any) -> Any:
            if self._is_batch(leaf):
                parts[id(leaf)] = leaf.split(self.samples // self.micro_batches)
            return leaf

        replaced(call, look)
        if not parts:
            raise UsageError(
                f"unit '{unit}' got no tensor of {self.samples} samples; the first dimensions of "
                f"what it got are {[tuple(tensor.shape[:1]) for tensor in all_tensors(call)]}.",
                "Vertical order cuts what a unit gets along the first dimension, which has to be "
                "that of the batch.",
                f"let units take (batch, ...), or {FIX}.",
            )

        def part(number: int, leaf: Any) -> Any:
            return parts[id(leaf)][number] if id(leaf) in parts else leaf

        return [replaced(call, partial(part, number)) for number in range(self.micro_batches)]

    def _is_batch(self, leaf: Any) -> bool:
        """Return whether a leaf is split.

        A parameter that happens to have the length of the batch is not.
        """
        is_data = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        return is_data and leaf.dim() > 0 and len(leaf) == self.samples

    def join(self, unit: str, outputs: Sequence[Any]) -> Any:
        """Concatenate the outputs of a layer's micro-batches into the output for the whole batch.

        Args:
            unit: The name of the layer, for error messages.
            outputs: The output of each micro-batch, in order. An output is a tensor or nested
                containers of tensors.

        Returns:
            An object with the structure of the first output, in which each tensor has all samples
            of the batch. A tensor that is the same object in all outputs is returned unchanged. All
            other values are those of the first output.

        Raises:
            UsageError: The outputs have different numbers of tensors, or the first dimension of a
                tensor to concatenate is not the number of samples in a micro-batch.
        """
        rows = list(map(all_tensors, outputs))
        if len({len(row) for row in rows}) > 1:
            raise UsageError(
                f"unit '{unit}' returned {[len(row) for row in rows]} tensors for micro-batches of "
                "one batch.",
                "What it returns is put together again, tensor by tensor.",
                f"return as many tensors for every micro-batch, or {FIX}.",
            )
        whole = iter([self._joined(unit, column) for column in zip(*rows, strict=True)])
        return map_tensors(outputs[0], lambda tensor: next(whole))

    def _joined(self, unit: str, column: Sequence[Tensor]) -> Tensor:
        first = column[0]
        size = self.samples // self.micro_batches
        if all(tensor is first for tensor in column):
            return first  # An argument that was passed through
        if any(not tensor.dim() or len(tensor) != size for tensor in column):
            raise UsageError(
                f"unit '{unit}' returned a tensor of shape {tuple(first.shape)} for a micro-batch "
                f"of {size} samples.",
                "Only what has the batch for its first dimension can be put together again: of a "
                "mean, say, nobody knows what it was taken over.",
                f"return values by sample and reduce them in the model, or {FIX}.",
            )
        return torch.cat(list(column))


class LayerwiseForward:
    """Replacement of a layer's forward that runs one micro-batch after the other.

    If gradients are disabled, it calls the original forward once with the whole batch. Otherwise
    it calls the original forward once per micro-batch.

    Args:
        order: Splits the arguments and joins the outputs.
        unit: The unit whose module's forward is replaced.
    """

    def __init__(self, order: LayerwiseAccumulation, unit: Unit) -> None:
        self.order = order
        self.unit = unit.name
        self.number = unit.number
        # A weak reference: otherwise module and forward would form a cycle, and a dropped model
        # would keep its memory for a while
        self._module = weakref.ref(unit.module)
        # Set if the program replaced the forward of this instance
        self._own = unit.module.__dict__.get("forward")
        unit.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.order.samples:
            return self.whole(args, kwargs)
        calls = self.order.cut(self.unit, (args, kwargs))
        outputs = {
            part: checkpoint(self.whole, *calls[part]) for part in self.order.turns(self.number)
        }
        return self.order.join(self.unit, [outputs[part] for part in sorted(outputs)])

    def whole(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the original forward of the module, and return its output.

        Args:
            args: Positional arguments of the forward.
            kwargs: Keyword arguments of the forward.

        Returns:
            The output of the original forward.
        """
        module = self._module()
        assert module is not None  # The module is the caller
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def remove(self) -> None:
        """Replace this object by the original forward of the module."""
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        del module.__dict__["forward"]
        if self._own is not None:
            module.forward = self._own
