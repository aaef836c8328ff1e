"""`TiledLinear`: a linear layer cut into tiles, each of which is a unit.

Tiles are gathered and released one by one, so the layer may be larger than memory.
`auto_wrap_policy.py` reads `children_are_units`. Otherwise tiles are sharded, offloaded, updated
and saved like any unit. Class and arguments have the names of DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base.errors import UsageError
from ..base.given import whole_number


class TiledLinear(nn.Module):
    """A linear layer that consists of a grid of smaller linear layers (tiles).

    The grid has `out_splits` rows of `in_splits` tiles of nearly equal size. Each part of the
    output is the sum over the tiles of one row, in the order of the input parts. The last tile of a
    row adds the bias.

    Tiles are ``linears[row][column]``. At stage 3 with ``stage3_max_live_parameters=0``, one tile
    is gathered at a time. By default the next tile is prefetched, and tiles stay gathered from
    forward to backward if they fit into this limit of live parameters.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        bias: Whether to add a bias.
        in_splits: Number of tiles along the input features.
        out_splits: Number of tiles along the output features.
        input_is_already_split: Whether the input is a sequence of `in_splits` tensors.
        combine_out_splits: Whether the forward returns one tensor. If false, it returns the list of
            the output parts.
        linear_cls: The class of a tile. It is called with ``(in_features, out_features, bias=...,
            **kwargs)``, and its forward returns one tensor. If it is nn.Linear, the tiles are
            initialized with the bounds that nn.Linear uses for the whole layer.
        init_linear: A linear layer from which weight and bias are copied into the tiles. None
            leaves the initial values of the tiles.
        kwargs: Further arguments of `linear_cls`.

    Raises:
        UsageError: A number of features is not a positive integer, a number of splits is not an
            integer between 1 and the number of features, or the shape or bias of `init_linear` does
            not match.
    """

    children_are_units: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _cuts("in", in_features, in_splits)
        self.out_parts = _cuts("out", out_features, out_splits)
        if init_linear is not None:
            self._refuse_other(init_linear)
        make = partial(Tile, fan_in=in_features) if linear_cls is nn.Linear else linear_cls
        self.linears = nn.ModuleList()
        for rows in pairwise(self.out_parts):
            row = nn.ModuleList()
            for columns in pairwise(self.in_parts):
                has_bias = bias and columns[1] == in_features
                tile = make(columns[1] - columns[0], rows[1] - rows[0], bias=has_bias, **kwargs)
                # Must precede registration, at which zero.Init shards the tile
                if init_linear is not None:
                    _copy(init_linear, tile, rows, columns)
                row.append(tile)
            self.linears.append(row)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Compute the linear layer tile by tile.

        Args:
            input_: The input, shape ``(..., in_features)``. If `input_is_already_split` is true,
                the sequence of its `in_splits` parts along the last dimension.

        Returns:
            The output, shape ``(..., out_features)``. If `combine_out_splits` is false, the list of
            its `out_splits` parts along the last dimension.

        Raises:
            UsageError: The number or the sizes of the inputs do not match.
        """
        inputs = self._split(input_)
        if self.combine_out_splits:
            return run_tiles(self._rows, inputs, self.out_features)
        widths = (high - low for low, high in pairwise(self.out_parts))
        return [
            run_tiles([row], inputs, width) for row, width in zip(self._rows, widths, strict=True)
        ]

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the weight and the bias of a linear layer into the tiles.

        If the tiles are sharded, call this method inside `GatheredParameters` with `modifier_rank`.
        The values of that rank are kept.

        Args:
            other: The linear layer from which the values are copied, with the same number of
                input and output features. Its parameters must not be sharded.

        Raises:
            UsageError: The shapes differ, or only one of the two layers has a bias.
        """
        self._refuse_other(other)
        for rows, row in zip(pairwise(self.out_parts), self._rows, strict=True):
            for columns, tile in zip(pairwise(self.in_parts), row, strict=True):
                _copy(other, tile, rows, columns)

    @property
    def _rows(self) -> list[nn.ModuleList]:
        return [row for row in self.linears if isinstance(row, nn.ModuleList)]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _split(self, given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the input tiles, as views."""
        widths = [high - low for low, high in pairwise(self.in_parts)]
        parts = [given] if isinstance(given, Tensor) else list(given)
        found = [part.shape[-1] if part.dim() else 0 for part in parts]
        wanted = widths if self.input_is_already_split else [self.in_features]
        if found != wanted:
            raise UsageError(
                f"a TiledLinear got an input of {found} features and takes {wanted}.",
                f"input_is_already_split is {self.input_is_already_split}, in_splits "
                f"{self.in_splits}.",
                "pass one tensor, or with input_is_already_split=True a sequence of them, cut at "
                "in_parts.",
            )
        return parts if len(parts) == len(widths) else parts[0].split(widths, dim=-1)

    def _refuse_other(self, other: nn.Module) -> None:
        """Raise UsageError if a linear layer's values do not fit."""
        weight = getattr(other, "weight", None)
        bias = getattr(other, "bias", None)
        shape = (self.out_features, self.in_features)
        if weight is None or tuple(weight.shape) != shape or (bias is not None) != self.use_bias:
            found = tuple(weight.shape) if weight is not None else "none"
            raise UsageError(
                f"a TiledLinear of weight {shape}, bias={self.use_bias} cannot take the values of "
                f"a layer of weight {found}, bias={bias is not None}.",
                "Every element is copied, and every element gets one.",
                "pass a linear of the same in_features, out_features and bias.",
            )


class Tile(nn.Linear):
    """A tile of an nn.Linear, initialized with the `fan_in` of the whole layer.

    Args:
        in_features: The number of input features of the tile.
        out_features: The number of output features of the tile.
        fan_in: The number of input features of the whole layer.
        kwargs: Further arguments of nn.Linear.
    """

    def __init__(self, in_features: int, out_features: int, *, fan_in: int, **kwargs: Any) -> None:
        self.fan_in = fan_in  # Set first, since the base class calls `reset_parameters`
        super().__init__(in_features, out_features, **kwargs)

    def reset_parameters(self) -> None:
        """Initialize the tile with the bounds that nn.Linear would use for the whole layer."""
        bound = 1 / math.sqrt(self.fan_in)
        for param in self.parameters(recurse=False):
            nn.init.uniform_(param, -bound, bound)


class Put(torch.autograd.Function):
    """Copy or add a tile's output to its columns of the whole output, with autograd.

    torch.cat would hold all tiles twice. With in-place assignment to slices, autograd would copy
    the whole gradient for each of them. The first tile of each range of columns is copied; the
    others are added to it.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, tile: Tensor, places: Any, add: bool) -> Tensor:
        ctx.places = places
        if add:
            whole[places].add_(tile)
        else:
            whole[places] = tile
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        return grad, grad[ctx.places], None, None


def run_tiles(
    rows: Iterable[Iterable[Callable[[Tensor], Tensor]]], inputs: Sequence[Tensor], features: int
) -> Tensor:
    """Run all tiles and return the concatenated outputs of their rows.

    Args:
        rows: The rows of tiles. The outputs of a row are summed.
        inputs: The input tiles, one per tile of a row.
        features: The size of the last dimension of the result.

    Returns:
        A tensor of shape ``(..., features)``.
    """
    whole: Tensor | None = None
    start = stop = 0
    for row in rows:
        for number, (tile, part) in enumerate(zip(row, inputs, strict=True)):
            found = tile(part)
            if len(inputs) == 1 and found.shape[-1] == features:
                return found  # the only tile
            if whole is None:
                whole = found.new_empty((*found.shape[:-1], features))
            stop = start + found.shape[-1]
            places = (..., slice(start, stop))
            whole = Put.apply(whole, found, places, number > 0)  # type: ignore[no-untyped-call]
            del found  # Free it before the next tile's output is made
        start = stop
    assert whole is not None
    return whole


def _cuts(side: str, features: int, splits: int) -> list[int]:
    """Return the boundaries of the tiles."""
    whole_number("TiledLinear", f"{side}_features", features, 1)
    if not isinstance(splits, int) or not 1 <= splits <= features:
        raise UsageError(
            f"a TiledLinear of {side}_features={features} cannot have {side}_splits={splits}.",
            "Every tile has at least one feature.",
            f"choose {side}_splits between 1 and {features}.",
        )
    return boundaries(features, splits)


def boundaries(rows: int, parts: int) -> list[int]:
    """Return the boundaries of nearly equal ranges.

    The first ranges are one element longer if the division has a remainder.

    Args:
        rows: The number of elements to divide.
        parts: The number of ranges.

    Returns:
        ``parts + 1`` numbers, from 0 to `rows`.
    """
    size, larger = divmod(rows, parts)
    return [number * size + min(number, larger) for number in range(parts + 1)]


def _copy(
    other: nn.Module, tile: nn.Module, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Copy a tile's part of a linear layer's values."""
    with torch.no_grad():
        tile.get_parameter("weight").copy_(
            other.get_parameter("weight")[slice(*rows), slice(*columns)]
        )
        if getattr(tile, "bias", None) is not None:
            tile.get_parameter("bias").copy_(other.get_parameter("bias")[slice(*rows)])
