"""Which rows of a whole parameter a tile is, as data.

A layer that is cut by rows (extensions/cut_layers.py) has several parameters where the whole model
has one.  Files speak
of the whole one: a tile is a range of its elements, since rows are the first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from .layout import Shape


@dataclass(frozen=True)
class Rows:
    """The rows from `first` on of a parameter.  name: its first name in the whole model.  shape:
    its whole shape.
    """

    name: str
    shape: Shape
    first: int

    @property
    def start(self) -> int:
        """The elements of the whole parameter that come before these rows."""
        return self.first * prod(self.shape[1:])


def rows_of(param: Tensor) -> Rows | None:
    """Return which rows of a whole parameter this one is; None where it is whole."""
    found: Rows | None = param.__dict__.get("_zero_rows")
    return found


def set_rows(param: Tensor, rows: Rows) -> None:
    """Remember which rows of a whole parameter this one is."""
    param.__dict__["_zero_rows"] = rows
