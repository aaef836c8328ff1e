"""Block-sparse attention of a model's layers, as a callable object."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..base.errors import UsageError
from ..base.log import log_first
from .attend import attend, check_shapes
from .layouts import BlockLayout
from .plan import AttentionShape, Pattern, added, whole_mask
from .rows import Bias, BiasRule


@dataclass(frozen=True)
class SparseAttention:
    """A callable that computes attention over the blocks of a layout.

    A block is a fixed number of consecutive tokens. `engine.sparse_attention` is an instance of
    this class, which a model may call in its attention layers.

    Attributes:
        layout: The blocks of keys that each block of queries attends to.
        ranks: Number of ranks over which the heads of each layer are divided equally.
        index: The index of this rank among these ranks. The index determines which heads of the
            layer this rank computes.
    """

    layout: BlockLayout
    ranks: int = 1
    index: int = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        window: int | None = None,
        reach: int | None = None,
        scale: float | None = None,
        biases: Sequence[Bias] = (),
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute attention over the keys that the layout and the other arguments admit.

        Args:
            query: Shape ``(samples, heads, queries, width)``.
            key: Shape ``(samples, key_heads, keys, width)``; `key_heads` divides `heads`. The
                queries belong to the last positions of the keys.
            value: Shape ``(samples, key_heads, keys, value_width)``.
            is_causal: Whether a query does not attend to later keys. A unidirectional layout is
                always causal.
            window: A query attends to its own key and at most `window - 1` earlier keys; None for
                no limit. Later keys are not limited.
            reach: A query attends only to keys at most this many tokens away; None for no limit.
            scale: Factor of the scores; None for 1 / sqrt(width).
            biases: Each is a tensor of numbers to add to the scores, a bool tensor that is True for
                the visible keys, or a `BiasRule`. Tensors have four dimensions, each 1 or
                that of ``(samples, heads, queries, keys)``.
            dropout: Probability of dropping an attention weight. Above 0, all scores are computed,
                and rank 0 logs a warning once.

        Returns:
            A tensor of shape ``(samples, heads, queries, value_width)``.

        Raises:
            UsageError: The shapes do not fit, `window` is less than 1, or `reach` is negative.
        """
        if (window is not None and window < 1) or (reach is not None and reach < 0):
            raise UsageError(
                f"sparse attention got window={window} and reach={reach}.",
                "A query attends at least to its own key.",
                "pass a window of at least 1 and a reach of at least 0, or None for no limit.",
            )
        pattern = Pattern.of(self.layout, is_causal=is_causal, window=window, reach=reach)
        if dropout and query.numel():
            check_shapes(query, key, value, biases)
            return self._dense(query, key, value, pattern, scale, biases, dropout)
        return attend(
            query,
            key,
            value,
            pattern,
            scale=scale,
            biases=biases,
            first_head=self.index * query.shape[1],
        )

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        scale: float | None,
        biases: Sequence[Bias],
        dropout: float,
    ) -> Tensor:
        log_first(  # This runs in every layer of every step
            f"attention drops weights (p = {dropout}), which its sparse kernel does not: all pairs "
            "are computed, with a mask. For the sparse one set the model's attention dropout to 0.",
            logging.WARNING,
        )
        shape = AttentionShape.of(query, key, self.index * query.shape[1])
        mask = added(whole_mask(pattern, shape).to(query.device)[None], query.dtype)
        for each in biases:
            part = each if isinstance(each, Tensor) else _ask(each, query, key)
            mask = mask.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else mask + part
        mask = mask.expand(query.shape[0], -1, -1, -1)
        return scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scale, enable_gqa=True
        )


def _ask(rule: BiasRule, query: Tensor, key: Tensor) -> Tensor:
    """Return the result of a rule for all pairs."""
    samples = torch.arange(query.shape[0], device=query.device)[:, None, None, None]
    queries = torch.arange(query.shape[2], device=query.device)[None, None, :, None]
    return rule(samples, queries, torch.arange(key.shape[2], device=key.device)[None, None, None])
