"""Low-precision storage: accurate round trips, and an unbiased mean by stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.precision.compact import (
    BLOCK,
    MAGNITUDES,
    SIGNED,
    BFloat16Format,
    Float8Block,
    StochasticRounding,
    round_to_bf16,
    storage_format,
)

KINDS = {"signed": SIGNED, "magnitudes": MAGNITUDES}


def kept(tiny: Float8Block, values: Tensor, chance: Tensor | None = None) -> Tensor:
    """Encode and decode the values."""
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    powers = torch.empty(-(-values.numel() // BLOCK), dtype=torch.int8)
    tiny.encode(values, codes, powers, chance)
    return tiny.decode(codes, powers)


def some_values(numel: int, *, signed: bool, spread: float = 12.0) -> Tensor:
    """Return values of very different magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.exp2(-spread * torch.rand(numel, generator=generator)) * 1e-3
    values[::17] = 0.0
    return values * torch.randn(numel, generator=generator).sign() if signed else values


def test_random_bits_depend_only_on_step_name_and_element() -> None:
    whole = StochasticRounding(3).of("exp_avg of a", 0, 1000)
    for start, stop in ((0, 1), (1, 18), (15, 999), (512, 1000)):
        assert torch.equal(
            StochasticRounding(3).of("exp_avg of a", start, stop - start), whole[start:stop]
        )
    for other in (
        StochasticRounding(4).of("exp_avg of a", 0, 1000),
        StochasticRounding(3).of("exp_avg of b", 0, 1000),
    ):
        assert (other != whole).float().mean() > 0.99
    assert abs((whole.int() & 0xFFFF).float().mean() - 0x7FFF) < 3000


def test_bf16_rounds_up_in_proportion_and_keeps_what_it_can_hold() -> None:
    low, high = torch.tensor(1.0), torch.tensor(1.0 + 2**-7)
    values = torch.full((1 << 16,), 1.0 + 0.3 * 2**-7)
    into = torch.empty_like(values, dtype=torch.bfloat16)
    round_to_bf16(values, into, StochasticRounding(1).of("x", 0, values.numel()))
    assert set(into.float().tolist()) == {float(low), float(high)}
    assert abs(float((into.float() == high).float().mean()) - 0.3) < 0.01
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), float("nan")])
    into = torch.empty_like(exact, dtype=torch.bfloat16)
    round_to_bf16(exact, into, torch.full((7,), -1, dtype=torch.int16))
    assert torch.equal(into[:6].float(), exact[:6]) and into[6].isnan()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, BLOCK, 1000, 300_000])
def test_8_bit_values_are_close_and_are_decoded_to_the_same_values(kind: str, numel: int) -> None:
    tiny = KINDS[kind]
    values = some_values(numel, signed=tiny.is_signed)
    near = kept(tiny, values)
    assert torch.equal(near == 0, values == 0)
    wrong = ((near - values).abs() / values.abs().clamp(min=1e-30))[values != 0]
    assert wrong.numel() == 0 or float(wrong.max()) <= 1 / 16
    assert torch.equal(kept(tiny, near), near)
    assert torch.equal(kept(tiny, near, StochasticRounding(1).of("x", 0, numel)), near)


@pytest.mark.parametrize("kind", KINDS)
def test_stochastically_rounded_values_are_decoded_to_the_same_values(kind: str) -> None:
    tiny = KINDS[kind]
    for step in range(20):
        values = some_values(4000, signed=tiny.is_signed, spread=44.0)
        once = kept(tiny, values, StochasticRounding(step).of("x", 0, 4000))
        assert torch.equal(kept(tiny, once, StochasticRounding(step + 1).of("x", 0, 4000)), once)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_over_many_chances_is_the_value(kind: str) -> None:
    tiny = KINDS[kind]
    values = some_values(BLOCK, signed=tiny.is_signed, spread=8.0)
    total = sum(
        kept(tiny, values, StochasticRounding(step).of("x", 0, BLOCK)).double()
        for step in range(2000)
    )
    assert isinstance(total, Tensor)
    off = ((total / 2000 - values).abs() / values.abs().clamp(min=1e-30))[values != 0]
    assert float(off.max()) < 0.01


def test_a_magnitude_that_is_not_zero_never_becomes_zero() -> None:
    values = torch.zeros(BLOCK)
    values[0], values[1] = 1.0, 1e-30
    assert all(
        float(kept(MAGNITUDES, values, StochasticRounding(step).of("x", 0, BLOCK))[1]) > 0
        for step in range(50)
    )
    assert float(kept(SIGNED, values)[1]) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_nonfinite(kind: str, bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    found = kept(KINDS[kind], values)
    assert found[:BLOCK].isnan().all() and torch.equal(found[BLOCK:], values[BLOCK:])


@pytest.mark.parametrize("value", [1e-37, 1e-45, 1e38, 2.0**-126, 1.0])
def test_every_magnitude_of_fp32_is_near(value: float) -> None:
    found = float(kept(MAGNITUDES, torch.full((5,), value))[0])
    assert abs(found - value) <= max(value / 16, 2.0**-126)


def test_a_running_mean_changes_with_stochastic_rounding_only() -> None:
    target, steps = torch.full((BLOCK,), 2.0), 2000
    means = {name: torch.full((BLOCK,), 1.0) for name in ("nearest", "chance", "bf16")}
    for step in range(steps):
        chance = StochasticRounding(step).of("x", 0, BLOCK)
        moved = {name: mean.lerp(target, 0.001) for name, mean in means.items()}
        means["nearest"] = kept(MAGNITUDES, moved["nearest"])
        means["chance"] = kept(MAGNITUDES, moved["chance"], chance)
        upper = torch.empty(BLOCK, dtype=torch.bfloat16)
        BFloat16Format().encode(moved["bf16"], upper, None, chance)
        means["bf16"] = upper.float()
    truth = 2.0 - 0.999**steps
    assert float(means["nearest"].mean()) == 1.0
    assert abs(float(means["chance"].mean()) - truth) < 0.05
    assert abs(float(means["bf16"].mean()) - truth) < 0.02


def test_an_unknown_state_is_refused_by_name() -> None:
    assert storage_format("fp32", "whatever") is None and isinstance(
        storage_format("bf16", "whatever"), BFloat16Format
    )
    with pytest.raises(NotBuiltError, match="acc_delta"):
        storage_format("8bit", "acc_delta")
