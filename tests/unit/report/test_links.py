"""The report of a link per step: bytes, speed, overlap, and the bound by transfer and compute."""

from __future__ import annotations

from typing import cast

import pytest

from deepseek_zero.base.meter import AWAY, Meter, PhaseClock
from deepseek_zero.report.links import links_of
from deepseek_zero.tiers.tier import Tier, TierMemory, Tiers, TransferMeter


class Moved:
    """Counters of one rank's disk after four steps."""

    def __init__(self) -> None:
        self.reserved_bytes = 7
        self.traffic = TransferMeter()
        self.traffic.read_bytes, self.traffic.written_bytes = 400, 200
        self.traffic.seconds, self.traffic.waited_seconds = 6.0, 1.5


def tiers() -> Tiers:
    return Tiers({Tier.NVME: cast("TierMemory", Moved())})


def meter(**seconds: float) -> Meter:
    clock = PhaseClock()
    clock.seconds, clock.steps = (
        {"forward": 3.0, "backward": 3.5, "data loading and user code": 0.5, AWAY: 1.5, **seconds},
        4,
    )
    return Meter(wait_seconds={"gather": 0.5, "rows": 0.5}, clock=clock)


def test_a_link_is_reported_per_step() -> None:
    (link,) = links_of(tiers(), meter())
    assert (link.name, link.resting_bytes) == ("disk", 7)
    assert (link.read_bytes, link.written_bytes, link.busy_seconds, link.waited_seconds) == (
        100,
        50,
        1.5,
        0.375,
    )
    assert (link.rate, link.hidden) == (100, 0.75)
    assert (link.step_seconds, link.working_seconds) == (8.5 / 4, 6.0 / 4), (
        "work is what is left of a step without waits"
    )


def test_the_bound_is_the_larger_of_link_and_work() -> None:
    (link,) = links_of(tiers(), meter())
    assert (link.best_rate, link.needed_seconds) == (100, 1.5), (
        "the mean, where no stretch was long enough"
    )
    assert link.bound_seconds == 1.5
    assert link.reached == pytest.approx(1.5 / 2.125)
    (link,) = links_of(tiers(), meter(forward=7.0))
    assert link.bound_seconds == link.working_seconds == 2.5
    slow = tiers()
    slow.memories[Tier.NVME].traffic.best_rate = 300.0
    (link,) = links_of(slow, meter())
    assert (link.needed_seconds, link.bound_seconds) == (0.5, 1.5)


def test_before_there_are_two_steps_there_is_no_figure() -> None:
    (link,) = links_of(tiers(), Meter())
    assert link.resting_bytes == 7
    assert not any(
        (
            link.moved_bytes,
            link.rate,
            link.hidden,
            link.needed_seconds,
            link.bound_seconds,
            link.reached,
        )
    )
