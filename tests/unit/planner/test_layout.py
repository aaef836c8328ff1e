"""Layouts assign every element of every parameter to one offset on one rank."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from deepseek_zero.planner.layout import (
    BLOCK,
    GRAIN,
    FlatLayout,
    Shape,
    even_layout,
)
from deepseek_zero.planner.units import LAYOUTS


def random_shapes(seed: int) -> list[Shape]:
    draw = random.Random(seed)
    return [
        tuple(draw.randint(0, 6) for _ in range(draw.randint(0, 4)))
        for _ in range(draw.randint(1, 9))
    ]


def pad_to(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad slices to multiples of a number of elements."""
    monkeypatch.setattr("deepseek_zero.planner.layout.BLOCK", block)
    monkeypatch.setattr("deepseek_zero.planner.units.BLOCK", block)


@pytest.mark.parametrize("granularity", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(12))
def test_every_element_of_every_parameter_is_owned_by_one_rank(
    granularity: str, ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad_to(16, monkeypatch)
    shapes = [*random_shapes(seed), (40, 50), (1025,)]
    layout = LAYOUTS[granularity]([f"p{k}" for k in range(len(shapes))], shapes, ranks)
    owners = torch.zeros(layout.padded_numel, dtype=torch.int64)
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.numel == prod(shape)
        parts = [layout.owned(slot, rank) for rank in range(ranks)]
        owned = [position for start, stop in parts for position in range(start, stop)]
        assert owned == list(range(slot.start, slot.stop))
        owners[slot.start : slot.stop] += 1
    for start, stop in layout.gaps:
        owners[start:stop] += 1
    assert owners.eq(1).all(), "slots and gaps together cover the buffer once"
    assert layout.numel + sum(stop - start for start, stop in layout.gaps) == layout.padded_numel


@pytest.mark.parametrize("granularity", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_slices_are_equal_and_start_on_block_boundaries(granularity: str, ranks: int) -> None:
    layout = LAYOUTS[granularity](["a", "b"], [(300, 11), (999,)], ranks)
    assert layout.slice_numel % BLOCK == 0
    assert [layout.bounds(rank) for rank in range(ranks)] == [
        (rank * layout.slice_numel, (rank + 1) * layout.slice_numel) for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_an_even_layout_pads_by_less_than_a_block_per_rank(ranks: int) -> None:
    layout = LAYOUTS["element"](["a", "b", "c"], [(300, 11), (999,), ()], ranks)
    assert layout.numel == 300 * 11 + 999 + 1
    assert layout.numel <= layout.padded_numel < layout.numel + BLOCK * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_a_whole_layout_cuts_no_parameter(
    ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad_to(8, monkeypatch)
    shapes = [*random_shapes(seed), (31, 7), (64,)]
    layout = LAYOUTS["tensor"]([f"p{k}" for k in range(len(shapes))], shapes, ranks)
    for slot in layout.slots:
        owners = [
            rank
            for rank in range(ranks)
            if layout.owned(slot, rank)[0] < layout.owned(slot, rank)[1]
        ]
        assert len(owners) == (1 if slot.numel else 0)


def test_a_whole_layout_puts_the_largest_first_on_the_least_loaded_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pad_to(1, monkeypatch)
    layout = LAYOUTS["tensor"](["a", "b", "c", "d"], [(24,), (80,), (48,), (32,)], 2)
    assert {slot.name: slot.start for slot in layout.slots} == {"b": 0, "c": 104, "d": 152, "a": 80}
    assert layout.slice_numel == 104


def test_each_parameter_begins_at_a_multiple_of_the_grain() -> None:
    layout = even_layout(["a", "b", "c", "d"], [(13,), (7, 5), (), (64,)], 2, grain=GRAIN)
    assert [slot.start for slot in layout.slots] == [0, 16, 56, 64]
    assert layout.slice_numel % GRAIN == 0


def test_a_layout_without_parameters_is_empty() -> None:
    assert LAYOUTS["element"]([], [], 3) == FlatLayout((), 0, 3)
    assert FlatLayout((), 0, 3).gaps == ()
