"""Norms of sharded gradients. They are sums of squares in float64, one per group and slice, so that
every stage and every rank finds the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base.device import CPU, double_norms
from ..kernels.sums import sum_of_squares as squares_on_cpu
from .group import Group

_TILE_NUMEL = 1 << 24  # on an accelerator


def squares_now(group: Group, values: Tensor, first: int) -> float:
    """Return the sum of squares of elements [first, ...) of a group's layout."""
    found = slice_squares(group, values, first)
    if isinstance(found, float):
        return found
    (read,) = squares_on_accelerator([found])
    return read


def norm_summand(own: Tensor, order: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return one rank's summand of a norm, and the function that combines the ranks' summands.

    Args:
        own: The absolute values of this rank's elements, in float64.
        order: The order of the norm.
    """
    if order == float("inf"):
        return own.max() if own.numel() else own.new_zeros(()), torch.max
    if order == -float("inf"):
        return own.min() if own.numel() else own.new_full((), float("inf")), torch.min
    return (own != 0).double().sum() if order == 0.0 else own.pow(order).sum(), torch.sum


def slice_squares(group: Group, values: Tensor, first: int) -> float | list[Tensor]:
    """Return the sum of squares of those elements [first, ...) of the layout that the optimizer
    updates; if an accelerator updates them, return these elements.

    The device of the update computes it, so that every stage finds the same bits.
    """
    assert group.master is not None
    device = group.master.update_device
    if values.device != device and device == CPU:
        values = group.comm_ctx.copy_engine.to_host(values)
    parts = [(values, first)]
    if group.not_updated:
        parts = []
        last = first + values.numel()
        for start, stop in group.updated_ranges():
            low = max(start, first)
            high = min(stop, last)
            if low < high:
                parts.append((values[low - first : high - first], low))
    if device.type == "cpu":
        threads = group.comm_ctx.comm.threads
        return sum((squares_on_cpu(part, place, threads) for part, place in parts), 0.0)
    return [part for part, _ in parts]


def squares_on_accelerator(slices: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return the sum of squares of each of these slices, given as parts. The host waits once.

    Sums in float64 differ so little by their order that a factor of fp32, made of the norm, is that
    of a CPU. The norms of tiles are one pass over memory on a GPU.
    """
    tiles = [
        [tile for part in parts if part.numel() for tile in part.split(_TILE_NUMEL)]
        for parts in slices
    ]
    together = [tile for own in tiles for tile in own]
    norms = iter(torch.stack(double_norms(together)).tolist() if together else ())
    return [sum(norm * norm for norm in itertools.islice(norms, len(own))) for own in tiles]
