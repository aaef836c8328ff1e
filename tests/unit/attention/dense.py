"""Reference attention: all scores, one mask and a softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_zero.attention.plan import Pattern


def seen_of(pattern: Pattern, heads: int, queries: int, keys: int) -> Tensor:
    """Return a bool mask of shape (heads, queries, keys) that is true for visible pairs."""
    place, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    seen = torch.ones(heads, queries, keys, dtype=torch.bool)
    if pattern.ahead is not None:
        seen &= key <= place + pattern.ahead
    if pattern.behind is not None:
        seen &= key >= place - pattern.behind
    if (layout := pattern.layout) is not None:
        table = layout.table(heads, keys)
        seen &= table.repeat_interleave(layout.query_block, 1).repeat_interleave(layout.block, 2)[
            :, keys - queries : keys, :keys
        ]
    return seen


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    biases: Sequence[Tensor] = (),
    scale: float | None = None,
) -> Tensor:
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    for bias in biases:
        scores = (
            scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        )
    scores = scores.masked_fill(~seen_of(pattern, heads, queries, keys), -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, weights) @ value


def tensors(
    samples: int,
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    width: int,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return queries in transformers' memory layout, keys, values and a gradient of the output."""
    noise = torch.Generator().manual_seed(queries + heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64).to(dtype)

    query = draw(samples, queries, heads, width).transpose(1, 2).requires_grad_()
    key, value = (draw(samples, key_heads, keys, width).requires_grad_() for _ in range(2))
    return [query, key, value, draw(samples, heads, queries, width)]


def with_gradients(out: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, given[:3], given[3])]


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference divided by the largest expected value or 1."""
    return max(
        float(
            (one - other).detach().double().abs().max() / other.detach().abs().max().clamp(min=1.0)
        )
        for one, other in zip(found, expected, strict=True)
    )
