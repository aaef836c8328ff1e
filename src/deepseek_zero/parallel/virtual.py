"""The virtual axis: one process computes a whole model as several ranks would.

Every product of a split layer is computed as one product per rank, with the same shapes and in the
same order, and sums over ranks are formed in rank order. Loss and gradients are equal to those of
the ranks bit for bit. This makes it the reference for a run that differs: the first layer with
another output contains the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..planner.split import Split
from .autograd import Tensors, with_backward
from .cuts import blocks, join, ordered
from .functions import Entry, column, row_part
from .layers import Layer, LayerPart, Row, _cast, _Entered, _version, cast_for_autocast, look_up
from .streams import Streams


class _EnterAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entries: list[Entry]) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.entries = entries
        ctx.shape = x.shape
        return tuple(x.clone() for _ in entries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        assert all(grad is None for grad in grads), "only column layers read an entered tensor"
        found = tuple(entry.finish() for entry in ctx.entries)
        return None if found[0] is None else ordered(found).view(ctx.shape), None


class VirtualAxis:
    """Computes split layers in one process as several tensor-parallel ranks would.

    It has the interface of `TensorAxis`. An attention runs once per simulated rank with that rank's
    heads only, because a kernel may round differently for another number of heads. Outside of
    attentions, a column layer returns the concatenated outputs of all ranks.

    Args:
        size: The number of simulated ranks.
        device: The device of the model.
        has_dropout: Whether the model draws random numbers, so that each rank needs a stream.
    """

    def __init__(self, size: int, device: torch.device, *, has_dropout: bool) -> None:
        self.size = size
        self.splits_loss = False
        self._streams = [Streams(rank, device) for rank in range(size)] if has_dropout else []
        self._entered: list[list[_Entered]] = []
        self._passes: _Passes | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualAxis:
        return self

    def column(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the outputs of a column layer.

        Args:
            layer: The layer, whose weight is whole.
            x: Its whole input.

        Returns:
            The outputs of all ranks, or those of the current rank in an attention.
        """
        part = layer.part
        entered = self._enter(layer, x)
        weights, biases = self._weights(layer, entered[0].read.dtype)
        found = []
        for rank in self._ranks():
            own = entered[rank]
            found.append(column(own.read, weights[rank], biases[rank], own.entry, part.transposed))
        if self._passes is not None:
            return found[0]
        if part.is_head:
            self._entered = []
        return join(tuple(found), part.outputs)

    def row(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the outputs of a row layer, summed over the simulated ranks in rank order.

        In an attention it ends the run of the current rank; the last rank's call returns the sum.

        Args:
            layer: The layer, whose weight is whole.
            x: The inputs of all ranks, or those of the current rank in an attention.

        Returns:
            A tensor of shape (..., outputs).
        """
        part = layer.part
        passes = self._passes
        x = cast_for_autocast(x)
        weights, biases = self._weights(layer, x.dtype)
        inputs = blocks(x, part.side) if passes is None else [x] * self.size
        found = [
            row_part(inputs[rank], weights[rank], biases[rank], part.transposed)
            for rank in self._ranks()
        ]
        if passes is None:
            self._entered = []
            return _sum(found)
        if self._streams:
            self._streams[passes.rank].leave()
        passes.parts += found
        if passes.rank < self.size - 1:
            raise _NextPass
        return _sum(passes.parts)

    def _ranks(self) -> Sequence[int]:
        """Return the ranks whose layers are computed now."""
        return range(self.size) if self._passes is None else (self._passes.rank,)

    def look_up(self, layer: Layer, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, summed over the simulated ranks in rank order.

        Args:
            layer: The embedding, whose table is whole.
            ids: Indices into the whole table.

        Returns:
            A tensor of shape ``(*ids.shape, width)``.
        """
        weights = blocks(layer.weight, layer.part.weight)
        return _sum(
            [
                look_up(weight, layer.part, rank, ids, layer.padding_idx)
                for rank, weight in enumerate(weights)
            ]
        )

    def own_columns(self, logits: Tensor, part: LayerPart) -> list[tuple[int, Tensor]]:
        """Split logits into the columns of every simulated rank.

        Args:
            logits: All logits, shape (..., words).
            part: How the output layer that computed them is split.

        Returns:
            One tuple for each rank: the index of its first column in the vocabulary, and its
            columns.
        """
        starts = [ranges[0][0] for ranges in part.outputs.ranges]
        return list(zip(starts, blocks(logits, part.outputs), strict=True))

    def all_gather(self, rows: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return the given tensors, because this process computes those of every rank.

        Args:
            rows: The tensor of each simulated rank.
            what: The name of the collective, which is ignored.
        """
        return list(rows)

    def in_passes(
        self, attention: Attention, forward: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention once per simulated rank.

        Each run ends at the row layer; the last one continues with the sum over the ranks.

        Args:
            attention: The module, whose head counts are set to the rank's during each run.
            forward: The forward of the module's original class.
            args: The positional arguments of the forward.
            kwargs: The keyword arguments; key/value caches are replaced by None.

        Returns:
            The output of the last run.
        """
        kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
        self._passes = _Passes()
        self._entered = []
        whole = {place: getattr(*place) for place in attention.counts}
        try:
            for rank in range(self.size):
                self._passes.rank = rank
                for (module, name), local in attention.counts.items():
                    setattr(module, name, local[rank])
                try:
                    return forward(*args, **kwargs)
                except _NextPass:
                    continue
        finally:
            for (module, name), value in whole.items():
                setattr(module, name, value)
            self._passes = None
            self._entered = []

    def alike(self, layer: Repeated) -> dict[str, Tensor] | None:
        """Return the simulated rank's copies of a layer's parameters, by name.

        Their gradients are summed in rank order. The result is None outside of attentions.
        """
        passes = self._passes
        if passes is None:
            return None
        if id(layer) not in passes.alike:
            passes.alike[id(layer)] = _for_each_rank(layer, self.size)
        return {name: each[passes.rank] for name, each in passes.alike[id(layer)].items()}

    def _weights(
        self, layer: Layer, dtype: torch.dtype
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return every rank's weight and bias; within passes, those of the first pass."""
        passes = self._passes
        if passes is not None and id(layer) in passes.weights:
            return passes.weights[id(layer)]
        part = layer.part
        weights = blocks(_cast(layer.weight, dtype), part.weight)
        biases: Sequence[Tensor | None] = [None] * self.size
        if layer.bias is not None and isinstance(layer, Row):
            biases = [_cast(layer.bias, dtype), *[None] * (self.size - 1)]
        elif layer.bias is not None:
            biases = blocks(_cast(layer.bias, dtype), part.side)
        if passes is not None:
            passes.weights[id(layer)] = weights, biases
        return weights, biases

    def _enter(self, layer: Layer, x: Tensor) -> list[_Entered]:
        known = [
            each for each in self._entered if each[0].x is x and each[0].version == _version(x)
        ]
        if self._streams and not (layer.part.gathers or layer.part.is_head):
            self._draw(is_new=not known)
        if known:
            return known[0]
        read = cast_for_autocast(x)
        if torch.is_grad_enabled() and read.requires_grad:

            def new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
                return read.new_empty(shape, dtype=dtype)

            entries = [Entry(new, lambda partial: partial) for _ in range(self.size)]
            reads = _EnterAll.apply(read, entries)  # type: ignore[no-untyped-call]
            found = [
                _Entered(x, _version(x), own, entry)
                for own, entry in zip(reads, entries, strict=True)
            ]
        else:
            found = [_Entered(x, _version(x), read, None) for _ in range(self.size)]
        self._entered.append(found)
        return found

    def _draw(self, *, is_new: bool) -> None:
        """Switch to the random stream of the current rank when its layers enter a region."""
        passes = self._passes
        if passes is None:
            if is_new:
                self._streams[0].enter()
                self._streams[0].leave()
        elif not passes.has_drawn[passes.rank : passes.rank + 1]:
            if passes.rank == 0:
                passes.common = torch.get_rng_state()
            elif passes.common is not None:
                torch.set_rng_state(passes.common)
            self._streams[passes.rank].enter()
            passes.has_drawn.append(True)


class Repeated(nn.Module):
    """A layer that every tensor-parallel rank holds whole and applies to its own attention heads.

    Its gradient is summed over the ranks. It is not instantiated: modules change their class to a
    subclass.
    """

    axis: VirtualAxis
    is_inside = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the parameters of the rank that is being simulated."""
        alike = None if self.is_inside else self.axis.alike(self)
        if alike is None:
            return super().forward(*args, **kwargs)
        self.is_inside = True
        try:
            return torch.func.functional_call(self, alike, args, kwargs)
        finally:
            self.is_inside = False


class TokenShare(nn.Module):
    """A layer that every rank holds whole and applies to its own tokens.

    Its gradient is summed over the ranks. It is not instantiated: norms between split layers change
    their class to a subclass.
    """

    axis: VirtualAxis
    is_inside = False

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer once per simulated rank, on that rank's tokens, and join the outputs."""
        if self.is_inside or not self.training:
            return cast(Tensor, super().forward(x))
        split = Split.even(tuple(x.shape), 1, self.axis.size)
        parameters = _for_each_rank(self, self.axis.size)
        self.is_inside = True
        try:
            found = [
                torch.func.functional_call(
                    self, {name: each[rank] for name, each in parameters.items()}, (part,)
                )
                for rank, part in enumerate(blocks(x, split))
            ]
        finally:
            self.is_inside = False
        return join(tuple(found), split)


class _NextPass(Exception):
    """A pass of an attention has reached its row layer."""


@dataclass
class _Passes:
    """The passes of the current attention.

    Attributes:
        rank: The rank of the current pass.
        parts: The products of the row layer.
        weights: Weights and biases of every rank, by layer.
        alike: Parameters of every rank, by layer.
        common: The common random stream before the first pass drew from it.
        has_drawn: One entry for each rank that drew.
    """

    rank: int = 0
    parts: list[Tensor] = field(default_factory=list)
    weights: dict[int, tuple[Sequence[Tensor], Sequence[Tensor | None]]] = field(
        default_factory=dict
    )
    alike: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    common: Tensor | None = None
    has_drawn: list[bool] = field(default_factory=list)


class Attention(nn.Module):
    """An attention that runs its forward once per simulated rank, up to its row layer.

    It is not instantiated: modules change their class to a subclass.

    Attributes:
        axis: Runs the attention for each rank.
        counts: The number of heads of each rank, by (module, attribute) that stores it.
    """

    axis: VirtualAxis
    counts: dict[tuple[nn.Module, str], tuple[int, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the original class once per simulated rank.

        Args:
            args: Positional arguments of the original forward.
            kwargs: Keyword arguments of the original forward.

        Returns:
            The output of the last run, which contains the sum over all ranks.
        """
        return self.axis.in_passes(self, super().forward, args, kwargs)


# Arguments that a training step does not use
CACHES = ("past_key_values", "past_key_value", "layer_past")


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return with_backward(lambda *parts: ordered(parts), lambda grad: (grad,) * len(parts), *parts)


def _for_each_rank(layer: nn.Module, ranks: int) -> dict[str, Tensors]:
    """Return copies of a layer's parameters, one per rank; gradients are summed in rank order."""
    return {
        name: with_backward(
            lambda whole: tuple(whole.clone() for _ in range(ranks)),
            lambda *grads: (ordered(grads),),
            each,
        )
        for name, each in layer.named_parameters(recurse=False)
    }
