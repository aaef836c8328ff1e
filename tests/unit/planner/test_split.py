"""Test `Split`, which describes how a tensor is split along the tensor-parallel axis."""

from __future__ import annotations

from deepseek_zero.planner.split import Split


def test_a_fused_projection_gives_each_rank_its_part_of_every_block() -> None:
    split = Split.even((12, 5), 0, ranks=2, blocks=3)
    assert split.ranges == (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    assert split.local_shape(1) == (6, 5)
    assert [split.is_counted_at(rank) for rank in (0, 1)] == [True, True]


def test_heads_that_several_ranks_hold_count_once() -> None:
    halves = ((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)
    split = Split("split", (8, 3), 0, halves)
    assert split.summands(1, 4) == (0, 1)
    assert [split.is_counted_at(rank) for rank in range(4)] == [True, False, True, False]


def test_a_whole_parameter_is_counted_on_the_first_rank() -> None:
    for kind in ("equal", "partial"):
        whole = Split.whole(kind, (7,), 4)  # type: ignore[arg-type]
        assert whole.local_shape(3) == (7,)
        assert [whole.is_counted_at(rank) for rank in range(2)] == [True, False]


def test_uneven_sharing_is_detected() -> None:
    """With two heads on three ranks, the first two ranks share a head."""
    uneven = Split("split", (8, 3), 0, (((0, 4),), ((0, 4),), ((4, 8),)))
    assert not uneven.shares_evenly(3)
    assert Split("split", (8, 3), 0, (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),))).shares_evenly(4)
    assert Split.even((12, 5), 0, ranks=3).shares_evenly(3)
    assert Split.whole("equal", (7,), 3).shares_evenly(3)
    assert Split.whole("partial", (7,), 3).shares_evenly(3)
