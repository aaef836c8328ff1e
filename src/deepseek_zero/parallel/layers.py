"""Layers changed in place into parts of layers: their class, their parameters' data, their sizes.

A layer stays the object it was, and a parameter the Parameter it was, so that ties, optimizers and
names hold. What a layer computes is its axis's to say: `TensorAxis` for the rank of a group,
`VirtualAxis` (virtual.py) for a whole model in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import NotBuiltError
from ..planner.split import Split
from .cuts import activations
from .functions import Entry, column, enter, enter_tokens, gather, leave, row, scatter
from .group import TensorGroup
from .streams import Streams, align_generators


@dataclass(frozen=True)
class LayerPart:
    """What a layer is over the ranks of an axis.

    name: its module's. transposed: its weight is (in, out). gathers: a column layer's outputs are
    gathered at once;
    scatters: a row layer's inputs come whole. is_head: its outputs are logits, which a loss may
    read split.
    shards_tokens: in training, what a column layer reads and a row layer gives is sharded over
    tokens.
    """

    name: str
    weight: Split
    transposed: bool = False
    gathers: bool = False
    scatters: bool = False
    is_head: bool = False
    shards_tokens: bool = False

    @property
    def widths(self) -> list[int]:
        """By coordinate, how much of the cut dimension a rank holds."""
        return [sum(stop - start for start, stop in ranges) for ranges in self.weight.ranges]

    @property
    def side(self) -> Split:
        """The cut dimension alone: of a row layer's inputs, and of a bias."""
        return Split("split", (self.weight.shape[self.weight.dim],), 0, self.weight.ranges)

    @cached_property
    def outputs(self) -> Split:
        """How the outputs of a column layer lie over the ranks (`activations`)."""
        return activations(self.weight)


class Axis(Protocol):
    """Who computes layers that are parts.

    splits_loss: whether the loss reads split logits in the forward under way (loss.py).
    """

    splits_loss: bool

    def column(self, layer: Layer, x: Tensor) -> Tensor: ...

    def row(self, layer: Layer, x: Tensor) -> Tensor: ...

    def look_up(self, layer: Layer, ids: Tensor) -> Tensor: ...

    def own_columns(self, logits: Tensor, part: LayerPart) -> list[tuple[int, Tensor]]:
        """Return, for each rank that computes here, the number of its first word and its columns of
        split logits.
        """
        ...

    def all_gather(self, rows: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return every rank's rows, by rank. rows: one (n, width) for each rank that computes here.
        Collective.
        """
        ...


class Layer(nn.Module):
    """A layer that is a part.  Never made: modules take one of its subclasses as their class."""

    axis: Axis
    part: LayerPart
    weight: Tensor
    bias: Tensor | None
    padding_idx: int | None


class Column(Layer):
    """A layer of which each rank computes its own outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.axis.column(self, x)


class Row(Layer):
    """A layer of which each rank reads its own inputs; its outputs are summed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.axis.row(self, x)


class Vocabulary(nn.Embedding, Layer):
    """An embedding of which each rank holds its own rows.  A subclass's own forward goes on to call
    this one.
    """

    def forward(self, ids: Tensor) -> Tensor:
        return self.axis.look_up(self, ids)


def become(module: nn.Module, kind: type[Layer], axis: Axis, part: LayerPart) -> None:
    """Make a module a part: its class changes, nothing else does."""
    module.__class__ = _mixed(type(module), kind)
    layer = cast(Layer, module)
    layer.axis = axis
    layer.part = part


_mixes: dict[tuple[type, type], type[nn.Module]] = {}


def _mixed(base: type[nn.Module], kind: type[Layer]) -> type[nn.Module]:
    """Return the class of a part that was of class `base`; there is one for each pair."""
    if issubclass(kind, base):
        return kind
    if (base, kind) not in _mixes:
        bases: tuple[type, ...] = (base, kind) if kind is Vocabulary else (kind, base)
        _mixes[base, kind] = type(
            f"{kind.__name__}{base.__name__}", bases, {"__module__": __name__}
        )
    return _mixes[base, kind]


class TensorAxis:
    """The layers of one rank of a group.  All ranks of the group call them in the same order."""

    def __init__(self, group: TensorGroup, streams: Streams | None = None) -> None:
        self.group = group
        self.streams = streams
        self.splits_loss = False
        self._entered: list[_Entered] = []  # since the last region was left
        self._is_inside = (
            False  # of a module that has all tokens of what was sharded (`read_tokens`)
        )
        self._runs = False  # a forward of the model is under way, or an error ended it

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self  # a copy of a model is computed by the same ranks

    def column(self, layer: Layer, x: Tensor) -> Tensor:
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
        part = layer.part
        shards_tokens = part.shards_tokens and layer.training
        if shards_tokens:
            self._forget()
        else:
            self.leave()
        if part.scatters:
            x = scatter(x, self.group, part.widths, part.name)
        x = cast_for_autocast(x)
        weight = _cast(layer.weight, x.dtype)
        bias = _cast(layer.bias, x.dtype)
        return row(
            x, weight, bias, self.group, part.transposed, part.name, shards_tokens=shards_tokens
        )

    def look_up(self, layer: Layer, ids: Tensor) -> Tensor:
        found = look_up(layer.weight, layer.part, self.group.index, ids, layer.padding_idx)
        return leave(found, self.group, layer.part.name)

    def own_columns(self, logits: Tensor, part: LayerPart) -> list[tuple[int, Tensor]]:
        return [(sum(part.widths[: self.group.index]), logits)]

    def all_gather(self, rows: Sequence[Tensor], what: str) -> list[Tensor]:
        (own,) = rows
        return self.group.all_gather(own, [own.shape[1]] * self.group.size, what)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Forget what a forward left that an error ended; align the ranks' generators. Collective.

        A forward pre-hook of the model.
        """
        if not self._runs and self.streams is not None:
            # Left by a recomputation, which has put torch's generators back itself
            self.streams.forget()
        self.leave()
        self._runs = True
        align_generators(self.group.comm)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a forward has come to its end. A forward hook of the model."""
        self._runs = False

    def read_tokens(self, x: Tensor, name: str) -> Tensor:
        """Return all tokens of a sharded tensor, for a module whose column layers read it.
        Collective; waits.
        """
        read, entry = enter_tokens(cast_for_autocast(x), self.group, name)
        self._forget()
        self._entered.append(_Entered(read, _version(read), read, entry))
        self._is_inside = True
        return read

    def enter_tokens(self) -> None:
        """Begin to compute on this rank's tokens: it draws from a stream of its own."""
        if self.streams is not None:
            self.streams.forget()  # of a recomputation that ended before its end
            self.streams.enter()

    def _enter(self, layer: Layer, x: Tensor) -> _Entered:
        """Return the tensor that column layers read for x: the one made for a layer before, if it
        read the same x.
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
            return found  # the stream is the rank's own in the whole block
        if self.streams is not None and not (layer.part.gathers or layer.part.is_head):
            self.streams.enter()
        return found

    def leave(self) -> None:
        """Forget the entered tensors: what is computed next is whole on every rank."""
        self._forget()
        if self.streams is not None:
            self.streams.leave()

    def _forget(self) -> None:
        self._entered.clear()
        self._is_inside = False


@dataclass(frozen=True)
class _Entered:
    """x, as it was entered at this version, and what the column layers read for it."""

    x: Tensor
    version: int
    read: Tensor
    entry: Entry | None


def look_up(
    weight: Tensor, part: LayerPart, coordinate: int, ids: Tensor, padding: int | None
) -> Tensor:
    """Return one rank's summand of an embedding: its own rows, zero for the others'. ids: as the
    whole table counts.
    """
    ((start, stop),) = part.weight.ranges[coordinate]
    own = ids - start
    others = (own < 0) | (own >= stop - start)
    local_padding = padding - start if padding is not None and start <= padding < stop else None
    found = F.embedding(own.masked_fill(others, 0), weight, local_padding)
    return found.masked_fill(others.unsqueeze(-1), 0)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that torch.autocast computes products in, where it is on."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a weight for autocast; elsewhere a product of two dtypes is torch's error."""
    if tensor is None or tensor.dtype == dtype or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(dtype)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
