"""Test the report of step times: its parts, the advice about waits, and the overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepseek_zero.base.meter import AWAY, Event, Meter, PhaseClock
from deepseek_zero.report.explain import (
    Advice,
    exposed_seconds,
    overlap_share,
    shares,
    under_way_seconds,
    what_moved,
    where_steps_went,
)
from deepseek_zero.report.links import MemoryLink
from deepseek_zero.tiers.tier import TransferEvent

PHASES = {"forward": 3.0, "backward": 5.0, "optimizer": 1.5, "data loading and user code": 0.5}


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


def test_a_report_before_two_steps_has_no_figures() -> None:
    assert where_steps_went(Meter(), Advice(0, 0, 0, True)) == [
        "steps: measured from the second step on"
    ]
    assert shares(Meter()) == {}


@pytest.mark.parametrize(
    ("lane", "advice", "sentence"),
    [
        (
            "gather",
            Advice(0, 9**9, 5_000_000, False),
            "stage3_prefetch_bucket_size of 10.0M elements",
        ),
        (
            "gather",
            Advice(10_000_000, 14_000_000, 5_000_000, False),
            "stage3_max_live_parameters of 15.0M elements",
        ),
        ("gather", Advice(10_000_000, 15_000_000, 5_000_000, False), "a larger micro-batch"),
        ("gather", Advice(0, 9**9, 5_000_000, True), "another rank is slower"),
        ("reduce", Advice(0, 0, 0, False), "reductions are slower"),
        ("rows", Advice(0, 0, 0, False), "another rank is slower"),
    ],
)
def test_a_significant_wait_has_advice(lane: str, advice: Advice, sentence: str) -> None:
    lines = where_steps_went(meter(**{lane: 0.5}), advice)
    assert lines[0].startswith("steps: 2.50 s each over the last 4: computing")
    assert len(lines) == 2
    assert sentence in lines[1]
    assert len(where_steps_went(meter(**{lane: 0.1}), advice)) == 1


def test_overlap_is_the_share_of_transfer_time_without_waits() -> None:
    assert overlap_share([]) == 0.0
    hidden = Event("reduce", "a", 0.0, 4.0, (5.0, 5.5))
    half = Event("gather", "b", 6.0, 8.0, (7.0, 8.5))
    assert overlap_share([hidden]) == 1.0
    assert overlap_share([half]) == 0.5
    assert overlap_share([hidden, half]) == pytest.approx(5 / 6)
    assert overlap_share([hidden, Event("gather", "c", 1.0, 2.0, (1.0, 2.0))]) == 0.75, (
        "one waits while another flies"
    )


def test_waits_for_other_memories_are_a_part_of_their_own() -> None:
    away = meter(gather=1.0)
    away.clock.seconds[AWAY] = 2.5
    assert shares(away)[AWAY] == 0.2
    assert sum(shares(away).values()) == pytest.approx(1.0)


def test_transfers_overlap_while_this_rank_waits_for_nothing() -> None:
    transfer = TransferEvent("a", 10, True, 0.0, 2.0, 6.0, (5.0, 6.5))
    later = TransferEvent("b", 10, False, 0.0, 10.0, 14.0)
    unfinished = TransferEvent("c", 10, False, 13.0, 13.5)
    transfers = [transfer, later, unfinished]
    assert overlap_share([transfer]) == 0.75
    assert (under_way_seconds(transfers), exposed_seconds(transfers)) == (8.0, 1.0)
    collective = Event("gather", "d", 1.0, 3.0, (2.5, 3.0))
    assert exposed_seconds(transfers, [collective]) == 1.5, "it stood still for another rank"
    assert overlap_share(transfers, [collective]) == pytest.approx(6.5 / 8)
    assert overlap_share([], [collective]) == 0.0


DISK = MemoryLink("disk", 3 << 30, 2 << 30, 1 << 30, 3.0, 0.75, 2e9, 2.5, 4.0)


def test_a_link_is_reported_with_bytes_speed_overlap_and_bound() -> None:
    assert what_moved([DISK]) == [
        "disk: stores 3.00 GiB; a step reads 2.00 GiB and writes 1.00 GiB at 1.07 GB/s, 75% "
        "of that time hidden, 750 ms of waiting",
        "  lower bound 2.50 s per step, 62% of it reached: the disk at its highest rate "
        "(2.00 GB/s) needs 1.61 s, the other work 2.50 s",
        "  waiting for the disk could be hidden: a larger offload_optimizer.buffer_count lets "
        "updates run further ahead, a larger stage3_prefetch_bucket_size gathers",
    ]


def test_advice_is_about_the_link_that_is_waited_for_most_and_only_if_it_matters() -> None:
    host = replace(DISK, name="host", waited_seconds=1.0, best_rate=1e9)
    lines = what_moved([host, DISK])
    assert len(lines) == 5
    assert lines[-1] == (
        "  waiting for the host cannot be hidden: more tokens per step add compute that "
        "overlaps with it"
    )
    assert len(what_moved([replace(DISK, waited_seconds=0.08)])) == 2


def test_an_unused_link_is_reported_with_the_states_in_its_memory() -> None:
    assert what_moved([MemoryLink("host", 3 << 30)]) == ["host: stores 3.00 GiB"]
    assert what_moved([]) == []
