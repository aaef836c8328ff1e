"""Context parallelism: each rank has its queries and gathers all keys and values.

A causal query needs the keys before it, so contiguous parts of equal size would leave most of the
work to the last rank. A sequence is therefore split into twice as many chunks as ranks, and rank i
has chunks i and 2C-1-i (zig-zag); any two such chunks see the same number of keys. The attention of
each chunk is one call of the model's own kernel. Its results have the bits of that block computed
alone, and the number of heads need not be divisible.

Gathered keys and values are not stored: backward gathers them again and recomputes the blocks. Each
rank's share of their gradients is then summed on the rank that owns them, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .sequence import SequenceGroup

# (query, key, value, mask) -> (samples, tokens, heads, width). The mask is (query tokens, key
# tokens), True if the key is seen.
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def zigzag(index: int, ranks: int) -> tuple[int, int]:
    """Return the two of the 2 * ranks chunks of a sequence that a rank has, ascending.

    Args:
        index: The rank's index on the axis.
        ranks: The number of ranks.
    """
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
    """Return the attention of this rank's two chunks over the whole sequences.

    Args:
        group: The ranks that share sequences.
        kernel: Computes attention of one chunk.
        query: Queries of this rank's chunks, shape (samples, heads, tokens, width).
        key: Keys of the same shape, with fewer heads if the kernel supports that.
        value: Values, likewise.
        is_causal: Whether a token sees only itself and earlier tokens.
        window: Each token sees only this number of last tokens, including itself. None means all.

    Returns:
        A tensor of shape (samples, tokens, heads, width).

    Note:
        Collective and blocking: every rank must call it.
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
    """Return the keys that the queries of a chunk see, and the mask between them.

    Args:
        place: The index of the chunk.
        chunk: The number of tokens of a chunk.
        tokens: The number of tokens of the sequence.
        is_causal: Whether a token sees only itself and earlier tokens.
        window: Each token sees only this number of last tokens, or None.
        device: The device of the mask.

    Returns:
        A slice of the keys, and a mask (query tokens, key tokens) or None if every query sees every
        key.
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
    """Keys and values of all tokens in the order of the sequence, from the ranks' chunks."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        # The name contains the shapes: ranks with other numbers of tokens then get an error instead
        # of a partner.
        name = f"key and value {[list(key.shape), list(value.shape)]}"
        return tuple(map(_in_order, group.all_gather([key, value], name)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        name = f"the gradients of key and value {[list(each.shape) for each in grads]}"
        key, value = ctx.group.sum_scatter([_by_rank(each, ctx.group.size) for each in grads], name)
        return None, key, value


def _in_order(parts: Tensor) -> Tensor:
    """Reshape (ranks, samples, heads, own tokens, width) to (samples, heads, tokens, width)."""
    first, second = parts.unflatten(3, (2, -1)).unbind(3)
    return torch.cat((first, second.flip(0))).movedim(0, 2).flatten(2, 3)


def _by_rank(whole: Tensor, ranks: int) -> Tensor:
    """Invert `_in_order`."""
    chunks = whole.unflatten(2, (2 * ranks, -1)).movedim(2, 0)
    return torch.stack((chunks[:ranks], chunks[ranks:].flip(0)), 3).flatten(3, 4)
