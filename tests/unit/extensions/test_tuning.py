"""A tuner increases a size while waits decrease and reverts the last change otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_zero.config import Facts, resolve
from deepseek_zero.config.load import load
from deepseek_zero.engine.settings import plan_settings_of
from deepseek_zero.extensions.tuning import PERIOD, Knob, Tuner
from deepseek_zero.planner.plan_settings import PlanSettings


def turned(knob: Knob, *shares: float) -> list[int]:
    """Return the value of the knob after each measurement."""
    values = []
    for share in shares:
        if not knob.is_done:
            knob.adjust(share)
        values.append(knob.value)
    return values


@pytest.mark.parametrize(
    "shares, values",
    [
        ([0.019, 0.5], [10, 10]),  # no gain is possible at first: never changed
        ([0.20, 0.10, 0.05, 0.01, 0.5], [40, 80, 100, 100, 100]),  # floor, doubled, ceiling
        ([0.20, 0.19, 0.5], [40, 10, 10]),  # no improvement: reverted for good
        ([0.20, 0.10, 0.095, 0.5], [40, 80, 40, 40]),
        ([0.20, 0.01, 0.5], [40, 40, 40]),  # good enough
    ],
)
def test_a_tuned_size_grows_while_the_wait_decreases(
    shares: list[float], values: list[int]
) -> None:
    assert turned(Knob("ahead_numel", 10, floor=40, ceiling=100), *shares) == values


class World:
    """Two ranks that wait for a given share of the time: this one `own`, the other one `other`."""

    def __init__(self, own: float, other: float, *, in_place: bool = False, size: int = 2) -> None:
        self.size, self.reads_in_place, self.asked = size, in_place, 0
        self.own, self.other = own, other
        self.meter = SimpleNamespace(
            wait_seconds={"gather": 0.0}, clock=SimpleNamespace(seconds={"forward": 0.0})
        )

    def step(self) -> None:
        self.meter.wait_seconds["gather"] += self.own
        self.meter.clock.seconds["forward"] += 1.0

    def all_gather_rows(self, row: torch.Tensor, what: str) -> torch.Tensor:
        self.asked += 1
        return torch.stack([row, torch.tensor([self.other], dtype=row.dtype)])


def steps(tuner: Tuner, world: Any, number: int) -> list[dict[str, int]]:
    changes = []
    for _ in range(number):
        world.step()
        if changed := tuner.choose():
            changes.append(changed)
    return changes


def test_the_slowest_rank_decides_for_all() -> None:
    settings = PlanSettings(ahead_numel=10, window_numel=1000, tunes=("ahead_numel",))
    for own, other in ((0.0, 0.3), (0.3, 0.0)):
        world: Any = World(own, other)
        tuner = Tuner(settings, [30, 50, 40], world)
        first = steps(tuner, world, PERIOD)
        assert [change["ahead_numel"] for change in first] == [100], "two of the largest units"
        assert [change["ahead_numel"] for change in steps(tuner, world, PERIOD)] == [10], (
            "no better: as it was"
        )
        assert steps(tuner, world, 5 * PERIOD) == []
        assert world.asked == 2, "nothing is asked once it is done"


@pytest.mark.parametrize(
    "settings, world",
    [
        (PlanSettings(), World(0.5, 0.5)),  # no key is tuned
        (PlanSettings(tunes=("ahead_numel",), overlap=False), World(0.5, 0.5)),
        (PlanSettings(tunes=("ahead_numel",)), World(0.5, 0.5, in_place=True)),
        (PlanSettings(tunes=("ahead_numel",)), World(0.5, 0.5, size=1)),
    ],
)
def test_no_question_is_sent_without_a_possible_gain(settings: PlanSettings, world: Any) -> None:
    tuner = Tuner(settings, [30, 50], world)
    assert steps(tuner, world, 3 * PERIOD) == []
    assert world.asked == 0


def test_only_unset_keys_are_tuned() -> None:
    def tunes(**zero: Any) -> tuple[str, ...]:
        return plan_settings_of(
            resolve(load({"zero_optimization": {"stage": 3, **zero}}), Facts())
        ).tunes

    assert tunes() == ("ahead_numel", "bucket_numel")
    assert tunes(stage3_prefetch_bucket_size="auto", reduce_bucket_size=7) == ("ahead_numel",)
    assert tunes(stage3_prefetch_bucket_size=0, reduce_bucket_size=7) == ()
