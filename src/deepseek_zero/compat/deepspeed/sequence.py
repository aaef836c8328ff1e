"""DeepSpeed's `deepspeed.sequence.layer`: attention over sequences that ranks of a process group
share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.log import log_once
from ...parallel.sequence import SequenceAttention, exchange, spread


class GroupRanks:
    """The ranks of torch's process group, as `parallel.sequence` takes them; without a group one
    rank alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.size = 1 if is_alone else dist.get_world_size(group)
        self.index = 0 if is_alone else dist.get_rank(group)

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        found = []
        for piece in pieces:
            outgoing = piece.contiguous()
            found.append(torch.empty_like(outgoing))
            dist.all_to_all_single(found[-1], outgoing, group=self._group)
        return found


class DistributedAttention(SequenceAttention):
    """Attention of whole sequences, of which each rank of a group holds its own tokens (Ulysses).

    local_attention: is called with (query, key, value, *args, **kwargs) of all tokens and this
    rank's heads.
    sequence_process_group: torch's group.  scatter_idx: below 2 where tokens are whole and heads
    are cut outside, else
    heads are.  gather_idx: accepted; which dimension holds the tokens follows from the batch's.
    sp_stream: accepted; exchanges are waited for.
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__(local_attention, GroupRanks(sequence_process_group))
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        if sp_stream is not None:
            log_once(
                "DistributedAttention(sp_stream=...): exchanges are waited for, and the stream is "
                "not used."
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the output for this rank's tokens. Collective in the group; waits.

        query, key, value: (batch, tokens, heads, width) where batch_dim_idx is 0, (tokens, batch,
        heads, width) where
        it is 1. rotary_pos_emb: a pair (cos, sin) over all tokens, (batch, tokens, heads, width) or
        broadcast to it.
        """
        outer, inner = (2, 1 - batch_dim_idx) if self.scatter_idx >= 2 else (1 - batch_dim_idx, 2)
        if self.scatter_idx >= 2:
            key = spread(key, self.ranks.size, outer)
            value = spread(value, self.ranks.size, outer)
        query, key, value = exchange(
            self.ranks, outer, inner, "query, key and value", query, key, value
        )
        if rotary_pos_emb is not None:
            cos, sin = (each.permute(1, 0, 2, 3) for each in rotary_pos_emb)
            query = _rotated(query, cos, sin)
            key = _rotated(key, cos, sin)
        context = self.local_attn(query, key, value, *args, **kwargs)
        return exchange(self.ranks, inner, outer, "the output of attention", context)[0]


def _rotated(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a tensor turned by rotary positions, in the first cos.shape[-1] of its last
    dimension.
    """
    turned = tensor[..., : cos.shape[-1]]
    rest = tensor[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
