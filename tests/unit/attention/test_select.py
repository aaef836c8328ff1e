"""Blocks selected by content equal a slow reference; so does the attention over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.attention.layouts import Listed
from deepseek_zero.attention.plan import Pattern
from deepseek_zero.attention.select import attend_selected, select_blocks
from deepseek_zero.base.errors import UsageError
from tests.unit.attention.dense import apart, dense, tensors, with_gradients


def slow(
    query: Tensor, key: Tensor, block: int, blocks: int, tile: int, heads: list[int]
) -> list[set[int]]:
    """Return the blocks that each tile of queries selects for `heads`, which share one key head."""
    chosen, length = [], query.shape[1]
    for start in range(0, length, tile):
        own = start // block
        mean = query[heads, start : start + tile].mean(1).sum(0)
        likes = {
            place: float(mean @ key[place * block : (place + 1) * block].mean(0))
            for place in range(own)
        }
        best = sorted(likes, key=lambda place: -likes[place])[: blocks - 1]
        chosen.append({own, *best})
    return chosen


@pytest.mark.parametrize("chosen_by", ["head", "group"])
def test_the_best_blocks_and_the_local_block_are_selected(chosen_by: str) -> None:
    query, key = (each.detach() for each in tensors(2, 4, 2, 101, 101, 8)[:2])
    found = select_blocks(query, key, block=16, blocks=3, tile=8, chosen_by=chosen_by)  # type: ignore[arg-type]
    assert found.shape == (2, 4 if chosen_by == "head" else 2, 13, 7)
    for sample in range(2):
        for chooser in range(found.shape[1]):
            heads = [chooser] if chosen_by == "head" else [2 * chooser, 2 * chooser + 1]
            expected = slow(query[sample], key[sample, heads[0] // 2], 16, 3, 8, heads)
            assert [
                {*row.nonzero().flatten().tolist()} for row in found[sample, chooser]
            ] == expected


@pytest.mark.parametrize("chosen_by", ["head", "group"])
def test_attention_over_them_is_dense_attention_under_their_mask(chosen_by: str) -> None:
    given = tensors(2, 4, 2, 101, 101, 8)
    sizes = {"block": 16, "blocks": 3, "tile": 8, "chosen_by": chosen_by}
    table = select_blocks(*given[:2], **sizes)  # type: ignore[arg-type]
    outs = []
    for sample, seen in enumerate(table):
        layout = Listed(block=16, seen=seen, sharing=4 // len(seen), tokens_of_row=8)
        outs.append(
            dense(*(each[sample : sample + 1] for each in given[:3]), Pattern(layout, ahead=0))
        )
    expected = with_gradients(torch.cat(outs), given)
    found = with_gradients(attend_selected(*given[:3], **sizes), given)  # type: ignore[arg-type]
    assert apart(found, expected) < 1e-12
    everything = attend_selected(*given[:3], block=16, blocks=7, tile=16)
    assert apart([everything], [dense(*given[:3], Pattern(ahead=0))]) < 1e-12


def test_sizes_that_do_not_fit_are_refused() -> None:
    query, key, value, _ = tensors(1, 4, 2, 32, 32, 4)
    for block, tile in ((8, 16), (12, 8), (0, 8)):
        with pytest.raises(UsageError, match=r"tiles of|blocks of"):
            attend_selected(query, key, value, block=block, blocks=2, tile=tile)
    with pytest.raises(UsageError, match="as many queries as keys"):
        attend_selected(query, key[:, :, :8], value[:, :, :8], block=8, blocks=2, tile=8)


@pytest.mark.parametrize(
    ("shapes", "chosen_by"),
    [
        ([(1, 2, 32, 8), (1, 2, 32, 8), (1, 1, 32, 8)], "head"),  # fewer heads of values
        ([(1, 2, 32, 8), (1, 2, 32, 8), (1, 2, 48, 8)], "head"),  # values of other tokens
        ([(2, 2, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8)], "head"),  # other samples
        ([(1, 2, 32, 8), (1, 2, 32, 4), (1, 2, 32, 8)], "head"),  # another width
        ([(2, 32, 8), (2, 32, 8), (2, 32, 8)], "head"),
        ([(1, 2, 32, 8)] * 3, "groups"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]], chosen_by: Any) -> None:
    query, key, value = map(torch.zeros, shapes)
    with pytest.raises(UsageError):
        attend_selected(query, key, value, block=8, blocks=2, tile=8, chosen_by=chosen_by)
