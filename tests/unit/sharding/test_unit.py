"""Test the states of a unit and the allowed transitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from deepseek_zero.sharding.unit import MOVES, UnitState
from tests.in_process import Rank, run_ranks, sharded
from tests.models import Odd


def check(
    table: set[Any], states: type[Enum], owner: Any, attribute: str, enter: Callable[[Any], None]
) -> None:
    for before, after in itertools.product(states, states):
        setattr(owner, attribute, before)
        if (before, after) in table:
            enter(after)
            assert getattr(owner, attribute) is after
        else:
            with pytest.raises(
                AssertionError, match=f"cannot go from {before.value} to {after.value}"
            ):
                enter(after)
            assert getattr(owner, attribute) is before


def test_a_unit_follows_its_table_of_transitions() -> None:
    def body(rank: Rank) -> None:
        unit = sharded(rank, Odd(), stage=3).root
        check(MOVES, UnitState, unit, "_state", unit._enter)

    run_ranks(1, body)
