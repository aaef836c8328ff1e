"""Device memory of a budget is counted, limited and returned."""

from __future__ import annotations

import gc

import pytest

from deepseek_zero.base.errors import OutOfMemoryError
from deepseek_zero.tiers.budget import DeviceBudget


class Owner:
    pass


def test_allocated_bytes_are_counted_with_their_maximum() -> None:
    allowance = DeviceBudget()
    allowance.reserve(300, "a")
    allowance.reserve(200, "b")
    allowance.release(300)
    assert (allowance.taken_bytes, allowance.most_bytes) == (200, 500)


def test_the_byte_that_is_too_much_is_refused_and_nothing_is_counted() -> None:
    allowance = DeviceBudget(1000)
    allowance.reserve(1000, "everything")
    with pytest.raises(
        OutOfMemoryError, match=r"one byte more needs 1 B .* 1000 B of the 1000 B .*memory_budget"
    ):
        allowance.reserve(1, "one byte more")
    assert allowance.taken_bytes == 1000


def test_bytes_of_a_deleted_object_are_free() -> None:
    allowance, owner = DeviceBudget(1000), Owner()
    assert allowance.reserve_for(owner, 1000, "an object") is owner
    del owner
    gc.collect()
    assert allowance.taken_bytes == 0
