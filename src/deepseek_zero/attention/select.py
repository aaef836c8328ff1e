"""Attention to selected blocks of keys, chosen by the mean of the keys.

The selection is that of MoBA, and of the selected branch of NSA, for one tile of queries at a time.
The score of a block of keys is the product of its mean with the mean of the tile's queries. A block
of the future is never selected, and the tile's own block always is. The selection is a constant in
backward. The kernel is the same as for fixed layouts.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..base.errors import UsageError, shown
from .attend import check_shapes
from .layouts import Listed
from .plan import AttentionShape, HeadGroup, Pattern, groups_of
from .rows import attend_by_plan

Chooser = Literal["head", "group"]


def attend_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block: int,
    blocks: int,
    tile: int = 128,
    chosen_by: Chooser = "head",
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention in which queries attend only to the blocks with the best scores.

    Keys are divided into blocks, and queries into tiles of consecutive tokens that attend to the
    same blocks. The score of a block is the dot product of the mean of its keys with the mean of
    the tile's queries, as in MoBA. The selection is not differentiated.

    Args:
        query: Shape ``(samples, heads, tokens, width)``.
        key: Shape ``(samples, key_heads, tokens, width)``; `key_heads` divides `heads`.
        value: Shape ``(samples, key_heads, tokens, value_width)``.
        block: The number of keys per block.
        blocks: Maximum number of blocks that a tile attends to, including the block that contains
            the tile.
        tile: The number of consecutive queries that attend to the same blocks; must divide `block`.
        chosen_by: "head": each head selects separately (MoBA). "group": heads that read the same
            keys select together, by the sum of their scores (NSA).
        scale: Factor of the scores; None for 1 / sqrt(width).

    Returns:
        A tensor of shape ``(samples, heads, tokens, value_width)``.

    Raises:
        UsageError: The shapes do not fit together, a size is less than 1, `tile` does not divide
            `block`, or `chosen_by` is unknown.
    """
    table = select_blocks(query, key, block=block, blocks=blocks, tile=tile, chosen_by=chosen_by)
    check_shapes(query, key, value)
    shape = AttentionShape.of(query, key)
    sharing = query.shape[1] // table.shape[1]
    groups = list[HeadGroup]()
    for sample, seen in enumerate(table):
        pattern = Pattern(
            Listed(block=block, seen=seen.cpu(), sharing=sharing, tokens_of_row=tile), ahead=0
        )
        groups += groups_of(pattern, shape, tile, slice(sample, sample + 1))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return attend_by_plan(query, key, value, groups, factor)


@torch.no_grad()
def select_blocks(
    query: Tensor,
    key: Tensor,
    *,
    block: int,
    blocks: int,
    tile: int,
    chosen_by: Chooser = "head",
) -> Tensor:
    """Select the blocks of keys that each tile of queries attends to in `attend_selected`.

    A tile is a number of consecutive queries that attend to the same blocks. The block that
    contains the tile is always selected, and later blocks never are. Of blocks with equal scores,
    the earlier one is selected.

    Args:
        query: Shape ``(samples, heads, tokens, width)``.
        key: Shape ``(samples, key_heads, tokens, width)``; `key_heads` divides `heads`.
        block: The number of keys per block.
        blocks: Maximum number of blocks that a tile attends to, including the block that contains
            the tile.
        tile: The number of queries per tile; must divide `block`.
        chosen_by: "head": each head selects separately. "group": heads that read the same keys
            select together, by the sum of their scores.

    Returns:
        A bool tensor of shape ``(samples, selections, tiles, key_blocks)``, True for selected
        blocks. `selections` is the number of heads with "head", and of key heads with "group".
        `tiles` is ``ceil(tokens / tile)``, and `key_blocks` is ``ceil(tokens / block)``.

    Raises:
        UsageError: The shapes do not fit together, a size is less than 1, `tile` does not divide
            `block`, or `chosen_by` is unknown.
    """
    if chosen_by not in get_args(Chooser):
        raise UsageError(
            f"chosen_by = {shown(chosen_by)}.",
            "Blocks are chosen by each head, or by each group of heads that read the same keys.",
            f"take one of {', '.join(get_args(Chooser))}.",
        )
    if (
        not query.dim() == key.dim() == 4
        or query.shape[0] != key.shape[0]
        or query.shape[2:] != key.shape[2:]
        or query.shape[1] % key.shape[1]
        or min(block, blocks, tile) < 1
    ):
        raise UsageError(
            f"blocks of {block} keys, {blocks} for each tile of {tile} queries, chosen for queries "
            f"{list(query.shape)} and keys {list(key.shape)}.",
            "There are as many queries as keys, (samples, heads, tokens, width); heads of keys "
            "divide the queries'.",
            "pass such tensors, and positive sizes.",
        )
    if tile > block or block % tile:
        raise UsageError(
            f"tiles of {tile} queries beside blocks of {block} keys.",
            "A tile has one block of its own, which it always sees.",
            "choose a tile that divides the block.",
        )
    shared = query.shape[1] // key.shape[1]
    tiles = _means(query, tile)
    means = _means(key, block).repeat_interleave(shared, 1)
    scores = tiles @ means.mT
    if chosen_by == "group":
        scores = scores.unflatten(1, (-1, shared)).sum(2)
    own = torch.arange(scores.shape[2], device=scores.device)[:, None] * tile // block
    place = torch.arange(scores.shape[3], device=scores.device)[None]
    scores = scores.masked_fill(place > own, -torch.inf).masked_fill(place == own, torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :blocks]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (place <= own)


def _means(tokens: Tensor, size: int) -> Tensor:
    """Return the mean of every `size` tokens, in fp32 or better.

    The last group may have fewer tokens.
    """
    dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    parts = tokens.split(size, 2)
    return torch.stack([each.mean(2, dtype=dtype) for each in parts], 2)
