"""DeepSpeed's `deepspeed.sequence.layer`: attention with sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.log import log_once
from ...parallel.sequence import SequenceAttention, exchange, spread
from . import comm


class GroupRanks:
    """The ranks of a process group, in the form that `parallel.sequence` expects.

    Without a process group there is one rank.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = comm.get_world_size(group)
        self.index = comm.get_rank(group)

    def exchange(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Exchange equally sized slices between the ranks (all-to-all).

        Args:
            pieces: Tensors whose first dimension is the destination rank, with the same shapes on
                all ranks.
            what: Ignored.

        Returns:
            Tensors of the same shapes, whose first dimension is the source rank.

        Note:
            Collective: every rank of the group must call it.
        """
        found = []
        for piece in pieces:
            outgoing = piece.contiguous()
            found.append(torch.empty_like(outgoing))
            dist.all_to_all_single(found[-1], outgoing, group=self._group)
        return found


class DistributedAttention(SequenceAttention):
    """Attention over sequences that are split over the ranks of a group (Ulysses).

    Args:
        local_attention: Function of (query, key, value, *args, **kwargs) with all tokens and this
            rank's heads.
        sequence_process_group: The process group.
        scatter_idx: At least 2 if tokens are split outside of the attention; below 2 if heads are.
        gather_idx: Ignored; the dimension of the tokens follows from that of the batch.
        sp_stream: Ignored; exchanges are waited for.
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
        """Compute attention over all tokens, and return the output for this rank's tokens.

        Args:
            query: This rank's tokens, shape ``(batch, tokens, heads, head_dim)`` if
                `batch_dim_idx` is 0, or ``(tokens, batch, heads, head_dim)`` if it is 1.
            key: Same layout as `query`.
            value: Same layout as `query`.
            batch_dim_idx: Dimension of the batch.
            rotary_pos_emb: Pair (cos, sin) over all tokens, broadcastable to ``(batch, tokens,
                heads, head_dim)``.
            *args: Passed to `local_attention`.
            **kwargs: Passed to `local_attention`.

        Returns:
            The output for this rank's tokens, in the layout of `query`.

        Note:
            Collective: every rank of the sequence group must call it. The call waits for the
            all-to-all exchanges.
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
    """Apply rotary position embeddings to the first elements of the last dimension."""
    turned = tensor[..., : cos.shape[-1]]
    rest = tensor[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
