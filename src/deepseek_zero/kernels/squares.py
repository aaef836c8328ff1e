"""Sums of squares of flat tensors on the CPU or an accelerator, in one pass over memory.

An accelerator computes norms of parts in float64. They are read together, so that the CPU waits for
the accelerator only once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.device import double_norms
from .sums import sum_of_squares

# A sum of squares, or parts of a tensor on an accelerator and norms of other parts: 1- and
# 0-dimensional tensors, from which `read_squares` computes the sum.
Squares = float | list[Tensor]

_TILE_NUMEL = 1 << 24  # elements; for norms on an accelerator


def squares_of_parts(
    parts: Sequence[tuple[Tensor, int]], device: torch.device, threads: int
) -> Squares:
    """Return the sum of squares of several flat tensors.

    The tensors must not change before `read_squares` has read the result.

    Args:
        parts: The tensors, each with the index of its first element in the flat layout.
        device: The device that computes the sum.
        threads: The largest number of threads on a CPU.
    """
    if device.type == "cpu":
        return sum((sum_of_squares(part, place, threads) for part, place in parts), 0.0)
    return [tile for part, _ in parts for tile in _tiles_of(part)]


def norms_of(values: Tensor) -> list[Tensor]:
    """Queue the norms of the parts of a flat tensor on the accelerator.

    Work that is queued later may overwrite the tensor.
    """
    return double_norms(_tiles_of(values)) if values.numel() else []


def _tiles_of(values: Tensor) -> list[Tensor]:
    return list(values.split(_TILE_NUMEL)) if values.numel() else []


def read_squares(found: Sequence[Sequence[Squares]]) -> list[list[float]]:
    """Return sums of squares as numbers; wait for an accelerator at most once.

    Args:
        found: Lists of sums of squares.

    Returns:
        The same lists, with a number for each sum.
    """
    queued = [each for squares in found for each in squares if isinstance(each, list)]
    parts = [part for each in queued for part in each]
    tiles = [part for part in parts if part.dim()]
    computed = iter(double_norms(tiles) if tiles else ())
    norms = [next(computed) if part.dim() else part for part in parts]
    read = iter(torch.stack(norms).tolist() if norms else ())

    def number_of(squares: Squares) -> float:
        if not isinstance(squares, list):
            return squares
        return sum((norm * norm for norm in itertools.islice(read, len(squares))), 0.0)

    return [[number_of(each) for each in squares] for squares in found]
