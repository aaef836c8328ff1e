"""Attention with gathered keys and values equals one process bitwise, with sums in rank order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepseek_zero.parallel.sequence import SequenceGroup
from deepseek_zero.parallel.sequence_gather import attend_gathered, block_of, zigzag
from tests.in_process import Rank, run_ranks
from tests.unit.parallel.test_sequence import BATCH, TOKENS, WIDTH, heads


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    many = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(many, 1), value.repeat_interleave(many, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def inputs(many: int, few: int, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key, value, and the gradient of the output."""
    return [heads(each, seed, dtype) for seed, each in enumerate((many, few, few))] + [
        heads(many, 3, dtype)
    ]


def blocked(given: list[Tensor], size: int, is_causal: bool, window: int | None) -> list[Tensor]:
    """Compute attention in one process, one block of queries at a time.

    Returns the output, the gradient of the queries, and those of keys and values, summed by rank.
    """
    query, key, value, weight = given
    chunk, found, grads = TOKENS // (2 * size), torch.empty_like(query), torch.empty_like(query)
    sums = [torch.zeros(each.shape, dtype=torch.float32) for each in (key, value)]
    for rank in range(size):
        whole = [each.clone().requires_grad_() for each in (key, value)]
        blocks = []
        for place in zigzag(rank, size):
            own = slice(place * chunk, (place + 1) * chunk)
            part = query[:, :, own].clone().requires_grad_()
            seen, mask = block_of(place, chunk, TOKENS, is_causal, window, query.device)
            output = kernel(part, *(each[:, :, seen] for each in whole), mask)
            blocks.append((own, part, output))
        torch.cat([output for _, _, output in blocks], 1).backward(
            torch.cat([weight[:, :, own] for own, _, _ in blocks], 2).transpose(1, 2)
        )
        for own, part, output in blocks:
            assert part.grad is not None
            found[:, :, own], grads[:, :, own] = output.detach().transpose(1, 2), part.grad
        for total, each in zip(sums, whole, strict=True):
            assert each.grad is not None
            total.add_(each.grad)
    return [found, grads, *(total.to(query.dtype) for total in sums)]


def gathered(
    rank: Rank, given: list[Tensor], is_causal: bool, window: int | None
) -> tuple[list[Tensor], int]:
    """Return the same for the tokens of one rank, and the bytes that it sent."""
    group, chunk = SequenceGroup(rank.comm), TOKENS // (2 * rank.size)
    places = zigzag(rank.index, rank.size)
    own = [torch.cat([each.split(chunk, 2)[place] for place in places], 2) for each in given]
    query, key, value = (each.clone().requires_grad_() for each in own[:3])
    output = attend_gathered(group, kernel, query, key, value, is_causal=is_causal, window=window)
    (output * own[3].transpose(1, 2)).sum().backward()
    grads = [each.grad for each in (query, key, value) if each.grad is not None]
    return [output.detach().transpose(1, 2), *grads], rank.comm.meter.sent_bytes["sp"]


@pytest.mark.parametrize("reads_in_place", [False, True])
@pytest.mark.parametrize(
    ("is_causal", "window"), [(True, None), (True, 3), (False, None), (False, 3)]
)
@pytest.mark.parametrize(("size", "many", "few"), [(2, 3, 3), (2, 4, 1), (4, 3, 1), (4, 4, 4)])
def test_blocks_have_the_bits_of_one_process(
    size: int, many: int, few: int, is_causal: bool, window: int | None, reads_in_place: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = inputs(many, few, dtype)
        ranks = run_ranks(
            size,
            lambda rank, given=given: gathered(rank, given, is_causal, window),
            reads_in_place=reads_in_place,
        )
        whole = blocked(given, size, is_causal, window)
        for rank, (found, _) in enumerate(ranks):
            for expected, own in zip(whole, found, strict=True):
                chunks = expected.chunk(2 * size, 2)
                assert torch.equal(
                    own, torch.cat([chunks[place] for place in zigzag(rank, size)], 2)
                )


@pytest.mark.parametrize(("size", "many", "few"), [(2, 3, 3), (4, 4, 2)])
def test_bytes_are_those_of_the_formula(size: int, many: int, few: int) -> None:
    """Each rank sends its keys and values C - 1 times in forward.

    Backward gathers them again and sends gradients of the same size.
    """
    given = inputs(many, few, torch.float32)
    sent = [bytes_ for _, bytes_ in run_ranks(size, lambda rank: gathered(rank, given, True, None))]
    own = 2 * BATCH * few * (TOKENS // size) * WIDTH * 4
    assert sent == [3 * (size - 1) * own] * size


def test_blocks_are_plain_attention() -> None:
    given = inputs(3, 3, torch.float32)
    query, key, value, _ = given
    plain: Any = scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(blocked(given, 2, True, None)[0], plain, rtol=1e-6, atol=1e-6)
