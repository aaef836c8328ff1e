"""Ulysses all-to-alls: attention and its gradients equal one process bitwise, head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepseek_zero.base.errors import UsageError
from deepseek_zero.parallel.sequence import SequenceGroup, exchange, spread
from tests.in_process import Rank, run_ranks

BATCH, TOKENS, WIDTH = 2, 8, 4


def heads(number: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return random values of shape (batch, heads, tokens, width)."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, number, TOKENS, WIDTH, generator=draws).to(dtype)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention one head at a time.

    The bits then do not depend on the number of heads.
    """
    shared = query.shape[1] // key.shape[1]
    found = [
        scaled_dot_product_attention(
            query[:, [h]], key[:, [h // shared]], value[:, [h // shared]], is_causal=True
        )
        for h in range(query.shape[1])
    ]
    return torch.cat(found, 1).transpose(1, 2)


def run(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> list[Tensor]:
    inputs = [each.clone().requires_grad_() for each in (query, key, value)]
    found = attention(*inputs)
    (found * weight).sum().backward()
    return [found.detach(), *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("reads_in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "many", "few"), [(2, 4, 4), (2, 4, 2), (4, 4, 4), (4, 8, 4), (2, 2, 1), (4, 8, 2)]
)
def test_attention_of_a_head_has_the_bits_of_one_process(
    size: int, many: int, few: int, dtype: torch.dtype, reads_in_place: bool
) -> None:
    query, key, value = heads(many, 0, dtype), heads(few, 1, dtype), heads(few, 2, dtype)
    weight = heads(many, 3, dtype).transpose(1, 2)
    whole = run(query, key, value, weight)
    share = TOKENS // size

    def body(rank: Rank) -> list[Any]:
        group, own = SequenceGroup(rank.comm), slice(rank.index * share, (rank.index + 1) * share)
        inputs = [each[:, :, own].clone().requires_grad_() for each in (query, key, value)]
        spreads = [inputs[0], *(spread(each, size, 1) for each in inputs[1:])]
        found = exchange(
            group, 2, 1, "the output", attention_of(exchange(group, 1, 2, "the input", *spreads))
        )[0]
        (found.transpose(1, 2) * weight[:, own]).sum().backward()
        return [found.detach().transpose(1, 2), *(each.grad for each in inputs)]

    def attention_of(parts: tuple[Tensor, ...]) -> Tensor:
        return attention(*parts).transpose(1, 2)

    ranks = run_ranks(size, body, reads_in_place=reads_in_place)
    assert torch.equal(torch.cat([each[0] for each in ranks], 1), whole[0])
    for place in (1, 2, 3):
        found = torch.cat([each[place] for each in ranks], 2)
        if place > 1 and few < size:  # several ranks have this head, and their gradients are summed
            error = 1e-6 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(found, whole[place], rtol=error, atol=error)
        else:
            assert torch.equal(found, whole[place])


@pytest.mark.parametrize(("size", "few"), [(2, 4), (4, 2)])
def test_bytes_are_those_of_the_formula(size: int, few: int) -> None:
    """Each rank sends (C - 1) / C of query, key, value and output in forward and in backward.

    Keys and values count once per rank that needs them.
    """
    many, share = 8, TOKENS // size

    def body(rank: Rank) -> int:
        group = SequenceGroup(rank.comm)
        query, key, value = (
            torch.ones(BATCH, each, share, WIDTH, requires_grad=True) for each in (many, few, few)
        )
        whole = exchange(group, 1, 2, "in", query, spread(key, size, 1), spread(value, size, 1))
        exchange(group, 2, 1, "out", whole[0])[0].sum().backward()
        return rank.comm.meter.sent_bytes["sp"]

    held = max(few, size)
    one_way = BATCH * share * WIDTH * 4 * (2 * many + 2 * held) * (size - 1) // size
    assert run_ranks(size, body) == [2 * one_way] * size


def test_layers_that_cannot_be_cut_are_refused_by_name() -> None:
    def body(rank: Rank) -> None:
        group = SequenceGroup(rank.comm)
        with pytest.raises(UsageError, match="3 cannot be cut over 2 ranks"):
            exchange(group, 1, 2, "query", torch.ones(1, 3, 4, 4))

    run_ranks(2, body)
    with pytest.raises(UsageError, match="3 key and value heads cannot be cut over 4"):
        spread(torch.ones(1, 3, 4, 4), 4, 1)


def test_one_rank_exchanges_nothing() -> None:
    def body(rank: Rank) -> bool:
        tensor = torch.ones(1, 3, 4, 4)
        return exchange(SequenceGroup(rank.comm), 1, 2, "query", tensor)[0] is tensor

    assert run_ranks(1, body) == [True]
