"""Cuts layers larger than `zero_optimization.tile_above` into tiles of rows.

Each tile is a unit. A row of an nn.Linear's weight computes one output feature, and a row of an
nn.Embedding's is one entry. A tile therefore computes complete output elements. The only sum that
is split is the gradient of a linear layer's input, which is added up over tiles in their order. A
linear layer equals the whole one up to rounding, because a matrix multiplication may sum in an
order that depends on the shape. An embedding is equal bit for bit. Layers that share a weight share
its tiles.

A layer stays the same object in the same place of the model, with the same hooks; only its class
changes. State dicts and checkpoints have the names and shapes of the whole layer
(`planner/rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..base.errors import NotBuiltError, UsageError
from ..base.quantities import ceil_div
from ..optim.param_groups import CUT_INTO
from ..planner.rows import Rows, set_rows
from ..sharding.sharded_parameter import owner_of, take_values
from .tiled import Put, boundaries, run_tiles
from .zero_init import InitShard


@dataclass(frozen=True)
class LayerCut:
    """A large weight that is cut into ranges of rows (tiles), each of which is sharded separately.

    Attributes:
        weight: The whole weight.
        name: The first name of the weight in the model.
        layers: The layers that use the weight, by the name that the weight has in them.
        places: The boundaries of the tiles, in rows, from 0 to the number of rows.
    """

    weight: nn.Parameter
    name: str
    layers: dict[str, nn.Module]
    places: tuple[int, ...]


@dataclass(frozen=True)
class CutChoice:
    """Describes which large weights of a model are cut into tiles of rows, and where.

    `choose_cuts` returns it, and `cut` cuts the weights. Each tile is then sharded separately.

    Attributes:
        cuts: The weights to cut, with the boundaries of their tiles.
        left: The names of the large parameters that stay whole, because `choose_cuts` does not
            support a layer that uses them. A tied parameter is listed by the first of its names.
    """

    cuts: tuple[LayerCut, ...]
    left: tuple[str, ...]

    def cut(self) -> dict[str, str]:
        """Replace each weight of `cuts` by tiles of rows, in place.

        The layers of these weights stay the same objects, but their classes become `CutLinear` or
        `CutEmbedding`. Their attribute `weight` is removed, and their module list `tiles` holds the
        tiles. Their state dicts still have the whole weight, because the call registers hooks that
        join and cut it. An optimizer that the user built before this call still has the whole
        weights as parameters. `optim.param_groups.with_replacements` replaces these parameters by
        the tiles. The method may be called only once.

        Returns:
            A dict from the name of each tile's parameter to the first name of the whole parameter
            in the model.

        Note:
            Collective if the model was built under `zero.Init`: every rank must call it.
        """
        found: dict[str, str] = {}
        for cut in self.cuts:
            tiles = [RowTile(weight) for weight in _tiles_of(cut)]
            for name, layer in cut.layers.items():
                _become(layer, tiles, cut.places)
                prefix = name.removesuffix("weight")
                for number in range(len(tiles)):
                    found[f"{prefix}tiles.{number}.weight"] = cut.name
        return found


def choose_cuts(
    model: nn.Module, limit: int, dtype_of: Callable[[torch.dtype], torch.dtype]
) -> CutChoice:
    """Choose which large weights are cut into tiles of rows.

    The model is not changed. Only weights of nn.Linear and nn.Embedding are cut. Subclasses of
    these layers, and layers with a replaced `forward`, are not cut. The choice depends neither on
    ranks nor on the ZeRO stage, so all runs of a model with the same limit and dtypes have the same
    tiles.

    Args:
        model: The model whose layers are examined.
        limit: The size in bytes above which a parameter is cut. Tiles are at most this large.
        dtype_of: Called with the dtype of a parameter. It returns the dtype of the parameter in
            forward and backward.

    Returns:
        A `CutChoice` with the weights to cut and the names of the large parameters that stay whole.

    Raises:
        UsageError: One row of a weight that must be cut is larger than `limit`.
        NotBuiltError: An nn.Embedding that must be cut has `max_norm` or sparse gradients.
    """
    params: dict[int, nn.Parameter] = {}
    users: dict[int, dict[str, nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(prefix, recurse=False):
            params[id(param)] = param
            users.setdefault(id(param), {})[name] = module
    cuts = list[LayerCut]()
    left = list[str]()
    for key, layers in users.items():
        param = params[key]
        name = next(iter(layers))
        itemsize = dtype_of(param.dtype).itemsize
        if param.numel() * itemsize <= limit:
            continue
        if not all(
            type(layer) in KINDS and "forward" not in layer.__dict__ and layer.weight is param
            for layer in layers.values()
        ):
            left.append(name)
            continue
        for each, layer in layers.items():
            _refuse_options(each, layer)
        places = _places(name, tuple(param.shape), limit, itemsize)
        cuts.append(LayerCut(param, name, layers, places))
    return CutChoice(tuple(cuts), tuple(left))


def _refuse_options(name: str, layer: nn.Module) -> None:
    """Raise NotBuiltError for an embedding with `max_norm` or sparse gradients."""
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        what = "max_norm" if layer.max_norm is not None else "sparse gradients"
        raise NotBuiltError(
            f"zero_optimization.tile_above would split '{name.removesuffix('.weight')}', an "
            f"nn.Embedding with {what}.",
            "A tile sees neither the whole weight nor all indices.",
            f"build it without {what}, or raise tile_above above its size.",
        )


class RowTile(nn.Module):
    """A range of rows of a large weight, which is sharded and gathered separately from the others.

    Layers that share the weight share the tile.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, given: Tensor, *more: Tensor, use: Callable[..., Tensor] = functional.linear
    ) -> Tensor:
        """Return ``use(given, self.weight, *more)``.

        Args:
            given: The input of the layer.
            more: Arguments of `use` after the weight.
            use: The operation; each layer that shares the tile passes its own.

        Returns:
            The result of `use`: the part of the layer's output that these rows compute.
        """
        return use(given, self.weight, *more)


class CutLayer(nn.Module):
    """Base class of layers whose weight is cut into tiles of rows.

    A bias stays a whole parameter of the layer, since it is small. It belongs to the unit that
    contains the layer.

    Attributes:
        tiles: The tiles, in the order of their rows.
        places: The boundaries of the tiles, in rows.
    """

    children_are_units: ClassVar[bool] = True
    tiles: nn.ModuleList
    places: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"this {type(self).__name__} has no weight of its own: "
                "zero_optimization.tile_above has cut it into tiles.  What reads a layer's weight "
                "itself, without calling the layer, needs tile_above left out"
            )
        return super().__getattr__(name)


class CutLinear(CutLayer, nn.Linear):
    """nn.Linear cut into tiles of rows, each of which computes a range of output features."""

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is None:
            return run_tiles([[tile] for tile in self.tiles], [input], self.out_features)
        biases = self.bias.split([high - low for low, high in pairwise(self.places)])
        rows = [
            [partial(_with_bias, tile, bias)] for tile, bias in zip(self.tiles, biases, strict=True)
        ]
        return run_tiles(rows, [input], self.out_features)


class CutEmbedding(CutLayer, nn.Embedding):
    """nn.Embedding cut into tiles of rows. Each index is looked up in the tile with its row."""

    def forward(self, input: Tensor) -> Tensor:
        whole: Tensor | None = None
        last = len(self.tiles) - 1
        for number, (low, high) in enumerate(pairwise(self.places)):
            # The first and the last tile also get indices that are out of range, so they raise.
            here = input < high if number == 0 else input >= low
            if 0 < number < last:
                here &= input < high
            padding = None
            if self.padding_idx is not None and low <= self.padding_idx < high:
                padding = self.padding_idx - low
            use = partial(
                functional.embedding,
                padding_idx=padding,
                scale_grad_by_freq=self.scale_grad_by_freq,
            )
            found = self.tiles[number](input[here] - low, use=use)
            if whole is None:
                whole = found.new_empty((*input.shape, self.embedding_dim))
            whole = Put.apply(whole, found, here, False)  # type: ignore[no-untyped-call]
        assert whole is not None
        return whole


def _with_bias(tile: nn.Module, bias: Tensor, given: Tensor) -> Tensor:
    found: Tensor = tile(given, bias)
    return found


KINDS: dict[type[nn.Module], type[CutLayer]] = {nn.Linear: CutLinear, nn.Embedding: CutEmbedding}


def _places(name: str, shape: tuple[int, ...], limit: int, itemsize: int) -> tuple[int, ...]:
    """Return the boundaries of as few tiles as the limit allows."""
    rows = shape[0]
    each = prod(shape[1:]) * itemsize
    if each > limit:
        raise UsageError(
            f"one row of '{name}' has {each} bytes, and zero_optimization.tile_above is {limit}.",
            "Layers are cut between rows: output features, or entries of an embedding.",
            f"state at least {each}.",
        )
    return tuple(boundaries(rows, ceil_div(rows, limit // each)))


def _tiles_of(cut: LayerCut) -> list[nn.Parameter]:
    """Return a weight's tiles, which are views of the weight.

    Under zero.Init they are slices, and the call is collective.
    """
    shape = tuple(cut.weight.shape)
    owner = owner_of(cut.weight)
    values, _ = take_values(cut.weight)
    whole = values.view(shape)
    tiles = list[nn.Parameter]()
    for low, high in pairwise(cut.places):
        tile = nn.Parameter(whole[low:high].detach(), requires_grad=cut.weight.requires_grad)
        set_rows(tile, Rows(cut.name, shape, low))
        tiles.append(tile)
    if isinstance(owner, InitShard):
        with torch.no_grad():
            for tile in tiles:
                owner.session.cut(tile)
    cut.weight.__dict__[CUT_INTO] = tuple(tiles)
    return tiles


def _become(layer: nn.Module, tiles: Sequence[RowTile], places: tuple[int, ...]) -> None:
    """Turn a layer into a cut layer, in place."""
    del layer.weight
    layer.__class__ = KINDS[type(layer)]
    assert isinstance(layer, CutLayer)
    layer.tiles = nn.ModuleList(tiles)
    layer.places = places
    layer.register_state_dict_post_hook(_join_state)  # type: ignore[no-untyped-call]
    layer.register_load_state_dict_pre_hook(_cut_state)  # type: ignore[no-untyped-call]


def _join_state(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace the tiles in a state dict by the whole weight, before the bias."""
    assert isinstance(layer, CutLayer)
    bias = state.pop(f"{prefix}bias", None)
    parts = [state.pop(f"{prefix}tiles.{number}.weight") for number in range(len(layer.tiles))]
    state[f"{prefix}weight"] = torch.cat(parts)
    if bias is not None:
        state[f"{prefix}bias"] = bias


def _cut_state(layer: nn.Module, state: dict[str, Any], prefix: str, *details: Any) -> None:
    """Replace a whole weight by its tiles in torch's own copy of a state dict."""
    assert isinstance(layer, CutLayer)
    value = state.get(f"{prefix}weight")
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == layer.places[-1]:
        del state[f"{prefix}weight"]
        for number, (low, high) in enumerate(pairwise(layer.places)):
            state[f"{prefix}tiles.{number}.weight"] = value[low:high]
