"""Context parallelism: each rank has the queries of its tokens, and gathers the keys and values of
all of them.

A causal query needs the keys before it, so equal parts in a row would leave the last rank most of
the work. A sequence is cut into twice as many chunks as ranks, and rank i has chunks i and 2C-1-i
(zig-zag): any two such chunks see equally many keys. Each chunk's attention is one call of the
model's own kernel, so its results have the bits of that block computed alone, and numbers of heads
need not divide by anything.

Gathered keys and values are not kept: backward gathers them again, and computes the blocks again.
Each rank's share of their gradients is then summed where they belong, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .sequence import SequenceGroup

# (query, key, value, mask) -> (samples, tokens, heads, width); mask: (query tokens, key tokens),
# True where seen
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def zigzag(index: int, ranks: int) -> tuple[int, int]:
    """Return which two of the 2 * ranks chunks of a sequence a rank has, ascending."""
    return index, 2 * ranks - 1 - index


def attend_gathered(
    group: SequenceGroup,
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
) -> Tensor:
    """Return attention of this rank's two chunks of tokens over the whole sequences. Collective;
    waits.

    query, key, value: (samples, heads, tokens, width) of this rank's chunks; fewer key heads as the
    kernel takes them.
    window: each token sees so many of the last tokens, itself included; None: all. Returns
    (samples, tokens, heads, width).
    """
    found: Tensor = checkpoint(
        _blocks,
        group,
        kernel,
        query,
        key,
        value,
        is_causal,
        window,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return found


def _blocks(
    group: SequenceGroup,
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    key, value = _Gather.apply(group, key, value)  # type: ignore[no-untyped-call]
    chunk = query.shape[2] // 2
    found = []
    for place, own in zip(zigzag(group.index, group.size), query.split(chunk, 2), strict=True):
        seen, mask = block_of(place, chunk, key.shape[2], is_causal, window, query.device)
        found.append(kernel(own, key[:, :, seen], value[:, :, seen], mask))
    return torch.cat(found, 1)


def block_of(
    place: int, chunk: int, tokens: int, is_causal: bool, window: int | None, device: torch.device
) -> tuple[slice, Tensor | None]:
    """Return the keys that any query of a chunk sees, and who sees which of them; None: all see
    all. Pure.
    """
    if not is_causal:
        return slice(0, tokens), None
    first = place * chunk
    start = 0 if window is None else max(0, first - window + 1)
    rows, columns = (torch.arange(begin, first + chunk, device=device) for begin in (first, start))
    behind = rows[:, None] - columns
    mask = behind >= 0
    return slice(start, first + chunk), mask if window is None else mask & (behind < window)


class _Gather(torch.autograd.Function):
    """Keys and values of all tokens, in the order of the sequence, of those of each rank's
    chunks.
    """

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        # The shapes are in the name: ranks with other numbers of tokens find no partner, and an
        # error says so.
        name = f"key and value {[list(key.shape), list(value.shape)]}"
        return tuple(map(_in_order, group.all_gather([key, value], name)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        name = f"the gradients of key and value {[list(each.shape) for each in grads]}"
        key, value = ctx.group.sum_scatter([_by_rank(each, ctx.group.size) for each in grads], name)
        return None, key, value


def _in_order(parts: Tensor) -> Tensor:
    """(ranks, samples, heads, own tokens, width) -> (samples, heads, tokens, width)."""
    first, second = parts.unflatten(3, (2, -1)).unbind(3)
    return torch.cat((first, second.flip(0))).movedim(0, 2).flatten(2, 3)


def _by_rank(whole: Tensor, ranks: int) -> Tensor:
    """The other way around."""
    chunks = whole.unflatten(2, (2 * ranks, -1)).movedim(2, 0)
    return torch.stack((chunks[:ranks], chunks[ranks:].flip(0)), 3).flatten(3, 4)
