"""The schedule: a printed list for small examples, and what window, keep and ahead mean."""

from __future__ import annotations

import random

import pytest

from deepseek_zero.sharding.plan import PlanSettings
from deepseek_zero.sharding.schedule import Kind, Schedule, plan_schedule

SIZES = [10, 100, 100, 100]  # the root and three blocks


def schedule_of(
    window: int, ahead: int = 0, keep: int = 10**9, sizes: list[int] = SIZES, overlap: bool = True
) -> Schedule:
    settings = PlanSettings(window_numel=window, ahead_numel=ahead, keep_numel=keep, overlap=overlap)
    return plan_schedule(sizes, range(len(sizes)), settings)


def test_without_a_window_each_unit_is_gathered_when_used_and_released_at_once() -> None:
    assert str(schedule_of(window=0)) == (
        "G0 F0 G1 F1 R1 G2 F2 R2 G3 F3 R3 R0 "  # forward
        "G0 B0 G3 B3 S3 R3 G2 B2 S2 R2 G1 B1 S1 R1 S0 R0"  # backward: gradients are reduced (S) before the release
    )


def test_with_a_window_over_the_model_each_unit_is_gathered_once_and_kept() -> None:
    assert str(schedule_of(window=10**9)) == "G0 F0 G1 F1 G2 F2 G3 F3 B0 B3 S3 R3 B2 S2 R2 B1 S1 R1 S0 R0"


def test_a_window_between_keeps_the_units_that_backward_needs_first() -> None:
    schedule = schedule_of(window=250)
    assert schedule.kept == {0, 3, 2}
    assert str(schedule) == "G0 F0 G1 F1 R1 G2 F2 G3 F3 B0 B3 S3 R3 B2 S2 R2 G1 B1 S1 R1 S0 R0"


def test_ahead_gathers_the_next_unit_before_it_is_needed_while_the_window_allows() -> None:
    assert str(schedule_of(window=210, ahead=100, keep=-1)) == (
        "G0 G1 F0 G2 F1 R1 G3 F2 R2 F3 R3 R0 G0 G3 B0 G2 B3 S3 R3 G1 B2 S2 R2 B1 S1 R1 S0 R0"
    )
    assert str(schedule_of(window=209, ahead=100, keep=-1)).startswith("G0 G1 F0 F1 R1 G2 F2"), (
        "the window closes first"
    )
    one_ahead = str(schedule_of(window=10**9, ahead=100, keep=-1))
    assert str(schedule_of(window=10**9, ahead=1, keep=-1)) == one_ahead, "the next unit, whatever its size"
    assert str(schedule_of(window=10**9, ahead=0, keep=-1)) == str(schedule_of(window=0))


def test_without_overlap_nothing_is_gathered_ahead() -> None:
    ahead = schedule_of(window=210, ahead=100, keep=-1, overlap=False)
    assert str(ahead) == str(schedule_of(window=210, ahead=0, keep=-1))


def test_keep_counts_the_elements_between_forward_and_backward_of_a_unit() -> None:
    # Unit 3 is used again after the root (2 x 10 elements), unit 2 after the root and unit 3 (2 x 110).
    assert [sorted(schedule_of(10**9, keep=keep).kept) for keep in (-1, 0, 19, 20, 219, 220, 10**9)] == [
        [], [0], [0], [0, 3], [0, 3], [0, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip


def test_an_agreed_order_is_walked_forward_and_its_reverse_backward_with_the_root_first_in_both() -> None:
    schedule = plan_schedule(SIZES, [0, 2, 1, 3], PlanSettings(window_numel=0))
    assert schedule.forward.order == (0, 2, 1, 3)
    assert schedule.backward.order == (0, 3, 1, 2)
    assert [schedule.backward.position[unit] for unit in (0, 3, 1, 2)] == [0, 1, 2, 3]


def test_units_that_shard_nothing_cost_no_window() -> None:
    schedule = schedule_of(window=100, sizes=[0, 0, 100])
    assert schedule.kept == {0, 1, 2}


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_uses_only_what_is_gathered_and_releases_what_it_gathers(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(0, 50) for _ in range(draw.randint(1, 9))]
    order = [0, *draw.sample(range(1, len(sizes)), len(sizes) - 1)]
    window, ahead, keep = (draw.choice([0, 10, 60, 150, 10**9]) for _ in range(3))
    settings = PlanSettings(window_numel=window, ahead_numel=ahead, keep_numel=keep)
    schedule = plan_schedule(sizes, order, settings)
    live: set[int] = set()
    for action in schedule.actions():
        if action.kind is Kind.GATHER:
            assert action.unit not in live
            live.add(action.unit)
        else:
            assert action.unit in live, f"{action} in {schedule}"
            live -= {action.unit} if action.kind is Kind.RELEASE else set()
    assert not live
    needed = sizes[0] + max(sizes[1:], default=0)  # the root and a block, whatever the window says
    assert schedule.peak_live_numel(sizes) <= max(window, needed)


def test_the_peak_is_the_root_and_one_block_without_a_window_and_the_model_with_a_wide_one() -> None:
    assert schedule_of(window=0).peak_live_numel(SIZES) == 110
    assert schedule_of(window=250).peak_live_numel(SIZES) == 210
    assert schedule_of(window=10**9).peak_live_numel(SIZES) == 310
