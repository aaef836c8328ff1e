"""Block-sparse attention as one object: the layout, and which of the model's heads are computed
here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..base.log import log_first
from .attend import attend
from .layouts import BlockLayout
from .plan import AttentionShape, Pattern, whole_mask
from .rows import Bias, BiasRule


@dataclass(frozen=True)
class SparseAttention:
    """Attention by a layout, as `engine.sparse_attention` is.

    ranks, index: of how many ranks that share each layer's heads this is which one; they have equal
    shares, in order.
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
        """Return attention, (samples, heads, queries, width): as `attend`. Local.

        query: (samples, heads, queries, width), and so key and value, of as many heads or fewer.
        is_causal: a query sees no later key, whatever the layout says; a unidirectional layout is
        causal anyway.  window: and none but of the last so many tokens, its own among them.  reach:
        nor any more than so many tokens away.  dropout: of weights; above 0 the whole matrix is
        computed.
        """
        pattern = Pattern.of(self.layout, is_causal=is_causal, window=window, reach=reach)
        if dropout:
            return self._dense(query, key, value, pattern, scale, biases, dropout)
        return attend(
            query, key, value, pattern, scale=scale, biases=biases, first_head=self._first(query)
        )

    def _first(self, query: Tensor) -> int:
        return self.index * query.shape[1]

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
        log_first(  # every layer of every step comes here
            f"attention drops weights (p = {dropout}), which its sparse kernel does not: all pairs "
            "are computed, with a mask. For the sparse one set the model's attention dropout to 0.",
            logging.WARNING,
        )
        shape = AttentionShape(
            query.shape[1], key.shape[1], query.shape[2], key.shape[2], self._first(query)
        )
        seen = whole_mask(pattern, shape).to(query.device)[None]
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~seen, -torch.inf
        )
        for each in biases:
            part = each if isinstance(each, Tensor) else _ask(each, query, key)
            mask = mask.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else mask + part
        mask = mask.expand(query.shape[0], -1, -1, -1)
        return scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scale, enable_gqa=True
        )


def _ask(rule: BiasRule, query: Tensor, key: Tensor) -> Tensor:
    """Return what a rule says of all pairs."""
    samples = torch.arange(query.shape[0], device=query.device)[:, None, None, None]
    queries = torch.arange(query.shape[2], device=query.device)[None, None, :, None]
    return rule(samples, queries, torch.arange(key.shape[2], device=key.device)[None, None, None])
