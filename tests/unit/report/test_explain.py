"""Where a step went: the parts add up, a wait that matters has a sentence, overlap is what was not stood still for."""

from __future__ import annotations

from typing import cast

import pytest

from deepseek_zero.base.clock import PhaseClock
from deepseek_zero.comm.meter import Event, Meter
from deepseek_zero.report.explain import Advice, overlap_share, shares, what_moved, where_steps_went
from deepseek_zero.tiers.tier import Memory, Tier, Tiers, Traffic

PHASES = {"forward": 3.0, "backward": 5.0, "optimizer": 1.5, "outside": 0.5}


def meter(**waits: float) -> Meter:
    clock = PhaseClock()
    clock.seconds, clock.steps = dict(PHASES), 4
    return Meter(wait_seconds=dict(waits), sum_seconds=0.5, clock=clock)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    parts = shares(meter(gather=1.0, reduce=0.5, rows=0.25))
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["computing"] == pytest.approx(0.6)
    assert parts["the optimizer"] == pytest.approx(0.125)
    assert list(parts) == sorted(parts, key=lambda name: -parts[name])


def test_before_there_are_two_steps_it_says_so() -> None:
    assert where_steps_went(Meter(), Advice(0, 0, 0, True)) == ["steps: measured from the second one on"]
    assert shares(Meter()) == {}


@pytest.mark.parametrize(
    ("lane", "advice", "sentence"),
    [
        ("gather", Advice(0, 9**9, 5_000_000, False), "stage3_prefetch_bucket_size of 10.0M elements"),
        ("gather", Advice(10_000_000, 14_000_000, 5_000_000, False), "stage3_max_live_parameters of 15.0M elements"),
        ("gather", Advice(10_000_000, 15_000_000, 5_000_000, False), "a larger micro-batch"),
        ("gather", Advice(0, 9**9, 5_000_000, True), "another rank comes later"),
        ("reduce", Advice(0, 0, 0, False), "gradients travel slower"),
        ("rows", Advice(0, 0, 0, False), "another rank comes later"),
    ],
)
def test_a_wait_that_matters_comes_with_advice(lane: str, advice: Advice, sentence: str) -> None:
    lines = where_steps_went(meter(**{lane: 0.5}), advice)
    assert lines[0].startswith("steps: 2.50 s each over the last 4: computing")
    assert len(lines) == 2
    assert sentence in lines[1]
    assert len(where_steps_went(meter(**{lane: 0.1}), advice)) == 1


def test_overlap_is_the_share_of_what_was_under_way_that_nobody_stood_still_for() -> None:
    assert overlap_share([]) == 0.0
    hidden = Event("reduce", "a", 0.0, 4.0, (5.0, 5.5))
    half = Event("gather", "b", 6.0, 8.0, (7.0, 8.5))
    assert overlap_share([hidden]) == 1.0
    assert overlap_share([half]) == 0.5
    assert overlap_share([hidden, half]) == pytest.approx(5 / 6)
    assert overlap_share([hidden, Event("gather", "c", 1.0, 2.0, (1.0, 2.0))]) == 0.75, "one waits while another flies"


class Moved:
    """What a disk of one rank would tell."""

    def __init__(self, *, waited: float) -> None:
        self.reserved_bytes = 3 << 30
        self.traffic = Traffic()
        self.traffic.read_bytes, self.traffic.written_bytes = 4 << 30, 2 << 30
        self.traffic.seconds, self.traffic.waited_seconds = 6.0, waited


def test_a_disk_is_told_by_bytes_speed_and_what_was_hidden() -> None:
    lines = what_moved(Tiers({Tier.NVME: cast("Memory", Moved(waited=1.5))}), steps=2)
    assert lines[0] == (
        "disk: 3.00 GiB rest there; a step reads 2.00 GiB and writes 1.00 GiB at 1.07 GB/s, "
        "75% of that time beside something else"
    )
    assert "waiting for the disk 750 ms a step" in lines[1]
    assert len(what_moved(Tiers({Tier.NVME: cast("Memory", Moved(waited=0.1))}), steps=2)) == 1


def test_the_host_is_told_by_what_rests_there() -> None:
    assert what_moved(Tiers({Tier.HOST: cast("Memory", Moved(waited=0.0))}), steps=2) == ["host: 3.00 GiB rest there"]
