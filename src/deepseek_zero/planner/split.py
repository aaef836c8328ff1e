"""How parameters are distributed along the tensor-parallel axis, as data.

    split     each rank holds ranges of one dimension; ranks may share a range (a kv head)
    equal     every rank holds all of it, and computes the same gradient
    partial   every rank holds all of it, and computes a summand of its gradient

Names and shapes are those of the whole model. The parameter of one rank has `local_shape`.
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
RangesOfRanks = tuple[Ranges, ...]


@dataclass(frozen=True)
class Split:
    """The distribution of one parameter over the ranks of the axis "tp".

    Attributes:
        kind: "split", "equal" (every rank holds the parameter and computes the whole gradient) or
            "partial" (every rank holds the parameter, and the gradients of the ranks must be
            added).
        shape: The shape of the whole parameter.
        dim: The dimension that is split.
        ranges: For each coordinate, the ranges [start, stop) of dimension `dim` that the rank
            holds, in the order of its part; all of it unless the parameter is split.
    """

    kind: Literal["split", "equal", "partial"]
    shape: Shape
    dim: int = 0
    ranges: RangesOfRanks = ()

    @classmethod
    def even(cls, shape: Shape, dim: int, ranks: int, blocks: int = 1) -> Split:
        """Return a split into equal parts.

        Args:
            shape: The shape of the whole parameter.
            dim: The dimension that is split.
            ranks: The number of ranks along "tp".
            blocks: The number of equal blocks that are each split (3 for a fused q, k, v).
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
        """Return the distribution of a parameter that every rank holds.

        Args:
            kind: "equal" if every rank computes the whole gradient, "partial" if the gradients of
                the ranks must be added.
            shape: The shape of the parameter.
            ranks: The number of ranks along "tp".
        """
        ranges = ((0, shape[0]),) if shape else ()
        return cls(kind, shape, 0, (ranges,) * ranks)

    @property
    def widths(self) -> list[int]:
        """The number of indices of dimension `dim` that each rank holds."""
        return [sum(stop - start for start, stop in ranges) for ranges in self.ranges]

    def local_shape(self, coordinate: int) -> Shape:
        """Return the shape of the part that the rank at this coordinate along "tp" holds."""
        if self.kind != "split":
            return self.shape
        width = self.widths[coordinate]
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def sharers(self, coordinate: int) -> tuple[int, ...]:
        """Return the coordinates along "tp" that hold the same part, ascending.

        Args:
            coordinate: The coordinate of a rank, which is part of the result.
        """
        return tuple(
            other for other, ranges in enumerate(self.ranges) if ranges == self.ranges[coordinate]
        )

    def summands(self, coordinate: int, ranks: int) -> tuple[int, ...]:
        """Return the coordinates along "tp" whose gradients of this parameter are added.

        The result is empty if a rank's own gradient is already complete.

        Args:
            coordinate: The coordinate of this rank along "tp".
            ranks: The number of ranks along "tp".
        """
        if self.kind == "equal":
            return ()
        found = self.sharers(coordinate) if self.kind == "split" else tuple(range(ranks))
        return found if len(found) > 1 else ()

    def shares_evenly(self, ranks: int) -> bool:
        """Return whether the ranks that add gradients form contiguous blocks of one size.

        Communicators can only be made of such blocks.
        """
        blocks = [self.summands(coordinate, ranks) or (coordinate,) for coordinate in range(ranks)]
        size = len(blocks[0])
        return all(
            block == tuple(range(place // size * size, place // size * size + size))
            for place, block in enumerate(blocks)
        )

    def is_counted_at(self, coordinate: int) -> bool:
        """Return whether the rank at a coordinate counts its elements in norms and checkpoints.

        If several ranks hold the same elements, only one of them counts them.

        Args:
            coordinate: The coordinate of the rank along "tp".
        """
        return (
            self.sharers(coordinate)[0] == coordinate if self.kind == "split" else coordinate == 0
        )


def laid_out(parts: Iterable[Sequence[int]]) -> RangesOfRanks:
    """Return the ranges of a dimension that each rank holds, from the sizes of its parts.

    Args:
        parts: For each part of the dimension, the number of consecutive indices that each rank
            holds.

    Returns:
        For each rank, its ranges [start, stop), one for each part.
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
    """Return how a parameter is split along "tp"; None if the model is not split."""
    found: Split | None = param.__dict__.get("_zero_split")
    return found


def is_copy(param: Tensor) -> bool:
    """Return whether the parameter is a copy of a tied parameter in another pipeline stage.

    Norms and checkpoints use only the other one.
    """
    return bool(param.__dict__.get("_zero_is_copy"))


def set_copy(param: Tensor) -> None:
    """Record that a parameter is a copy of a tied parameter in an earlier pipeline stage."""
    param.__dict__["_zero_is_copy"] = True


def set_split(param: Tensor, split: Split) -> None:
    """Record how a parameter is split along "tp".

    Args:
        param: The parameter; its data is this rank's part.
        split: How the whole parameter is distributed along "tp".
    """
    param.__dict__["_zero_split"] = split


def is_own_cut(param: Tensor) -> bool:
    """Return whether the user split this parameter along "tp" before the model was wrapped.

    Its layer computes with the part, so the parameter is not split again.
    """
    return bool(param.__dict__.get("_zero_is_own_cut"))


def came_cut(model: nn.Module) -> dict[str, Split]:
    """Return how the user has split parameters along "tp", by their full name."""
    return {
        name: split
        for name, param in model.named_parameters()
        if is_own_cut(param) and (split := split_of(param)) is not None
    }


def refuse_other_cuts(cuts: Mapping[str, Split], tp: int) -> None:
    """Raise an error if a parameter is split into a number of parts other than `tp`.

    Args:
        cuts: The splits by name of the parameter.
        tp: The number of ranks along "tp".

    Raises:
        UsageError: A parameter is split into another number of parts.
    """
    for name, split in cuts.items():
        if len(split.ranges) != tp:
            raise UsageError(
                f"parameter '{name}' is split into {len(split.ranges)} parts, but this mesh has "
                f"tp={tp}.",
                "A layer that is split before its model is wrapped must be split over the ranks "
                "of tp.",
                f'set "tensor_parallel": {{"autotp_size": {len(split.ranges)}}}, or split it with '
                "the group along tp.",
            )


def set_own_cut(param: Tensor, split: Split) -> None:
    """Record how the caller split a parameter, before its model is wrapped.

    Args:
        param: The parameter; its data is this rank's part.
        split: How the whole parameter is distributed along "tp".
    """
    set_split(param, split)
    param.__dict__["_zero_is_own_cut"] = True
