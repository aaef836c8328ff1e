"""Ranks compare values, and an error names the values that differ."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import ModelMismatchError
from deepseek_zero.comm.agreement import agree_on
from tests.in_process import Rank, run_ranks

LAYERS = [f"layer.{number}" for number in range(40)]


def compare(rank: Rank, value: object) -> None:
    agree_on(rank.comm, {"leaves": value}, "the configuration", "why", "fix")


def test_values_that_differ_only_far_from_the_start_raise_an_error_with_that_part() -> None:
    def body(rank: Rank) -> str:
        with pytest.raises(ModelMismatchError) as caught:
            compare(rank, [*LAYERS, f"head.{rank.index}", *LAYERS])
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.count("...") == 4
    assert "'head.0'" in first
    assert "'head.1'" in first
    assert len(first) < 400


def test_long_equal_values_agree() -> None:
    run_ranks(2, lambda rank: compare(rank, LAYERS))


def test_short_values_are_shown_whole() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ModelMismatchError, match="leaves: rank 0 has 'a0', rank 1 has 'a1'"):
            compare(rank, f"a{rank.index}")

    run_ranks(2, body)
