"""Layouts equal tables from a slow reference that sets DeepSpeed's blocks one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepseek_zero.attention.layouts import (
    MODES,
    BigBird,
    BlockLayout,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
    layout_of,
)
from deepseek_zero.base.errors import ConfigError

LENGTHS = [*range(1, 14), 16, 23, 31, 32]
Table = list[list[int]]


def windows(table: Table, sizes: list[int]) -> None:
    """Set consecutive square windows along the diagonal; the last size repeats."""
    start, sizes = 0, list(sizes)
    while start < len(table):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        for row in range(start, min(start + size, len(table))):
            for column in range(start, min(start + size, len(table))):
                table[row][column] = 1
        start += size


def sliding(table: Table, width: int) -> None:
    for row in range(len(table)):
        for column in range(max(0, row - width // 2), min(len(table), row + width // 2 + 1)):
            table[row][column] = 1


def seen_by_all(table: Table, start: int, stop: int, first_row: int, horizontal: bool) -> None:
    for column in range(start, min(stop, len(table))):
        for row in range(first_row, len(table)):
            table[row][column] = 1
        if horizontal:
            table[column] = [1] * len(table)


def slow(layout: BlockLayout, head: int, blocks: int) -> Table:
    table = [[0] * blocks for _ in range(blocks)]
    causal = layout.attention == "unidirectional"
    if isinstance(layout, Dense):
        windows(table, [blocks])
    if isinstance(layout, Fixed):
        local, many = layout.num_local_blocks, layout.num_global_blocks
        windows(table, [local])
        first = local - (1 + head % layout.num_different_global_patterns) * many
        end = blocks - blocks % local
        starts = [
            *range(first, end, local),
            *([min(end + first, blocks - many)] if end < blocks else []),
        ]
        for start in starts:
            seen_by_all(
                table,
                start,
                start + many,
                start if causal else 0,
                layout.horizontal_global_attention,
            )
    if isinstance(layout, Variable):
        windows(table, [*layout.local_window_blocks])
    if isinstance(layout, Variable | BSLongformer):
        ends = layout.global_block_end_indices or [
            index + 1 for index in layout.global_block_indices
        ]
        is_both = isinstance(layout, BSLongformer) or layout.horizontal_global_attention
        for start, stop in zip(layout.global_block_indices, ends, strict=True):
            from_there = causal and isinstance(layout, Variable)
            seen_by_all(table, start, stop, start if from_there else 0, is_both)
    if isinstance(layout, BigBird | BSLongformer | LocalSlidingWindow):
        sliding(table, layout.num_sliding_window_blocks)
    if isinstance(layout, BigBird):
        seen_by_all(table, 0, layout.num_global_blocks, 0, True)
    # DeepSpeed's Fixed and Variable keep some future blocks, which this library drops.
    if causal:
        table = [
            [seen * (column <= row) for column, seen in enumerate(line)]
            for row, line in enumerate(table)
        ]
    return table


KINDS: list[tuple[type[BlockLayout], dict[str, Any]]] = [
    (Dense, {}),
    (Fixed, {}),
    (Fixed, {"num_local_blocks": 6, "num_global_blocks": 2}),
    (Fixed, {"num_different_global_patterns": 4, "different_layout_per_head": True}),
    (
        Fixed,
        {
            "num_global_blocks": 2,
            "num_different_global_patterns": 2,
            "different_layout_per_head": True,
        },
    ),
    (Variable, {}),
    (Variable, {"local_window_blocks": (2, 5, 3), "global_block_indices": (1, 7)}),
    (Variable, {"global_block_indices": (0, 9), "global_block_end_indices": (2, 12)}),
    (BigBird, {"num_random_blocks": 0}),
    (BigBird, {"num_random_blocks": 0, "num_sliding_window_blocks": 6, "num_global_blocks": 2}),
    (BSLongformer, {}),
    (BSLongformer, {"num_sliding_window_blocks": 5, "global_block_indices": (0, 8)}),
    (BSLongformer, {"global_block_indices": (2, 11), "global_block_end_indices": (4, 12)}),
    (LocalSlidingWindow, {}),
    (LocalSlidingWindow, {"num_sliding_window_blocks": 4}),
]
HORIZONTAL = [(Fixed, {"num_global_blocks": 2}), (Variable, {"global_block_indices": (1, 7)})]


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_the_table_is_the_slow_rules(
    kind: type[BlockLayout], arguments: dict[str, Any], attention: Any
) -> None:
    same(kind(attention=attention, **arguments))


@pytest.mark.parametrize(("kind", "arguments"), HORIZONTAL)
def test_global_blocks_attend_to_all_blocks_if_configured(
    kind: type[BlockLayout], arguments: dict[str, Any]
) -> None:
    same(kind(horizontal_global_attention=True, **arguments))


def same(layout: BlockLayout) -> None:
    for blocks in LENGTHS:
        if isinstance(layout, Fixed) and blocks < layout.num_global_blocks:
            continue  # DeepSpeed has no such table
        found = layout.table(4, blocks * layout.block)
        expected = [slow(layout, head, blocks) for head in range(4)]
        assert found.int().tolist() == expected, f"{layout} of {blocks} blocks"


@pytest.mark.parametrize("kind", [Variable, BigBird])
@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_random_blocks_are_the_same_everywhere_and_never_of_the_future(
    kind: Any, attention: Any
) -> None:
    shape = {"different_layout_per_head": True, "attention": attention}
    base = kind(num_random_blocks=0, **shape).table(3, 32 * 16)
    layout = kind(num_random_blocks=3, **shape)
    random.seed(5)
    torch.manual_seed(5)
    found = layout.table(3, 32 * 16)
    random.seed(6)
    torch.manual_seed(6)
    assert torch.equal(found, kind(num_random_blocks=3, **shape).table(3, 32 * 16))
    assert not torch.equal(found[0], found[1]), "heads draw for themselves"
    assert not torch.equal(found, kind(num_random_blocks=3, seed=1, **shape).table(3, 32 * 16))
    more = (found & ~base).sum(-1)
    assert (found | ~base).all() and more.max() <= 3 and more.float().mean() > 1.5, (
        "some were seen already"
    )
    if attention == "unidirectional":
        assert torch.equal(found, found.tril())
        assert kind(num_random_blocks=20, **shape).table(1, 32 * 16)[0].sum(-1)[3] == 4, (
            "as many as there are"
        )


def test_rows_need_no_table() -> None:
    layout = Variable(num_random_blocks=2, global_block_indices=(3, 70), attention="unidirectional")
    whole = layout.table(1, 100 * 16)[0]
    assert torch.equal(layout.rows(0, 40, 47, 100), whole[40:47])
    assert layout.rows(0, 1 << 20, (1 << 20) + 1, (1 << 20) + 1).shape == (1, (1 << 20) + 1)


@pytest.mark.parametrize(
    ("mode", "arguments", "words"),
    [
        ("fixed", {"num_local_blocks": 4, "num_global_blocks": 3}, "divides"),
        ("fixed", {"num_different_global_patterns": 2}, "one layout for all heads"),
        (
            "fixed",
            {"num_different_global_patterns": 5, "different_layout_per_head": True},
            "at most 4",
        ),
        (
            "fixed",
            {"horizontal_global_attention": True, "attention": "unidirectional"},
            "see the future",
        ),
        (
            "variable",
            {"horizontal_global_attention": True, "attention": "unidirectional"},
            "see the future",
        ),
        ("variable", {"local_window_blocks": []}, "one positive size"),
        (
            "variable",
            {"global_block_indices": [3], "global_block_end_indices": [3]},
            "greater than its start",
        ),
        (
            "bslongformer",
            {"global_block_indices": [3], "global_block_end_indices": [4, 5]},
            "as many ends",
        ),
        ("bigbird", {"block": 0}, "block = 0"),
        ("bigbird", {"attention": "both"}, "unidirectional or bidirectional"),
        ("bigbird", {"num_local_blocks": 4}, "has no such argument"),
        ("round", {}, "choose one of dense, fixed"),
    ],
)
def test_invalid_layouts_are_refused(mode: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(mode, arguments)


def test_a_list_for_a_tuple_is_refused() -> None:
    """Layouts are keys of caches, so attention raised TypeError."""
    with pytest.raises(ConfigError, match=r"pass a tuple, local_window_blocks=\(4,\)"):
        Variable(local_window_blocks=[4])  # type: ignore[arg-type]


def test_layouts_are_equal_by_value() -> None:
    assert layout_of("variable", {"local_window_blocks": [2, 3]}) == Variable(
        local_window_blocks=(2, 3)
    )
    assert len({kind() for kind in MODES.values()} | {kind() for kind in MODES.values()}) == len(
        MODES
    )
