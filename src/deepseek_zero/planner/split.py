"""Where a parameter's elements are along the tensor-parallel axis, as data.

    split     each rank holds ranges of one dimension; ranks may share a range (a kv head)
    equal     every rank holds all of it, and computes the same gradient
    partial   every rank holds all of it, and computes a summand of its gradient

Names and shapes are the whole model's: a parameter of the model that one rank runs has
`local_shape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ..base.errors import UsageError
from .layout import Shape

Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Split:
    """One parameter over the ranks of the axis "tp".

    shape: of the whole parameter.  ranges: by coordinate, the [start, stop) of dimension `dim` that
    a rank holds, in the order they lie in there; the whole of it unless it is split.
    """

    kind: Literal["split", "equal", "partial"]
    shape: Shape
    dim: int = 0
    ranges: tuple[Ranges, ...] = ()

    @classmethod
    def even(cls, shape: Shape, dim: int, ranks: int, blocks: int = 1) -> Split:
        """Return a split of each of `blocks` equal blocks (3 of a fused q, k, v) into as many equal
        parts as ranks.
        """
        block = shape[dim] // blocks
        part = block // ranks
        starts = [
            [number * block + rank * part for number in range(blocks)] for rank in range(ranks)
        ]
        return cls(
            "split", shape, dim, tuple(tuple((low, low + part) for low in each) for each in starts)
        )

    @classmethod
    def whole(cls, kind: Literal["equal", "partial"], shape: Shape, ranks: int) -> Split:
        """Return a parameter that every rank holds."""
        ranges = ((0, shape[0]),) if shape else ()
        return cls(kind, shape, 0, (ranges,) * ranks)

    def local_shape(self, coordinate: int) -> Shape:
        """The shape of what one rank holds."""
        if self.kind != "split":
            return self.shape
        width = sum(stop - start for start, stop in self.ranges[coordinate])
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def sharers(self, coordinate: int) -> tuple[int, ...]:
        """The coordinates that hold the same part of a split, ascending, this one among them."""
        return tuple(
            other for other, ranges in enumerate(self.ranges) if ranges == self.ranges[coordinate]
        )

    def summands(self, coordinate: int, ranks: int) -> tuple[int, ...]:
        """The coordinates whose gradients are summands of one: that share a part of a split, or a
        partial parameter.

        () where a rank's own gradient is the whole one.  ranks: along "tp".
        """
        if self.kind == "equal":
            return ()
        found = self.sharers(coordinate) if self.kind == "split" else tuple(range(ranks))
        return found if len(found) > 1 else ()

    def shares_evenly(self, ranks: int) -> bool:
        """Whether neighbours share summands in blocks of one size, as communicators of them are
        made.
        """
        blocks = [self.summands(coordinate, ranks) or (coordinate,) for coordinate in range(ranks)]
        size = len(blocks[0])
        return all(
            block == tuple(range(place // size * size, place // size * size + size))
            for place, block in enumerate(blocks)
        )

    def is_counted_at(self, coordinate: int) -> bool:
        """Whether this rank's elements count in norms, tables and checkpoints: others that hold
        them do not.
        """
        return (
            self.sharers(coordinate)[0] == coordinate if self.kind == "split" else coordinate == 0
        )


def laid_out(parts: Iterable[Sequence[int]]) -> tuple[Ranges, ...]:
    """Return where ranks' shares lie in a dimension, by rank: parts one behind the other, in each
    the shares of all.

    parts: the widths of each part's shares, by rank.
    """
    ranges: list[list[tuple[int, int]]] = []
    start = 0
    for widths in parts:
        ranges = ranges or [[] for _ in widths]
        for own, width in zip(ranges, widths, strict=True):
            own.append((start, start + width))
            start += width
    return tuple(map(tuple, ranges))


def split_of(param: Tensor) -> Split | None:
    """Return how a parameter lies along "tp"; None where the model is not split."""
    found: Split | None = param.__dict__.get("_zero_split")
    return found


def is_copy(param: Tensor) -> bool:
    """Whether another stage's parameter is the one that counts in norms and checkpoints: this one
    is tied to it.
    """
    return bool(param.__dict__.get("_zero_is_copy"))


def set_copy(param: Tensor) -> None:
    """Remember that an earlier stage of the pipeline has this parameter too."""
    param.__dict__["_zero_is_copy"] = True


def set_split(param: Tensor, split: Split) -> None:
    """Remember how a parameter lies along "tp"; its data is this rank's part."""
    param.__dict__["_zero_split"] = split


def is_own_cut(param: Tensor) -> bool:
    """Whether a caller cut this parameter, and its layer computes with the part by itself: it is
    not cut again.
    """
    return bool(param.__dict__.get("_zero_is_own_cut"))


def came_cut(model: nn.Module) -> dict[str, Split]:
    """Return how those parameters lie that a caller cut before: of layers that compute with parts
    by themselves.
    """
    return {
        name: split
        for name, param in model.named_parameters()
        if is_own_cut(param) and (split := split_of(param)) is not None
    }


def refuse_other_cuts(cuts: Mapping[str, Split], tp: int) -> None:
    """Raise UsageError where a parameter lies in another number of parts than a mesh has ranks
    along "tp".
    """
    for name, split in cuts.items():
        if len(split.ranges) != tp:
            raise UsageError(
                f"parameter '{name}' came cut into {len(split.ranges)} parts, and this mesh has "
                f"tp={tp}.",
                "A layer that is cut before its model is wrapped is cut over the ranks along tp.",
                f'say "tensor_parallel": {{"autotp_size": {len(split.ranges)}}}, or make it of '
                "the group along tp.",
            )


def set_own_cut(param: Tensor, split: Split) -> None:
    """Remember how a caller cut a parameter, before its model is wrapped; its data is this rank's
    part.
    """
    set_split(param, split)
    param.__dict__["_zero_is_own_cut"] = True
