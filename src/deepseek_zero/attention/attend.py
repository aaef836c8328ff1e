"""Attention in which each query sees the keys that a pattern says: one call for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..base.device import has_no_values
from ..base.errors import UsageError
from .flex import attend_flex, is_usable
from .plan import AttentionShape, HeadGroup, Pattern, best_plan
from .rows import Bias, attend_by_plan


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    biases: Sequence[Bias] = (),
    first_head: int = 0,
    tile: int | None = None,
) -> Tensor:
    """Return softmax(query key^T scale + biases) value over the keys that a pattern lets each query
    see. Local.

    query: (samples, heads, queries, width).  key, value: (samples, heads or a number that divides
    it, keys, width); the queries are the last ones of the keys.  scale: None: 1 / sqrt(width).
    biases: numbers, or bools of what is seen, of four dimensions each, which are 1 or (samples,
    heads, queries, keys); or a `Rule` of what is seen.
    first_head: the number, in the whole model, of the first head here.  tile: queries that are
    computed together at most; None: chosen.

    Nothing of queries x keys is held. Exact: keys that are not seen have no part in the sum, and a
    query that sees none gets zeros. The same inputs give the same bits, in backward too. UsageError
    where shapes do not fit.
    """
    _check(query, key, value, biases)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if has_no_values(query):
        return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    if torch.compiler.is_compiling():  # the loop over tiles is not for a compiler to unroll
        run: Tensor = torch.compiler.disable(_attend)(
            query, key, value, pattern, scale, biases, first_head, tile
        )
        return run
    return _attend(query, key, value, pattern, scale, biases, first_head, tile)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    scale: float,
    biases: Sequence[Bias],
    first_head: int,
    tile: int | None,
) -> Tensor:
    if is_usable(query, value):
        return attend_flex(query, key, value, pattern, scale, biases, first_head)
    groups = plan_for(query, key, pattern, biases, first_head, tile)
    return attend_by_plan(query, key, value, groups, scale, biases)


def plan_for(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    biases: Sequence[Bias] = (),
    first_head: int = 0,
    tile: int | None = None,
) -> tuple[HeadGroup, ...]:
    """Return the plan by which `attend` computes these. Pure."""
    shape = AttentionShape(query.shape[1], key.shape[1], query.shape[2], key.shape[2], first_head)
    sizes = (tile,) if tile else _tiles_for(pattern, query, biases)
    return best_plan(pattern, shape, sizes)


def _tiles_for(pattern: Pattern, query: Tensor, biases: Sequence[Bias]) -> tuple[int, ...]:
    """Return how many queries may make a tile.

    bf16 and fp16 have larger fixed costs per call in backward. Where nothing is left out but the
    future, which the kernel does by itself, all of them do.
    """
    if pattern.layout is None and pattern.behind is None and not biases:
        return (max(query.shape[2], 1),)
    return (256,) if query.dtype.itemsize < 4 else (128, 256)


def _check(query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Bias]) -> None:
    tensors = [each for each in biases if isinstance(each, Tensor)]
    shapes = [list(each.shape) for each in (query, key, value)]
    four = all(each.dim() == 4 for each in (query, key, value, *tensors))
    if not (
        four
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[1:3] == value.shape[1:3]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[2] <= key.shape[2]
    ):
        raise UsageError(
            f"attention of queries {shapes[0]}, keys {shapes[1]} and values {shapes[2]}.",
            "They are (samples, heads, tokens, width): as many samples, keys and values alike, "
            "their heads divide the queries', and there are no fewer keys than queries, which are "
            "the last of them.",
            "pass tensors of such shapes.",
        )
    whole = (*query.shape[:3], key.shape[2])
    for each in tensors:
        if any(size not in (1, full) for size, full in zip(each.shape, whole, strict=True)):
            raise UsageError(
                f"scores of {list(whole)} and a bias or mask of {list(each.shape)}.",
                "It is added to the scores.",
                "give it the same dimensions, or 1.",
            )
