"""Context parallelism: each rank has its queries and gathers all keys and values.

A causal query needs the keys before it, so contiguous parts of equal size would leave most of the
work to the last rank. A sequence is therefore split into twice as many chunks as ranks, and rank i
has chunks i and 2C-1-i (zig-zag); any two such chunks see the same number of keys. The attention of
each chunk is one call of the model's own kernel. Its results have the bits of that block computed
alone, and the number of heads need not be divisible.

Gathered keys and values are not stored: backward gathers them again and recomputes the blocks. Each
rank's gradients for them are then summed on the rank that owns them, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .autograd import Tensors, with_backward
from .sequence import SequenceGroup

# (query, key, value, mask) -> (samples, tokens, heads, width). The mask is (query tokens, key
# tokens), True if the key is seen.
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def zigzag(index: int, ranks: int) -> tuple[int, int]:
    """Return the two chunks of a sequence that a rank has, in ascending order.

    A sequence consists of 2 * ranks chunks.

    Args:
        index: The rank's index on the sequence-parallel axis.
        ranks: The number of sequence-parallel ranks.
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
    """Compute the attention of this rank's queries over the keys of all ranks.

    A sequence is split into two chunks per rank, of which `zigzag` names those of a rank. Keys and
    values are all-gathered in forward and again in backward.

    Args:
        group: The ranks among which sequences are split.
        kernel: Computes the attention of one chunk's queries over given keys and values.
        query: Queries of this rank's chunks, shape (samples, heads, tokens, width).
        key: Keys of the same shape, with fewer heads if the kernel supports that.
        value: Values of the same shape as the keys.
        is_causal: Whether a token attends only to itself and earlier tokens.
        window: Each token attends only to tokens that are less than `window` away. None means no
            limit.

    Returns:
        A tensor of shape (samples, tokens, heads, width).

    Note:
        Collective and blocking: every rank must call it.
    """

    def blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = _gather(group, key, value)
        chunk = query.shape[2] // 2
        found = []
        for place, own in zip(zigzag(group.index, group.size), query.split(chunk, 2), strict=True):
            seen, mask = block_of(place, chunk, key.shape[2], is_causal, window, query.device)
            found.append(kernel(own, key[:, :, seen], value[:, :, seen], mask))
        return torch.cat(found, 1)

    found: Tensor = checkpoint(
        blocks, query, key, value, use_reentrant=False, preserve_rng_state=False
    )
    return found


def block_of(
    place: int, chunk: int, tokens: int, is_causal: bool, window: int | None, device: torch.device
) -> tuple[slice, Tensor | None]:
    """Return the keys to which the queries of a chunk attend, and the mask between them.

    Args:
        place: The index of the chunk in the sequence.
        chunk: The number of tokens of a chunk.
        tokens: The number of tokens of the sequence.
        is_causal: Whether a token attends only to itself and earlier tokens.
        window: Each token attends only to tokens that are less than `window` away. None means no
            limit.
        device: The device of the mask.

    Returns:
        A slice of the keys, and a mask (query tokens, key tokens) or None if every query attends to
        every key.
    """
    if not is_causal and window is None:
        return slice(0, tokens), None
    first = place * chunk
    last = first + chunk
    start = 0 if window is None else max(0, first - window + 1)
    stop = last if is_causal or window is None else min(tokens, last + window - 1)
    rows = torch.arange(first, last, device=device)
    behind = rows[:, None] - torch.arange(start, stop, device=device)
    mask = behind >= 0 if is_causal else torch.ones_like(behind, dtype=torch.bool)
    return slice(start, stop), mask if window is None else mask & (behind.abs() < window)


def _gather(group: SequenceGroup, key: Tensor, value: Tensor) -> Tensors:
    """Return keys and values of all tokens in the order of the sequence."""

    # The names contain the shapes: ranks with other numbers of tokens then get an error instead of
    # a partner.
    def forward(*parts: Tensor) -> Tensors:
        name = f"key and value {[list(each.shape) for each in parts]}"
        return tuple(map(_in_order, group.all_gather(parts, name)))

    def backward(*grads: Tensor) -> Tensors:
        name = f"the gradients of key and value {[list(each.shape) for each in grads]}"
        return tuple(group.sum_scatter([_by_rank(each, group.size) for each in grads], name))

    return with_backward(forward, backward, key, value)


def _in_order(parts: Tensor) -> Tensor:
    """Reshape (ranks, samples, heads, own tokens, width) to (samples, heads, tokens, width)."""
    first, second = parts.unflatten(3, (2, -1)).unbind(3)
    return torch.cat((first, second.flip(0))).movedim(0, 2).flatten(2, 3)


def _by_rank(whole: Tensor, ranks: int) -> Tensor:
    """Invert `_in_order`."""
    chunks = whole.unflatten(2, (2 * ranks, -1)).movedim(2, 0)
    return torch.stack((chunks[:ranks], chunks[ranks:].flip(0)), 3).flatten(3, 4)
