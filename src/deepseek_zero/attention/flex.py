"""Pattern attention on a GPU, with PyTorch's FlexAttention.

FlexAttention skips blocks of 128 x 128 that are not seen. A block that is seen whole is computed
without a mask. For a block that is seen in part, the layout's table and the limits of distance are
evaluated for each pair. The kernel is compiled once per shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..base.quantities import ceil_div
from .plan import AttentionShape, Pattern
from .rows import Bias

SIDE = 128  # Side of FlexAttention's blocks
_SMALLEST_WIDTH = 16


def is_usable(query: Tensor, value: Tensor) -> bool:
    """Return whether FlexAttention can compute these inputs.

    It requires CUDA, triton, a dtype of at most 32 bits and a minimum width.

    Args:
        query: Shape ``(samples, heads, queries, width)``.
        value: Shape ``(samples, key_heads, keys, value_width)``.
    """
    fits = query.dtype != torch.float64 and min(query.shape[-1], value.shape[-1]) >= _SMALLEST_WIDTH
    return query.device.type == "cuda" and fits and find_spec("triton") is not None


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    scale: float,
    biases: Sequence[Bias],
    first_head: int,
) -> Tensor:
    """Compute the attention of `attend` with FlexAttention.

    Args:
        query: Shape ``(samples, heads, queries, width)``.
        key: Shape ``(samples, key_heads, keys, width)``; `key_heads` divides `heads`.
        value: Shape ``(samples, key_heads, keys, value_width)``.
        pattern: The keys that each query attends to.
        scale: Factor of the scores.
        biases: Numbers, bool masks and rules that apply to the scores, as for `attend`.
        first_head: The index of the first head of `query` among all heads of the layer, if the
            heads are split over ranks.

    Returns:
        A tensor of shape ``(samples, heads, queries, value_width)``.
    """
    shape = AttentionShape.of(query, key, first_head)
    blocks = _blocks_of(pattern, shape, query.device)
    found: Tensor = compiled()(
        query,
        key,
        value,
        score_mod=_score_mod(biases),
        block_mask=_block_mask(pattern, shape, blocks, biases),
        scale=scale,
        enable_gqa=shape.heads != shape.key_heads,
    )
    return found


def _torchs() -> Any:
    """Return torch's module, which imports the compiler."""
    return import_module("torch.nn.attention.flex_attention")


@cache
def compiled() -> Callable[..., Any]:
    """Return the compiled `flex_attention`.

    Without compilation, FlexAttention is slow and allocates the scores of all pairs.
    """
    return torch.compile(_torchs().flex_attention, dynamic=False)


@dataclass(frozen=True)
class _Blocks:
    """A pattern in FlexAttention's form.

    Attributes:
        partial: Blocks of 128 x 128 that are seen in part, a bool of shape ``(variants, queries /
            128, keys / 128)``.
        whole: Blocks that are seen whole, of the same shape.
        table: The table of the layout, of shape ``(variants, rows, blocks)``; None without a
            layout.
        variant_of: The variant of each head.
    """

    partial: Tensor
    whole: Tensor
    table: Tensor | None
    variant_of: Tensor


@lru_cache(maxsize=32)
def _blocks_of(pattern: Pattern, shape: AttentionShape, device: torch.device) -> _Blocks:
    """Return a pattern in FlexAttention's form; heads with one layout share their blocks."""
    numbers = [pattern.variant(head + shape.first_head) for head in range(shape.heads)]
    variants = sorted({*numbers})
    seen = [_coarse(pattern, variant, shape) for variant in variants]
    some, every = (torch.stack(each).to(device) for each in zip(*seen, strict=True))
    table = None
    if pattern.layout is not None:
        rows = ceil_div(shape.keys, pattern.layout.query_block)
        blocks = ceil_div(shape.keys, pattern.layout.block)
        table = torch.stack([pattern.layout.rows(each, 0, rows, blocks) for each in variants]).to(
            device
        )
    places = torch.tensor([variants.index(each) for each in numbers], device=device)
    return _Blocks(some & ~every, every, table, places)


def _coarse(pattern: Pattern, variant: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Return masks of the blocks of 128 x 128 that are seen at all, and seen whole."""
    offset = shape.keys - shape.queries
    layout = pattern.layout
    begins = torch.arange(0, shape.keys, SIDE, device="cpu")
    ends = (begins + SIDE).clamp(max=shape.keys)
    some = list[Tensor]()
    every = list[Tensor]()
    for start in range(offset, shape.keys, SIDE):
        stop = min(start + SIDE, shape.keys)
        near = torch.ones_like(begins, dtype=torch.bool)
        whole = ends - begins == SIDE
        if layout is not None:
            rows = ceil_div(stop, layout.query_block)
            blocks = ceil_div(shape.keys, layout.block)
            own = layout.rows(variant, start // layout.query_block, rows, blocks)
            first = begins // layout.block
            last = -(-ends // layout.block)
            near = _between(own.any(0), first, last) > 0
            whole &= _between(own.all(0), first, last) == last - first
        if pattern.ahead is not None:
            near &= begins <= stop - 1 + pattern.ahead
            whole &= ends - 1 <= start + pattern.ahead
        if pattern.behind is not None:
            near &= ends - 1 >= start - pattern.behind
            whole &= begins >= stop - 1 - pattern.behind
        some.append(near)
        every.append(whole & near)
    return torch.stack(some), torch.stack(every)


def _between(flags: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the number of flags set in each [first, last)."""
    sums = torch.nn.functional.pad(flags.cumsum(0), (1, 0))
    return sums[last] - sums[first]


def _block_mask(
    pattern: Pattern, shape: AttentionShape, blocks: _Blocks, biases: Sequence[Bias]
) -> Any:
    """Return FlexAttention's BlockMask.

    If there are bool biases or rules, no block counts as seen whole.
    """
    rules = [each for each in biases if not isinstance(each, Tensor)]
    bools = [each for each in biases if isinstance(each, Tensor) and each.dtype == torch.bool]
    layout = pattern.layout
    offset = shape.keys - shape.queries
    table = blocks.table
    variant_of = blocks.variant_of
    ahead = pattern.ahead
    behind = pattern.behind

    def mask_mod(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query attends to a key; all arguments are indices."""
        place = query + offset
        seen = key >= 0
        if table is not None and layout is not None:
            seen = seen & table[variant_of[head], place // layout.query_block, key // layout.block]
        if ahead is not None:
            seen = seen & (key <= place + ahead)
        if behind is not None:
            seen = seen & (key >= place - behind)
        for each in bools:
            seen = seen & _at(each, sample, head, query, key)
        for rule in rules:
            seen = seen & rule(sample, query, key)
        return seen

    partial = blocks.partial
    whole = blocks.whole
    if rules or bools:
        partial = partial | whole
        whole = torch.zeros_like(whole)
    counts, indices, whole_counts, whole_indices = (
        each[variant_of][None] if len(partial) > 1 else each[None]
        for each in (*_listed(partial), *_listed(whole))
    )
    return _torchs().BlockMask.from_kv_blocks(
        counts,
        indices,
        whole_counts,
        whole_indices,
        BLOCK_SIZE=SIDE,
        mask_mod=mask_mod,
        seq_lengths=(shape.queries, shape.keys),
    )


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of seen blocks per row, and all blocks, seen ones first."""
    counts = seen.sum(-1, dtype=torch.int32)
    return counts, seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def _score_mod(biases: Sequence[Bias]) -> Callable[..., Tensor] | None:
    """Return a function that adds the biases of numbers to a score; None if there are none."""
    numbers = [each for each in biases if isinstance(each, Tensor) and each.dtype != torch.bool]
    if not numbers:
        return None

    def score_mod(
        score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        for each in numbers:
            score = score + _at(each, sample, head, query, key)
        return score

    return score_mod


def _at(tensor: Tensor, *places: Tensor) -> Tensor:
    """Return one element; a dimension of size 1 is broadcast."""
    return tensor[
        tuple(
            place if size > 1 else place * 0
            for place, size in zip(places, tensor.shape, strict=True)
        )
    ]
