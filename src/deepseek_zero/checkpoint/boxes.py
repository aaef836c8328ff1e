"""Compute which elements of a parameter belong to a part, and copy between parts.

A part of a parameter (planner/split.py) stores its elements flat in its own order, as if the part
were the tensor. A range of that order is a few boxes of the whole parameter. The elements that two
parts share are the intersections of their boxes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..base.quantities import ceil_div
from ..planner.layout import Shape
from ..planner.split import Ranges, Split

FlatBox = tuple[Shape, Shape, int]  # offset, size, flat start
READ_NUMEL = 1 << 24  # elements that are read at a time

PlacedValues = Iterator[tuple[int, Tensor]]  # (position, flat values)


@dataclass(frozen=True)
class ParamPart:
    """A part of a parameter: ranges of one dimension, and all of the other dimensions.

    A range may end beyond the parameter. The elements beyond it are padding, which only this part
    has.

    Attributes:
        shape: Shape of the whole parameter.
        dim: The dimension that is divided.
        ranges: The ranges [start, stop) of that dimension, in the order of the part.
    """

    shape: Shape
    dim: int
    ranges: Ranges

    @classmethod
    def of(cls, split: Split | None, coordinate: int) -> ParamPart | None:
        """Return the part that the tensor-parallel rank at a coordinate holds.

        Args:
            split: How the parameter is divided.
            coordinate: Coordinate of the rank along the mesh axis "tp".

        Returns:
            The part, or None if it is the whole parameter.
        """
        if split is None or split.kind != "split":
            return None
        ranges = split.ranges[coordinate]
        if ranges == ((0, split.shape[split.dim]),):
            return None
        return cls(split.shape, split.dim, ranges)

    @classmethod
    def whole(cls, shape: Shape) -> ParamPart:
        """Return the part that contains a whole parameter of the given shape."""
        ranges = ((0, shape[0]),) if shape else ()
        return cls(shape, 0, ranges)

    @property
    def local_shape(self) -> Shape:
        """Return the shape of the part, including padding."""
        if not self.shape:
            return ()
        width = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Return the number of elements, including padding."""
        return prod(self.local_shape)

    def __str__(self) -> str:
        ranges = " and ".join(f"[{start}, {stop})" for start, stop in self.ranges)
        return f"{ranges} of dimension {self.dim}"

    def to_json(self) -> list[Any]:
        """Return the part in the form that a manifest stores."""
        return [list(self.shape), self.dim, [list(each) for each in self.ranges]]

    @classmethod
    def from_json(cls, values: list[Any]) -> ParamPart:
        """Return the part that a manifest stores as `values`."""
        shape, dim, ranges = values
        return cls(tuple(shape), dim, tuple((start, stop) for start, stop in ranges))


@dataclass(frozen=True)
class Box:
    """An axis-aligned box of a whole parameter.

    Attributes:
        low: First index of each dimension.
        high: End of each dimension.
        at: Position of the first element within a range of a part.
        strides: Strides of the dimensions within that range.
    """

    low: Shape
    high: Shape
    at: int
    strides: Shape

    @property
    def size(self) -> Shape:
        """Return the number of elements of the box along each dimension."""
        return tuple(high - low for low, high in zip(self.low, self.high, strict=True))

    @property
    def numel(self) -> int:
        """Return the number of elements that the box contains."""
        return prod(self.size)

    def place(self, corner: Shape) -> int:
        """Return the position of an element of the parameter within the range."""
        steps = zip(corner, self.low, self.strides, strict=True)
        return self.at + sum((here - low) * stride for here, low, stride in steps)


def boxes_of(part: ParamPart, start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of a part as boxes of the whole parameter.

    Padding is omitted. In d dimensions there are at most 2d - 1 boxes for each range of the part.

    Args:
        part: Part of a parameter, in whose order elements are counted.
        start: First element, in the order of the part.
        stop: Index after the last element of the range.

    Returns:
        The boxes, in the order of their elements. Together they contain every element of the range
        once.
    """
    shape = part.local_shape
    dim = part.dim
    strides = _strides(shape)
    found = []
    for offset, size, flat in flat_boxes(shape, start, stop):
        if not shape:
            found.append(Box((), (), flat - start, ()))
            continue
        first = offset[dim]
        beyond = [at + many for at, many in zip(offset, size, strict=True)]
        reached = 0  # Length of the previous ranges
        for low, high in part.ranges:
            begin = max(first, reached)
            end = min(beyond[dim], reached + high - low)
            lower = low + begin - reached
            upper = min(low + end - reached, part.shape[dim])
            if lower < upper:
                corner = (*offset[:dim], lower, *offset[dim + 1 :])
                opposite = (*beyond[:dim], upper, *beyond[dim + 1 :])
                position = flat - start + (begin - first) * strides[dim]
                found.append(Box(corner, opposite, position, strides))
            reached += high - low
    return found


def first_gap(parts: Sequence[ParamPart]) -> int | None:
    """Return the first index of the divided dimension that no part contains, if any."""
    dim = parts[0].dim
    reached = 0
    for start, stop in sorted(each for part in parts if part.dim == dim for each in part.ranges):
        if start <= reached:
            reached = max(reached, stop)
    return reached if reached < parts[0].shape[dim] else None


SavedPart = tuple[ParamPart, int, Tensor]  # a part, a position in its order, flat values


def assemble(
    part: ParamPart,
    start: int,
    stop: int,
    sources: Iterable[SavedPart],
    missing: Exception | None = None,
) -> PlacedValues:
    """Yield the elements [start, stop) of a part from ranges of any parts of the parameter.

    Padding is filled with zeros.

    Args:
        part: Part of a parameter, in whose order elements are counted.
        start: First element, in the order of the part.
        stop: Index after the last element of the range.
        sources: The ranges that are available, at least one.
        missing: The error to raise if elements are in no source.

    Yields:
        Pairs of position and flat values in new memory.
    """
    known = []
    for source, first, values in sources:
        known.append((values, boxes_of(source, first, first + values.numel())))
    for low in range(start, stop, READ_NUMEL):
        high = min(stop, low + READ_NUMEL)
        wanted = boxes_of(part, low, high)
        target = torch.zeros(high - low, dtype=known[0][0].dtype, device="cpu")
        filled = torch.zeros(high - low, dtype=torch.bool, device="cpu")
        for values, boxes in known:
            for here, there in itertools.product(wanted, boxes):
                # The intersection of the two boxes
                corner = tuple(map(max, here.low, there.low))
                opposite = tuple(map(min, here.high, there.high))
                size = tuple(map(operator.sub, opposite, corner))
                if min(size, default=1) > 0:
                    shared = _strided(values, size, there.strides, there.place(corner))
                    position = here.place(corner)
                    _strided(target, size, here.strides, position).copy_(shared)
                    _strided(filled, size, here.strides, position).fill_(True)
        if missing is not None and int(filled.sum()) != sum(box.numel for box in wanted):
            raise missing
        yield low, target


def _strides(shape: Shape) -> Shape:
    """Return the strides of a C-order tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _strided(flat: Tensor, size: Shape, strides: Shape, at: int) -> Tensor:
    """Return a view of a flat tensor as a box that begins at an element."""
    return flat.as_strided(size, strides, flat.storage_offset() + at)


def flat_boxes(shape: Shape, start: int, stop: int) -> list[FlatBox]:
    """Divide elements [start, stop) of a C-order tensor into axis-aligned boxes.

    Args:
        shape: Shape of the tensor.
        start: First element.
        stop: Index after the last element of the range.

    Returns:
        Triples of offset, size and flat start; each element is in exactly one box.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), (), start)]
    row = prod(shape[1:])

    def inside(index: int, low: int, high: int) -> list[FlatBox]:
        """Divide elements [low, high) of one row."""
        inner = flat_boxes(shape[1:], low, high)
        return [((index, *offset), (1, *size), index * row + flat) for offset, size, flat in inner]

    first = ceil_div(start, row)  # the whole rows are [first, last)
    last = stop // row
    if first > last:
        return inside(last, start - last * row, stop - last * row)
    found = inside(first - 1, start - (first - 1) * row, row)
    if first < last:
        offset = (first, *[0] * (len(shape) - 1))
        found.append((offset, (last - first, *shape[1:]), first * row))
    return found + inside(last, 0, stop - last * row)
