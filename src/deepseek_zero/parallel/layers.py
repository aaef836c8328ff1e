"""Layers that are changed in place into their tensor-parallel parts.

A layer stays the same object, and a parameter the same Parameter, so ties, optimizers and names
remain valid. The `axis` of a layer computes its forward: a `TensorAxis` for one rank of a group, or
a `VirtualAxis` (virtual.py) for a whole model in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import NotBuiltError
from ..planner.split import Split, laid_out
from .functions import Entry, column, enter, enter_tokens, gather, leave, row, scatter
from .group import TensorGroup
from .streams import Streams, align_generators


@dataclass(frozen=True)
class LayerPart:
    """How a layer is split over the tensor-parallel ranks.

    Attributes:
        name: The name of the module in the model.
        weight: How the weight is split.
        transposed: Whether the weight is (in, out) instead of (out, in).
        gathers: Whether a column layer all-gathers its outputs.
        scatters: Whether the inputs of a row layer are whole, so that each rank takes its part.
        is_head: Whether the layer computes logits, from which the loss may be computed without an
            all-gather.
        shards_tokens: Whether, in training, the inputs of a column layer or the outputs of a row
            layer are sharded over tokens.
    """

    name: str
    weight: Split
    transposed: bool = False
    gathers: bool = False
    scatters: bool = False
    is_head: bool = False
    shards_tokens: bool = False

    @property
    def side(self) -> Split:
        """Return how a vector with one element per row or column is split, such as a bias."""
        return Split("split", (self.weight.shape[self.weight.dim],), 0, self.weight.ranges)

    @cached_property
    def outputs(self) -> Split:
        """Return how the outputs of a column layer are split over the ranks.

        If several ranks hold the same part of the weight (a key/value head), each has its own copy
        of the output, and the whole output contains every copy.
        """
        # For each block of a fused q, k, v: the widths of the ranks' parts
        blocks = zip(*self.weight.ranges, strict=True)
        widths = [[high - low for low, high in block] for block in blocks]
        return Split("split", (sum(map(sum, widths)),), 0, laid_out(widths))


class Axis(Protocol):
    """Interface of the objects that compute split layers and their collectives.

    `TensorAxis` computes one rank's shards; `VirtualAxis` simulates all ranks in one process.
    """

    splits_loss: bool

    def column(self, layer: Layer, x: Tensor) -> Tensor: ...

    def row(self, layer: Layer, x: Tensor) -> Tensor: ...

    def look_up(self, layer: Layer, ids: Tensor) -> Tensor: ...

    def own_columns(self, logits: Tensor, part: LayerPart) -> list[tuple[int, Tensor]]: ...

    def all_gather(self, rows: Sequence[Tensor], what: str) -> list[Tensor]: ...


class Layer(nn.Module):
    """Base class of the layers of a model that `parallelize` has split.

    The class is not instantiated directly. `parallelize` changes the class of a module, such as
    `nn.Linear`, to a subclass of `Layer` and of its former class. The weight of the module is then
    this rank's shard.

    Attributes:
        axis: The object that computes the forward of the layer and its collectives, usually a
            `TensorAxis`.
        part: How the layer is split over the ranks.
    """

    axis: Axis
    part: LayerPart
    weight: Tensor
    bias: Tensor | None
    padding_idx: int | None


class Column(Layer):
    """A linear layer with some rows of the weight on each rank.

    Each rank computes some of the outputs.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all outputs if the layer all-gathers them."""
        return self.axis.column(self, x)


class Row(Layer):
    """A linear layer with some columns of the weight on each rank.

    Each rank reads some of the inputs, and the ranks' products are summed.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' products, plus the bias."""
        return self.axis.row(self, x)


class Vocabulary(nn.Embedding, Layer):
    """An embedding with some rows of the table on each rank.

    Each rank looks up the tokens of its rows, and the results are summed over the ranks.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of indices into the whole table."""
        return self.axis.look_up(self, ids)


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change the class of a module to a new subclass of `kind` and of its current class.

    Args:
        module: The module to change in place.
        kind: The base class to add, for example `Column`, `Row` or `Vocabulary`.
        **attributes: Attributes to set on the module, for example `axis` and `part`.
    """
    module.__class__ = _mixed(type(module), kind)  # type: ignore[arg-type]
    vars(module).update(attributes)


@cache
def _mixed(base: Any, kind: Any) -> Any:
    """Return the class for a part whose class was `base`; one for each pair."""
    if issubclass(kind, base):
        return kind
    bases = (base, kind) if kind is Vocabulary else (kind, base)
    return type(f"{kind.__name__}{base.__name__}", bases, {"__module__": __name__})


class TensorAxis:
    """Computes the forward of split layers on one rank of a tensor-parallel group.

    All ranks of the group must call the methods in the same order. `copy.deepcopy` returns the same
    object, so a copy of a model uses the same ranks.

    Args:
        group: The object that runs the collectives of the tensor-parallel ranks.
        streams: The random-number streams of this rank; None if the model uses no random numbers.

    Attributes:
        splits_loss: Whether the loss of the current forward reads logits that are split over the
            ranks. If False, the output layer all-gathers the logits.
    """

    def __init__(self, group: TensorGroup, streams: Streams | None = None) -> None:
        self.group = group
        self.streams = streams
        self.splits_loss = False
        self._entered: list[_Entered] = []  # inputs of column layers since the last row layer
        # In a module that has all tokens of a sharded tensor (`read_tokens`)
        self._is_inside = False
        self._runs = False  # a forward of the model is in progress, or it raised

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self  # a copy of a model uses the same ranks

    def column(self, layer: Layer, x: Tensor) -> Tensor:
        """Return this rank's outputs of a column layer, or all outputs.

        All outputs are gathered if `LayerPart.gathers` is True. Logits are gathered unless the loss
        reads split logits. The axis stores the input until the next call of `row` or `leave`, so
        that column layers with the same input share one sum of its gradient. Unless outputs are
        gathered or tokens are sharded, this rank's random-number stream is used until then.

        Args:
            layer: The layer, whose weight is this rank's shard.
            x: The input of the layer, which is whole on every rank. If the layer reads inputs that
                are sharded over tokens, `x` contains only this rank's tokens, or is a result of
                `read_tokens`.

        Returns:
            A tensor of shape (..., outputs). The last dimension is the number of this rank's
            outputs, or of all outputs.

        Raises:
            NotBuiltError: The tokens are sharded, and `x` does not have three dimensions, or the
                module around the layer has all-gathered the tokens of another tensor.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective if outputs or tokens are gathered: every rank must call it. Backward is
            collective if `x` requires a gradient. It sums the gradient over the ranks, with a
            reduce-scatter if the tokens are sharded.
        """
        entered = self._enter(layer, x)
        part = layer.part
        weight = _cast(layer.weight, entered.read.dtype)
        bias = _cast(layer.bias, entered.read.dtype)
        found = column(entered.read, weight, bias, entered.entry, part.transposed)
        if part.is_head:
            self.leave()
        if part.gathers or (part.is_head and not self.splits_loss):
            return gather(found, self.group, part.outputs, part.name)
        return found

    def row(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the outputs of a row layer, summed over the ranks.

        The stored inputs of column layers are dropped. Unless outputs are sharded over tokens, the
        random-number stream that all ranks share is used again.

        Args:
            layer: The layer, whose weight is this rank's shard.
            x: This rank's part of the layer's input, or the whole input if the layer splits it.

        Returns:
            A tensor of shape (..., outputs). It contains all tokens, or in training only this
            rank's tokens if the layer shards its outputs over tokens.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective and blocking: every rank must call it. Backward is collective too if the
            layer splits its input, or shards its outputs over tokens.
        """
        part = layer.part
        shards_tokens = part.shards_tokens and layer.training
        if shards_tokens:
            self._forget()
        else:
            self.leave()
        if part.scatters:
            x = scatter(x, self.group, part.weight.widths, part.name)
        x = cast_for_autocast(x)
        weight = _cast(layer.weight, x.dtype)
        bias = _cast(layer.bias, x.dtype)
        return row(
            x, weight, bias, self.group, part.transposed, part.name, shards_tokens=shards_tokens
        )

    def look_up(self, layer: Layer, ids: Tensor) -> Tensor:
        """Return embeddings from a table whose rows are split over the ranks.

        Args:
            layer: The embedding, whose weight contains only this rank's rows of the table.
            ids: Indices into the whole table, equal on every rank.

        Returns:
            A tensor of shape ``(*ids.shape, width)``, equal on every rank.

        Raises:
            IndexError: An index is outside of the table. As in `torch.nn.Embedding`, CUDA reports
                such an index with an asynchronous assertion instead.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective and blocking: every rank must call it. Backward does not communicate.
        """
        found = look_up(layer.weight, layer.part, self.group.index, ids, layer.padding_idx)
        return leave(found, self.group, layer.part.name)

    def own_columns(self, logits: Tensor, part: LayerPart) -> list[tuple[int, Tensor]]:
        """Return the columns of the logits that this process computes.

        Args:
            logits: This rank's shard of the logits, shape ``(..., local_vocab_size)``.
            part: How the output layer that computed them is split.

        Returns:
            A list of tuples ``(offset, columns)``, in which ``offset`` is the index of the first
            column in the whole vocabulary. The list contains one tuple, for this rank.
            (`VirtualAxis` returns one tuple for each simulated rank.)
        """
        return [(sum(part.weight.widths[: self.group.index]), logits)]

    def all_gather(self, rows: Sequence[Tensor], what: str) -> list[Tensor]:
        """All-gather one matrix from each rank.

        The method is not differentiable.

        Args:
            rows: A list that contains only this rank's matrix, which is contiguous and has the same
                dtype and shape (n, width) on every rank. (`VirtualAxis` receives one matrix for
                each simulated rank.)
            what: The name of the collective, used in error messages.

        Returns:
            A list of the matrices of all ranks, in rank order. It contains the passed matrix itself
            and new tensors for the other ranks.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective and blocking: every rank must call it.
        """
        (own,) = rows
        return self.group.all_gather(own, [own.shape[1]] * self.group.size, what)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Prepare a forward of the model on the ranks of the group.

        Inputs that an earlier forward has stored are dropped, and the random-number stream that all
        ranks share is used. If the states of torch's default generators differ between the ranks,
        all ranks take the first rank's state, and a message is logged once. The method is
        registered as a forward pre-hook of the model.

        Args:
            module: The model whose forward begins. It is not used.
            args: The inputs of the forward. They are not used.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank must call it.
        """
        if not self._runs and self.streams is not None:
            # State of a recomputation, which has restored torch's generators itself
            self.streams.forget()
        self.leave()
        self._runs = True
        align_generators(self.group.comm)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record that the forward of the model has finished.

        If the method is not called because a forward raised, the next `begin` switches back to the
        random-number stream that all ranks share. The method is registered as a forward hook of the
        model.

        Args:
            module: The model. It is not used.
            args: The inputs of the forward. They are not used.
            output: The output of the forward. It is not used.
        """
        self._runs = False

    def read_tokens(self, x: Tensor, name: str) -> Tensor:
        """All-gather the tokens that the column layers of a module will read.

        Column layers that receive the result do not gather the tokens again. Until the next call of
        `row` or `leave`, a column layer that reads another sharded tensor raises NotBuiltError.

        Args:
            x: This rank's tokens, shape (batch, tokens / ranks, n).
            name: The name of the module, used in error messages.

        Returns:
            All tokens, shape (batch, tokens, n), in the dtype of autocast if that is enabled. If
            `x` requires a gradient, backward reduce-scatters the gradient, and only column layers
            may compute with the result.

        Raises:
            NotBuiltError: `x` does not have three dimensions.
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective and blocking: every rank must call it.
        """
        read, entry = enter_tokens(cast_for_autocast(x), self.group, name)
        self._forget()
        self._entered.append(_Entered(read, _version(read), read, entry))
        self._is_inside = True
        return read

    def enter_tokens(self) -> None:
        """Switch to this rank's random-number stream, which is used for its own tokens.

        The stream is seeded with one number from the stream that all ranks share. The method does
        nothing if the axis has no streams.
        """
        if self.streams is not None:
            self.streams.forget()  # state of a recomputation that stopped early
            self.streams.enter()

    def _enter(self, layer: Layer, x: Tensor) -> _Entered:
        """Return the tensor that column layers read for x.

        Layers that read the same x share it.
        """
        for known in self._entered:
            if known.x is x and known.version == _version(x):
                return known
        shards_tokens = layer.part.shards_tokens and layer.training
        if shards_tokens and self._is_inside:
            raise NotBuiltError(
                f"layer '{layer.part.name}' reads another tensor than its module does, whose "
                "tokens are sharded.",
                "Only what the module is given first has all tokens gathered.",
                'say "tensor_parallel": {"sequence": false}.',
            )
        into = enter_tokens if shards_tokens else enter
        read, entry = into(cast_for_autocast(x), self.group, layer.part.name)
        found = _Entered(x, _version(x), read, entry)
        self._entered.append(found)
        if shards_tokens:
            return found  # the rank's own stream is used in the whole block
        if self.streams is not None and not (layer.part.gathers or layer.part.is_head):
            self.streams.enter()
        return found

    def leave(self) -> None:
        """Drop stored inputs, and switch to the random-number stream of all ranks.

        The stored inputs are those that column layers have read since the last row layer. If the
        axis has no streams, only the inputs are dropped.
        """
        self._forget()
        if self.streams is not None:
            self.streams.leave()

    def _forget(self) -> None:
        self._entered.clear()
        self._is_inside = False


@dataclass(frozen=True)
class _Entered:
    """An input of column layers, its version, and the tensor that the layers read for it."""

    x: Tensor
    version: int
    read: Tensor
    entry: Entry | None


def look_up(
    weight: Tensor, part: LayerPart, coordinate: int, ids: Tensor, padding: int | None
) -> Tensor:
    """Return the embeddings of the tokens whose rows this rank holds, and zeros for others.

    An index outside of the whole table is handled as in `torch.nn.Embedding`, on every rank.

    Args:
        weight: This rank's rows of the table.
        part: How the table is split.
        coordinate: This rank's index on the tensor-parallel axis.
        ids: Indices into the whole table.
        padding: The padding index in the whole table, or None.

    Returns:
        A tensor of shape ``(*ids.shape, width)``; the sum over the ranks is the embedding.
    """
    ((start, stop),) = part.weight.ranges[coordinate]
    own = ids - start
    others = (own < 0) | (own >= stop - start)
    # Indices outside of the whole table stay outside of this rank's rows, so `F.embedding` raises
    others_in_table = others & (ids >= 0) & (ids < part.weight.shape[0])
    local_padding = padding - start if padding is not None and start <= padding < stop else None
    found = F.embedding(own.masked_fill(others_in_table, 0), weight, local_padding)
    return found.masked_fill(others.unsqueeze(-1), 0)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that torch.autocast uses for matrix products, if it is enabled."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a weight in the dtype of autocast.

    Without autocast it is unchanged, and torch raises for a product of two dtypes.
    """
    if tensor is None or tensor.dtype == dtype or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(dtype)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
