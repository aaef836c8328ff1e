"""Split whole tensors into the parts of tensor-parallel ranks, and join them.

`cut` returns the weights of one rank. `blocks` and `join` are differentiable: the virtual axis
(virtual.py) uses them for the tensors that several ranks would hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import ordered_sum
from ..planner.messages import SUM_TILE_NUMEL
from ..planner.split import Ranges, Split
from .autograd import Tensors, with_backward


def cut(whole: Tensor, split: Split, coordinate: int) -> Tensor:
    """Return one rank's part of a tensor.

    Args:
        whole: The whole tensor.
        split: How the tensor is split over the ranks.
        coordinate: The rank's index on the tensor-parallel axis.

    Returns:
        A contiguous copy of the part, or `whole` itself if every rank holds the whole tensor.
    """
    return taken(whole, split.dim, split.ranges[coordinate]) if split.kind == "split" else whole


def blocks(whole: Tensor, split: Split) -> Tensors:
    """Return the parts of all ranks of a whole tensor.

    Backward joins the gradients of the parts. If several ranks hold the same part, their gradients
    are summed in rank order.

    Args:
        whole: The whole tensor.
        split: How the tensor is split over the ranks.

    Returns:
        A contiguous copy of each rank's part, in rank order.
    """
    dim = _dim(split)
    return with_backward(
        lambda whole: tuple(taken(whole, dim, ranges) for ranges in split.ranges),
        lambda *grads: (put_together(grads, split, dim),),
        whole,
    )


def join(parts: Tensors, split: Split) -> Tensor:
    """Return the whole tensor of which these are the parts. Backward splits its gradient.

    Args:
        parts: The part of each rank, in rank order.
        split: How the whole tensor is split over the ranks.

    Returns:
        A new tensor. If several ranks hold the same part, it contains their sum.
    """
    dim = _dim(split)
    return with_backward(
        lambda *parts: put_together(parts, split, dim),
        lambda grad: tuple(taken(grad, dim, ranges) for ranges in split.ranges),
        *parts,
    )


def ordered(parts: Tensors) -> Tensor:
    """Return the sum of tensors of one shape, added in the given order.

    The sum is formed in fp32 and rounded once. It is not differentiable.
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
        whole: The tensor to copy from.
        dim: The dimension to which the ranges apply.
        ranges: The ranges (start, stop) to copy, in this order.

    Returns:
        A new tensor; its size in `dim` is the total length of the ranges.
    """
    found = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return (
        found[0].clone(memory_format=torch.contiguous_format)
        if len(found) == 1
        else torch.cat(found, dim)
    )


def put_together(parts: Sequence[Tensor], split: Split, dim: int) -> Tensor:
    """Return the whole tensor of which these are the parts. It is not differentiable.

    Args:
        parts: The part of each rank, in rank order.
        split: How the whole tensor is split over the ranks.
        dim: The dimension of `parts` that is split.

    Returns:
        A new tensor. If several ranks hold the same part, it contains their sum in rank order.
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
