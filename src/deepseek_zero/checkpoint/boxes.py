"""Where the elements of a part of a parameter are in the whole one: arithmetic on boxes, and copies
between parts.

A rank's part of a parameter (planner/split.py) has its elements in memory, and in files, in its own
order: flat, as if the part were the tensor.  A range of that order is a few boxes of the whole
parameter, and what two parts share is the intersections of their boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..planner.layout import Shape
from ..planner.split import Ranges, Split

FlatBox = tuple[Shape, Shape, int]  # offset, size, flat start
READ_NUMEL = 1 << 24  # elements that are read at once

PlacedValues = Iterator[tuple[int, Tensor]]  # (position, flat values)
# Of the elements [start, stop) of something
FlatRead = Callable[[int, int], Iterable[tuple[int, Tensor]]]


@dataclass(frozen=True)
class ParamPart:
    """Of a parameter of that shape these ranges of dimension `dim`, one after another, and all of
    its other dimensions.

    A range may end behind the parameter: what is beyond is padding, which only this part has.
    """

    shape: Shape
    dim: int
    ranges: Ranges

    @classmethod
    def of(cls, split: Split | None, coordinate: int) -> ParamPart | None:
        """Return what the rank at a coordinate along "tp" holds; None where that is the whole
        parameter.
        """
        if (
            split is None
            or split.kind != "split"
            or split.ranges[coordinate] == ((0, split.shape[split.dim]),)
        ):
            return None
        return cls(split.shape, split.dim, split.ranges[coordinate])

    @classmethod
    def whole(cls, shape: Shape) -> ParamPart:
        """Return the part that is a whole parameter of that shape."""
        ranges = ((0, shape[0]),) if shape else ()
        return cls(shape, 0, ranges)

    @property
    def local_shape(self) -> Shape:
        """The shape of the part, padding included."""
        if not self.shape:
            return ()
        width = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """The number of its elements, padding included."""
        return prod(self.local_shape)

    def __str__(self) -> str:
        return (
            " and ".join(f"[{start}, {stop})" for start, stop in self.ranges)
            + f" of dimension {self.dim}"
        )

    def to_json(self) -> list[Any]:
        """Return the part as a manifest has it."""
        return [list(self.shape), self.dim, [list(each) for each in self.ranges]]

    @classmethod
    def from_json(cls, values: list[Any]) -> ParamPart:
        """Return the part that a manifest has."""
        shape, dim, ranges = values
        return cls(tuple(shape), dim, tuple((start, stop) for start, stop in ranges))


@dataclass(frozen=True)
class Box:
    """Elements [low, high) of a whole parameter, by dimension.  at, strides: where they are in a
    range of a part.
    """

    low: Shape
    high: Shape
    at: int
    strides: Shape

    @property
    def size(self) -> Shape:
        return tuple(high - low for low, high in zip(self.low, self.high, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.size)

    def place(self, corner: Shape) -> int:
        """Return where an element of the whole parameter is in that range."""
        steps = zip(corner, self.low, self.strides, strict=True)
        return self.at + sum((here - low) * stride for here, low, stride in steps)


def boxes_of(part: ParamPart, start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of a part, in its own order, as boxes of the whole parameter;
    padding is left out.

    At most 2d - 1 for each of its ranges, in d dimensions.
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
        last = offset[dim] + size[dim]
        reached = 0
        for low, high in part.ranges:
            begin = max(first, reached)
            end = min(last, reached + high - low)
            lower = low + begin - reached
            upper = min(low + end - reached, part.shape[dim])
            if lower < upper:
                corner = (*offset[:dim], lower, *offset[dim + 1 :])
                beyond = tuple(at + many for at, many in zip(offset, size, strict=True))
                opposite = (*beyond[:dim], upper, *beyond[dim + 1 :])
                found.append(
                    Box(corner, opposite, flat - start + (begin - first) * strides[dim], strides)
                )
            reached += high - low
    return found


def first_gap(parts: Sequence[ParamPart]) -> int | None:
    """Return the first index, of the dimension that parts of one parameter are cut along, that none
    of them has.
    """
    dim = parts[0].dim
    reached = 0
    for start, stop in sorted(each for part in parts if part.dim == dim for each in part.ranges):
        if start <= reached:
            reached = max(reached, stop)
    return reached if reached < parts[0].shape[dim] else None


def copy_shared(
    target: Tensor, to: Iterable[Box], source: Tensor, of: Iterable[Box], filled: Tensor
) -> None:
    """Copy what two sets of boxes share from one flat tensor to another; `filled` becomes true
    there.
    """
    sources = list(of)
    for here in to:
        for there in sources:
            low = tuple(map(max, here.low, there.low))
            high = tuple(map(min, here.high, there.high))
            size = tuple(end - begin for begin, end in zip(low, high, strict=True))
            if min(size, default=1) > 0:
                values = _strided(source, size, there.strides, there.place(low))
                _strided(target, size, here.strides, here.place(low)).copy_(values)
                _strided(filled, size, here.strides, here.place(low)).fill_(True)


def read_part(part: ParamPart, start: int, stop: int, read: FlatRead) -> PlacedValues:
    """Yield (position, flat values) of the elements [start, stop) of a part, with zeros for padding
    among them.

    read: yields elements of the whole parameter, flat, in order and without gaps.
    """
    whole_strides = _strides(part.shape)
    for low in range(start, stop, READ_NUMEL):
        high = min(stop, low + READ_NUMEL)
        into = torch.empty(0)
        for box in boxes_of(part, low, high):
            first = sum(at * stride for at, stride in zip(box.low, whole_strides, strict=True))
            last = sum(
                (at - 1) * stride for at, stride in zip(box.high, whole_strides, strict=True)
            )
            found = [values.reshape(-1) for _, values in read(first, last + 1)]
            values = found[0] if len(found) == 1 else torch.cat(found)
            if not into.numel():
                into = torch.zeros(high - low, dtype=values.dtype)
            _strided(into, box.size, box.strides, box.at).copy_(
                _strided(values, box.size, whole_strides, 0)
            )
        if into.numel():
            yield low, into


def _strides(shape: Shape) -> Shape:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _strided(flat: Tensor, size: Shape, strides: Shape, at: int) -> Tensor:
    return flat.as_strided(size, strides, flat.storage_offset() + at)


def flat_boxes(shape: Shape, start: int, stop: int) -> list[FlatBox]:
    """Flat [start, stop) of a C-order tensor as axis-aligned boxes (offset, size, flat start), each
    element once.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), (), start)]
    row = prod(shape[1:])
    first = start // row
    last = (stop - 1) // row
    if start % row == 0 and stop % row == 0:
        offset = (first, *[0] * (len(shape) - 1))
        size = ((stop - start) // row, *shape[1:])
        return [(offset, size, start)]
    if first == last:  # inside one row: describe it one dimension down
        place = first * row
        inner = flat_boxes(shape[1:], start - place, stop - place)
        return [((first, *offset), (1, *size), place + flat) for offset, size, flat in inner]
    head = min(stop, -(-start // row) * row)
    tail = max(head, stop // row * row)
    return (
        flat_boxes(shape, start, head)
        + flat_boxes(shape, head, tail)
        + flat_boxes(shape, tail, stop)
    )
