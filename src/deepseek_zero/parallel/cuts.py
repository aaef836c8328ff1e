"""Cuts a whole tensor into what each rank of the tensor-parallel axis holds, and joins the parts
again.

`cut` is for the weights of one rank. `blocks` and `join` keep gradients: the virtual axis
(virtual.py) cuts and joins with them whatever several ranks would hold, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.collectives import ordered_sum
from ..planner.messages import SUM_TILE_NUMEL
from ..planner.split import Ranges, Split, laid_out


def cut(whole: Tensor, split: Split, coordinate: int) -> Tensor:
    """Return a contiguous copy of what one rank holds of a whole tensor; the tensor itself unless
    it is split.
    """
    return taken(whole, split.dim, split.ranges[coordinate]) if split.kind == "split" else whole


def blocks(whole: Tensor, split: Split) -> tuple[Tensor, ...]:
    """Return what each rank holds, by coordinate. Their gradients are joined; of a part that
    several ranks hold, they are summed in the order of the ranks.
    """
    found: tuple[Tensor, ...] = _Blocks.apply(whole, split)  # type: ignore[no-untyped-call]
    return found


def join(parts: tuple[Tensor, ...], split: Split) -> Tensor:
    """Return the whole tensor of which these are the parts, by coordinate; its gradient is cut."""
    whole: Tensor = _Join.apply(split, *parts)  # type: ignore[no-untyped-call]
    return whole


def ordered(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of tensors of one shape, in this order, in fp32, rounded once; without a
    gradient.
    """
    found = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    scratch = torch.empty(
        min(found.numel(), SUM_TILE_NUMEL.on(found.device)) or 1,
        dtype=torch.float32,
        device=found.device,
    )
    ordered_sum([part.reshape(-1) for part in parts], found.view(-1), scratch)
    return found


def activations(split: Split) -> Split:
    """Return how the outputs of a column layer lie over the ranks, side by side in the order of the
    whole model.

    split: of its weight. Where ranks share a part (a kv head for several), each has its own output,
    and the outputs are those of a model that has the part several times.
    """
    # By block of a fused q, k, v: the widths of the ranks' parts of it.
    widths = [[high - low for low, high in block] for block in zip(*split.ranges, strict=True)]
    return Split("split", (sum(map(sum, widths)),), 0, laid_out(widths))


def _dim(split: Split) -> int:
    """Return the dimension that is cut: the last one of activations and biases, whose split has a
    single dimension.
    """
    return split.dim if len(split.shape) > 1 else -1


def taken(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return a contiguous copy of these ranges of a dimension, one behind the other."""
    found = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return (
        found[0].clone(memory_format=torch.contiguous_format)
        if len(found) == 1
        else torch.cat(found, dim)
    )


def put_together(parts: Sequence[Tensor], split: Split, dim: int) -> Tensor:
    """Return the whole of which these are the parts, by coordinate; the sum of a part that several
    ranks hold.

    dim: of the tensors that is cut.
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


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: Split) -> tuple[Tensor, ...]:
        ctx.split = split
        ctx.dim = _dim(split)
        return tuple(taken(whole, ctx.dim, ranges) for ranges in split.ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return put_together(grads, ctx.split, ctx.dim), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, *parts: Tensor) -> Tensor:
        ctx.split = split
        ctx.dim = _dim(split)
        return put_together(parts, split, ctx.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(taken(grad, ctx.dim, ranges) for ranges in ctx.split.ranges)
