"""DeepSpeed's DistributedAttention on process groups of torch, compared with one process.

Tests both layouts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepseek_zero.compat.deepspeed.sequence import DistributedAttention

TOKENS, HEADS = 8, 4


def batch_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over tensors of shape (batch, tokens, heads, width)."""
    parts = (each.transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


def tokens_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return batch_first(*(each.transpose(0, 1) for each in (query, key, value))).transpose(0, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("few", [4, 2, 1])
@pytest.mark.parametrize("has_positions", [False, True])
def test_distributed_attention_is_that_of_the_whole_sequence(
    batch_dim: int, few: int, has_positions: bool
) -> None:
    draws = torch.Generator().manual_seed(0)
    local = (batch_first, tokens_first)[batch_dim]
    shape = [2, TOKENS] if batch_dim == 0 else [TOKENS, 2]
    inputs = [
        torch.randn(*shape, each, 8, generator=draws).requires_grad_() for each in (HEADS, few, few)
    ]
    angles = torch.randn(1, TOKENS, 1, 4, generator=draws)
    rotary = (angles.cos(), angles.sin()) if has_positions else None
    alone = DistributedAttention(local, None)
    alone.ranks.size = 1  # type: ignore[misc]
    if batch_dim == 0 and has_positions:
        rotary = tuple(each.permute(1, 0, 2, 3) for each in (angles.cos(), angles.sin()))  # type: ignore[assignment]
    expected = alone(*inputs, batch_dim, rotary)
    expected.square().sum().backward()
    grads = [each.grad for each in inputs]
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [
        each.detach().chunk(size, 1 - batch_dim)[rank].clone().requires_grad_() for each in inputs
    ]
    found = DistributedAttention(local, dist.group.WORLD, 2, 0)(*own, batch_dim, rotary)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected.chunk(size, 1 - batch_dim)[rank])
    for each, grad in zip(own, grads, strict=True):
        assert grad is not None
        torch.testing.assert_close(each.grad, grad.chunk(size, 1 - batch_dim)[rank])
