"""A linear operator larger than memory: cut into tiles, each a unit of its own, gathered and
released one by one.

Owns `TiledLinear`, DeepSpeed's name and arguments.  auto_wrap_policy.py reads `children_are_units`;
everything else about its tiles is what every unit has, so they are sharded, offloaded, updated and
saved like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base.errors import UsageError


class TiledLinear(nn.Module):
    """nn.Linear as a grid of smaller ones: out_splits rows of in_splits tiles, as even as it goes.

    (..., in_features) -> (..., out_features).  Each output tile is the sum of its row, in the order
    of the input tiles, and gets its bias once, with the last of them.

    input_is_already_split: the input is a sequence of in_splits tensors.  combine_out_splits: False
    returns the list of
    output tiles.  linear_cls: what a tile is; called with (in_features, out_features, bias=...,
    **kwargs) and returning
    one tensor.  init_linear: a linear whose values to copy.  Raises UsageError on what does not
    fit.

    Tiles are `linears[row][column]`.  At stage 3 with stage3_max_live_parameters=0 one of them is
    gathered at a time; by default the next one comes ahead, and what fits stays from forward to
    backward.
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
                # Before it is registered, which is when zero.Init cuts it
                if init_linear is not None:
                    _copy(init_linear, tile, rows, columns)
                row.append(tile)
            self.linears.append(row)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        inputs = self._split(input_)
        if self.combine_out_splits:
            return run_tiles(self._rows(), inputs, self.out_features)
        widths = (high - low for low, high in pairwise(self.out_parts))
        return [
            run_tiles([row], inputs, width) for row, width in zip(self._rows(), widths, strict=True)
        ]

    def copy_params_from(self, other: nn.Module) -> None:
        """Take the values of a linear of the same shape.  Of sharded tiles: inside
        GatheredParameters.
        """
        self._refuse_other(other)
        for rows, row in zip(pairwise(self.out_parts), self._rows(), strict=True):
            for columns, tile in zip(pairwise(self.in_parts), row, strict=True):
                _copy(other, tile, rows, columns)

    def _rows(self) -> Iterator[nn.ModuleList]:
        for row in self.linears:
            assert isinstance(row, nn.ModuleList)
            yield row

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _split(self, given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """The input tiles: views."""
        widths = [high - low for low, high in pairwise(self.in_parts)]
        parts = [given] if isinstance(given, Tensor) else list(given)
        found = [part.shape[-1] for part in parts]
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
        """Raise where a linear's values do not fit."""
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
    """A tile of an nn.Linear; its values are drawn as the whole one's: from the whole one's number
    of inputs.
    """

    def __init__(self, in_features: int, out_features: int, *, fan_in: int, **kwargs: Any) -> None:
        self.fan_in = fan_in  # first, since the values are drawn within
        super().__init__(in_features, out_features, **kwargs)

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.fan_in)
        for param in self.parameters(recurse=False):
            nn.init.uniform_(param, -bound, bound)


class _Put(torch.autograd.Function):
    """Writes a tile's output to its place in the whole, or adds it there.

    Side by side afterwards (torch.cat) all tiles would stand there twice; slices assigned in place
    would have autograd copy the whole gradient for each of them.  Every place has one writer that
    does not add, and it comes first.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, tile: Tensor, start: int, add: bool) -> Tensor:
        ctx.start = start
        ctx.width = tile.shape[-1]
        place = whole.narrow(-1, start, ctx.width)
        place.add_(tile) if add else place.copy_(tile)
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        return grad, grad.narrow(-1, ctx.start, ctx.width), None, None


def run_tiles(
    rows: Iterable[Iterable[Callable[[Tensor], Tensor]]], inputs: Sequence[Tensor], features: int
) -> Tensor:
    """(..., features): the rows' sums side by side."""
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
            whole = _Put.apply(whole, found, start, number > 0)  # type: ignore[no-untyped-call]
            del found  # or it stands beside the next one
        start = stop
    assert whole is not None
    return whole


def _cuts(side: str, features: int, splits: int) -> list[int]:
    """Where a side is cut, ends included; the first tiles are one larger where it does not
    divide.
    """
    if not isinstance(splits, int) or not 1 <= splits <= features:
        raise UsageError(
            f"a TiledLinear of {side}_features={features} cannot have {side}_splits={splits}.",
            "Every tile has at least one feature.",
            f"choose {side}_splits between 1 and {features}.",
        )
    size, larger = divmod(features, splits)
    return [number * size + min(number, larger) for number in range(splits + 1)]


def _copy(
    other: nn.Module, tile: nn.Module, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """A tile's part of a linear's values."""
    with torch.no_grad():
        tile.get_parameter("weight").copy_(
            other.get_parameter("weight")[slice(*rows), slice(*columns)]
        )
        if getattr(tile, "bias", None) is not None:
            tile.get_parameter("bias").copy_(other.get_parameter("bias")[slice(*rows)])
