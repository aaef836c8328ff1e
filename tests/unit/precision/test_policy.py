"""An fp32 main weight is split into two 16-bit halves without loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.precision.policy import (
    CANONICAL_NAN,
    CAST_TILE,
    cast_master,
    join,
    scratch_numel,
    split,
)

INTERESTING_LOW = (
    0,
    1,
    2,
    0x3FFF,
    0x4000,
    0x7FFE,
    0x7FFF,
    0x8000,
    0x8001,
    0xBFFF,
    0xC000,
    0xFFFE,
    0xFFFF,
)
SOME_HIGH = (
    0x0000,
    0x0001,
    0x007F,
    0x0080,
    0x3F80,
    0x3FFF,
    0x7F00,
    0x7F7F,
    0x7F80,
    0x7F81,
    0x7FC0,
    0x7FFF,
)


def values_of(high: Tensor, low: Tensor) -> Tensor:
    """Return every combination of upper and lower halves as fp32."""
    bits = ((high.long()[:, None] << 16) + low.long()[None, :]).reshape(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def every_exponent() -> Tensor:
    """Return all 65,536 upper halves, each with lower halves at boundaries.

    They include subnormals, ties, infinities and NaNs.
    """
    return values_of(torch.arange(1 << 16), torch.tensor(INTERESTING_LOW))


def every_remainder() -> Tensor:
    """Return all 65,536 lower halves with boundary upper halves of both signs."""
    high = torch.tensor(SOME_HIGH)
    return values_of(torch.cat([high, high | 0x8000]), torch.arange(1 << 16))


def cast_by_the_definition(master: Tensor) -> Tensor:
    """Round half up in magnitude to bf16.

    Infinity is truncated, and each NaN becomes the canonical NaN.
    """
    bits = master.view(torch.int32)
    kept = torch.where((bits & 0x007FFFFF) != 0, CANONICAL_NAN, bits)
    rounded = torch.where((bits & 0x7F800000) == 0x7F800000, kept, bits + 0x8000)
    return rounded.view(torch.int16)[1::2].contiguous().view(torch.bfloat16)


def halves_of(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.int16)
    split(master.clone(), weight, remainder)
    return weight, remainder


CASES = {"every exponent": every_exponent, "every remainder": every_remainder}


@pytest.mark.parametrize("case", CASES)
def test_the_cast_rounds_half_up_in_magnitude_whatever_the_bits(case: str) -> None:
    master = CASES[case]()
    before, weight = master.clone(), torch.empty(master.numel(), dtype=torch.bfloat16)
    cast_master(master, weight)
    assert torch.equal(weight.view(torch.int16), cast_by_the_definition(master).view(torch.int16))
    assert torch.equal(master.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("case", CASES)
def test_a_weight_and_its_remainder_restore_the_main_weight(case: str) -> None:
    master = CASES[case]()
    weight, remainder = halves_of(master)
    assert torch.equal(weight.view(torch.int16), cast_by_the_definition(master).view(torch.int16))
    back = torch.empty_like(master)
    join(weight, remainder, back)
    numbers = ~master.isnan()
    assert torch.equal(back.view(torch.int32)[numbers], master.view(torch.int32)[numbers])
    assert bool((back.view(torch.int32)[~numbers] == CANONICAL_NAN).all()) and bool(
        weight[~numbers].isnan().all()
    )


def test_the_largest_number_rounds_to_infinity_and_is_restored() -> None:
    master = torch.tensor(
        [
            torch.finfo(torch.float32).max,
            torch.finfo(torch.float32).min,
            float("inf"),
            -float("inf"),
        ]
    )
    weight, remainder = halves_of(master)
    assert bool(weight.isinf().all())
    assert remainder.tolist() == [-1, -1, 0, 0]
    back = torch.empty_like(master)
    join(weight, remainder, back)
    assert torch.equal(back, master)


@pytest.mark.parametrize("numel", [0, 1, CAST_TILE.cpu - 1, CAST_TILE.cpu, 2 * CAST_TILE.cpu + 3])
def test_tiles_do_not_change_results(numel: int) -> None:
    master = torch.randn(numel)
    master[numel // 2 :: 1000] = float("nan")  # so that some tiles contain a NaN and some do not
    weight, remainder = halves_of(master)
    back, scratch = (
        torch.empty_like(master),
        torch.empty(scratch_numel(torch.device("cpu"), numel), dtype=torch.int32),
    )
    join(weight, remainder, back, scratch)
    assert torch.equal(weight.view(torch.int16), cast_by_the_definition(master).view(torch.int16))
    torch.testing.assert_close(back, master, rtol=0, atol=0, equal_nan=True)


def test_numbers_whose_sum_is_not_one_are_no_nan() -> None:
    master = torch.tensor([float("inf"), -float("inf"), 3e38, 3e38, -1.0])
    weight, remainder = halves_of(master)
    back = torch.empty_like(master)
    join(weight, remainder, back)
    assert torch.equal(back, master)


def test_a_weight_that_was_zeroed_by_hand_joins_to_zero_and_not_to_nan() -> None:
    weight, remainder = halves_of(torch.tensor([1.0039, 1.0041, -1.0039]))
    assert bool((remainder < 0).any())
    weight.zero_()
    back = torch.empty(3)
    join(weight, remainder, back)
    assert bool((back.abs() < 1e-40).all())
