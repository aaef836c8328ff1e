"""The rows of a whole parameter that are in a tile, as data.

A layer that is cut by rows (extensions/cut_layers.py) has several parameters in place of one.
Checkpoints contain the whole parameter. A tile is a contiguous range of its elements, because rows
are the first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from .layout import Shape


@dataclass(frozen=True)
class Rows:
    """The rows of a large parameter that one part (tile) of a cut layer holds.

    Attributes:
        name: The first name of the whole parameter in the whole model.
        shape: The shape of the whole parameter.
        first: The first row of the tile.
    """

    name: str
    shape: Shape
    first: int

    @property
    def start(self) -> int:
        """The number of elements of the whole parameter before these rows."""
        return self.first * prod(self.shape[1:])


def rows_of(param: Tensor) -> Rows | None:
    """Return which rows of a large parameter this parameter holds; None if it was not cut."""
    found: Rows | None = param.__dict__.get("_zero_rows")
    return found


def set_rows(param: Tensor, rows: Rows) -> None:
    """Record on a parameter which rows of a large, cut parameter it holds.

    Args:
        param: The parameter that holds the rows.
        rows: Which rows it holds, and the shape of the whole parameter.
    """
    param.__dict__["_zero_rows"] = rows
