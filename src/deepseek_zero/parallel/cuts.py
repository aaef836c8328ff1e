"""Split whole tensors into the parts of tensor-parallel ranks, and join them.

`cut` is for the weights of one rank. `blocks` and `join` are differentiable: the virtual axis
(virtual.py) uses them for everything that several ranks would hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import ordered_sum
from ..planner.messages import SUM_TILE_NUMEL
from ..planner.split import Ranges, Split
from .autograd import with_backward


def cut(whole: Tensor, split: Split, coordinate: int) -> Tensor:
    """Return a contiguous copy of one rank's part of a tensor.

    Args:
        whole: The whole tensor.
        split: How it is split. If it is not, `whole` itself is returned.
        coordinate: The rank's index on the axis.
    """
    return taken(whole, split.dim, split.ranges[coordinate]) if split.kind == "split" else whole


def blocks(whole: Tensor, split: Split) -> tuple[Tensor, ...]:
    """Return the parts of all ranks, by coordinate.

    In backward their gradients are joined. Gradients of a part that several ranks hold are summed
    in rank order.

    Args:
        whole: The whole tensor.
        split: How it is split.
    """
    dim = _dim(split)
    return with_backward(
        lambda whole: tuple(taken(whole, dim, ranges) for ranges in split.ranges),
        lambda *grads: (put_together(grads, split, dim),),
        whole,
    )


def join(parts: tuple[Tensor, ...], split: Split) -> Tensor:
    """Return the whole tensor of these parts; its gradient is split.

    Args:
        parts: The parts, by coordinate.
        split: How the whole is split.
    """
    dim = _dim(split)
    return with_backward(
        lambda *parts: put_together(parts, split, dim),
        lambda grad: tuple(taken(grad, dim, ranges) for ranges in split.ranges),
        *parts,
    )


def ordered(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of tensors of one shape, in this order.

    The sum is formed in fp32 and rounded once. It has no gradient.
    """
    found = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    scratch = torch.empty(
        min(found.numel(), SUM_TILE_NUMEL.on(found.device)) or 1,
        dtype=torch.float32,
        device=found.device,
    )
    ordered_sum([part.reshape(-1) for part in parts], found.view(-1), scratch)
    return found


def _dim(split: Split) -> int:
    """Return the split dimension: the last one for activations and biases."""
    return split.dim if len(split.shape) > 1 else -1


def taken(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return a contiguous copy of ranges of a dimension, concatenated.

    Args:
        whole: The tensor.
        dim: The dimension.
        ranges: The ranges (start, stop).
    """
    found = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return (
        found[0].clone(memory_format=torch.contiguous_format)
        if len(found) == 1
        else torch.cat(found, dim)
    )


def put_together(parts: Sequence[Tensor], split: Split, dim: int) -> Tensor:
    """Return the whole of these parts; parts that several ranks hold are summed.

    Args:
        parts: The parts, by coordinate.
        split: How the whole is split.
        dim: The split dimension of the tensors.
    """
    shape = list(parts[0].shape)
    shape[dim] = split.shape[split.dim]
    whole = parts[0].new_empty(shape)
    for coordinate, part in enumerate(parts):
        sharers = split.sharers(coordinate)
        if sharers[0] != coordinate:
            continue
        source = part if len(sharers) == 1 else ordered(tuple(parts[other] for other in sharers))
        offset = 0
        for start, stop in split.ranges[coordinate]:
            whole.narrow(dim, start, stop - start).copy_(source.narrow(dim, offset, stop - start))
            offset += stop - start
    return whole
