"""Norms of sharded gradients. They are sums of squares in float64, one per group and slice, so that
every stage and every rank finds the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.device import CPU, double_norms
from ..kernels.sums import sum_of_squares as squares_on_cpu
from .grad_sum import GradSum
from .group import Group, updated_ranges

_TILE_NUMEL = 1 << 24  # on an accelerator


def squares_now(group: Group, values: Tensor, first: int) -> float:
    """Return the sum of squares of elements [first, ...) of a group's layout."""
    found = slice_squares(group, values, first)
    if isinstance(found, float):
        return found
    (read,) = squares_on_accelerator([found])
    return read


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
        for start, stop in updated_ranges(group):
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
    read = torch.stack(double_norms(together)).tolist() if together else []
    norms = iter(read)
    return [sum(norm * norm for norm in itertools.islice(norms, len(own))) for own in tiles]


def squares_of(sums: Sequence[GradSum]) -> list[list[float]]:
    """Return the sums of squares of each group's slices, in rank order; 0.0 for slices that this
    rank does not hold. Local; the host waits for an accelerator once at most.
    """
    found = [_all_squares(each) for each in sums]
    unread = [squares for of_group in found for squares in of_group if isinstance(squares, list)]
    numbers = iter(squares_on_accelerator(unread))
    read = [
        [next(numbers) if isinstance(squares, list) else squares for squares in of_group]
        for of_group in found
    ]
    for each, before, own in zip(sums, found, read, strict=True):
        rank = each.group.comm_ctx.comm.rank
        if isinstance(before[rank], list) and not each.group.plan.sums_to_all:
            each.known_squares = own[rank]
    return read


def _all_squares(gradient: GradSum) -> list[float | list[Tensor]]:
    """Return the sum of squares of each slice, or, if an accelerator has to compute it, the
    slice's tensors.
    """
    group = gradient.group
    comm = group.comm_ctx.comm
    squares: list[float | list[Tensor]] = [0.0] * comm.size
    if gradient.known_squares is not None:
        squares[comm.rank] = gradient.known_squares
        return squares
    values = gradient.reduced()
    if values is None:
        return squares
    if group.plan.sums_to_all:
        first = 0
        for rank, part in enumerate(values.chunk(comm.size)):
            squares[rank] = slice_squares(group, part, first)
            first += part.numel()
        return squares
    found = slice_squares(group, values, group.layout.bounds(comm.rank)[0])
    squares[comm.rank] = found
    gradient.known_squares = found if isinstance(found, float) else None
    return squares
