"""Attention in which each query attends to only some of the keys, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..base.device import has_no_values
from ..base.errors import UsageError
from .flex import attend_flex, is_usable
from .plan import AttentionShape, Pattern, best_plan
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
) -> Tensor:
    """Compute softmax(query key^T scale + biases) value over the keys that a pattern selects.

    No tensor of size queries x keys is allocated. The result is exact: other keys are excluded from
    the softmax, and a query that attends to no key gets zeros. The same inputs give the same bits,
    in backward too.

    Args:
        query: Shape ``(samples, heads, queries, width)``.
        key: Shape ``(samples, key_heads, keys, width)``; `key_heads` divides `heads`. The queries
            belong to the last positions of the keys.
        value: Shape ``(samples, key_heads, keys, value_width)``.
        pattern: The keys that each query attends to.
        scale: Factor of the scores; None for 1 / sqrt(width).
        biases: Each is a tensor of numbers to add to the scores, a bool tensor that is True for the
            visible keys, or a `BiasRule`. Tensors have four dimensions, each 1 or that of
            ``(samples, heads, queries, keys)``.
        first_head: The index of the first head of `query` among all heads of the layer, if the
            heads are split over ranks.

    Returns:
        A tensor of shape ``(samples, heads, queries, value_width)``.

    Raises:
        UsageError: The shapes do not fit.
    """
    check_shapes(query, key, value, biases)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if has_no_values(query) or not query.numel():
        return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    run = _attend
    if torch.compiler.is_compiling():  # A compiler must not unroll the loop over tiles
        run = torch.compiler.disable(_attend)
    return run(query, key, value, pattern, scale, biases, first_head)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    scale: float,
    biases: Sequence[Bias],
    first_head: int,
) -> Tensor:
    if is_usable(query, value):
        return attend_flex(query, key, value, pattern, scale, biases, first_head)
    shape = AttentionShape.of(query, key, first_head)
    groups = best_plan(pattern, shape, tiles_for(pattern, query, biases))
    return attend_by_plan(query, key, value, groups, scale, biases)


def tiles_for(pattern: Pattern, query: Tensor, biases: Sequence[Bias]) -> tuple[int, ...]:
    """Return candidates for the number of queries that are computed together (tile sizes).

    bf16 and fp16 have larger fixed costs per call in backward. If only future keys are excluded,
    the kernel needs no mask, and all queries are computed together.

    Args:
        pattern: The keys that each query attends to.
        query: The queries, of which the length and the dtype are read.
        biases: The biases of `attend`; the kernel needs a mask for each.
    """
    if pattern.layout is None and pattern.behind is None and not biases:
        return (max(query.shape[2], 1),)
    return (256,) if query.dtype.itemsize < 4 else (128, 256)


def check_shapes(query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Bias] = ()) -> None:
    """Raise UsageError if the shapes of the arguments of `attend` do not fit together."""
    tensors = [each for each in biases if isinstance(each, Tensor)]
    shapes = [list(each.shape) for each in (query, key, value)]
    if not (
        all(each.dim() == 4 for each in (query, key, value, *tensors))
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
