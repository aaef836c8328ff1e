"""A rank is reported as slow if its own time exceeds the median in three consecutive windows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from deepseek_zero.base.meter import BETWEEN, Meter
from deepseek_zero.engine import stragglers
from deepseek_zero.engine.stragglers import OWN_SECONDS, WAITS, WINDOW, Stragglers
from deepseek_zero.optim.step_message import Fields, StepMessage
from deepseek_zero.report.explain import OWN

EQUAL = [(1.0, 0.2, 0.0, 0.1, *[0.07] * WINDOW)] * 4  # the last entries are the waits of each step


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the list of log messages; the clock advances by two seconds per window."""
    said: list[str] = []
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(stragglers, "log_once", lambda message, level: said.append(message))
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: float(next(clock)))
    yield said


def fields_of(rows: list[tuple[float, ...]]) -> Fields:
    """Return the fields of a step message with these seconds and waits per rank."""
    return {
        OWN_SECONDS: [row[: len(OWN)] for row in rows],
        WAITS: [row[len(OWN) :] for row in rows],
    }


def sent(found: Stragglers, step: int) -> tuple[float, ...]:
    """Return the values that this rank sends in a step."""
    message = StepMessage()
    found.add_to(message, step)
    return tuple(message.pack())


def slower(rank: int, part: int, by: float) -> list[tuple[float, ...]]:
    rows: list[Any] = [list(row) for row in EQUAL]
    rows[rank][part] += by
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("part", range(4))
def test_a_rank_is_named_once_with_its_part_in_the_third_window(told: list[str], part: int) -> None:
    found = Stragglers(Meter(), ["h0", "h1"])
    for window in range(1, 6):
        found.compare(WINDOW * window, fields_of(slower(2, part, 0.4)))
        assert len(told) == (window >= 3)
    assert told[0].startswith(
        f"step {3 * WINDOW}: rank 2 is slow, and the others wait for it: {OWN[part]} took "
    )
    found.compare(6 * WINDOW, fields_of(EQUAL))
    for window in range(7, 10):
        found.compare(WINDOW * window, fields_of(slower(2, part, 0.4)))
    assert len(told) == 2, "it was well in between"


def test_a_rank_that_is_slow_now_in_one_part_and_now_in_another_is_named(told: list[str]) -> None:
    found = Stragglers(Meter(), ["h0", "h1"])
    for window in range(1, 6):
        found.compare(WINDOW * window, fields_of(slower(2, window % 2, 0.4)))
    assert told == [
        f"step {3 * WINDOW}: rank 2 is slow, and the others wait for it: its own work "
        f"took 1.70 s of {WINDOW} steps, 1.30 s on the median rank, the third time in a row."
    ]


@pytest.mark.parametrize(
    "rows",
    [
        EQUAL,
        slower(1, 0, 0.19),  # within 1.2 times the median
        slower(1, 2, 0.09),  # less than a tenth of the window
        [(3.0, 0.6, 0.0, 0.3, *[0.0] * WINDOW)] * 4,
    ],
)
def test_ranks_that_are_alike_are_not_named(told: list[str], rows: list[tuple[float, ...]]) -> None:
    found = Stragglers(Meter(), ["h0", "h1"])
    for window in range(10):
        found.compare(window, fields_of(rows))
    assert told == []


def test_an_occasional_slow_window_is_not_reported(told: list[str]) -> None:
    found, chance = Stragglers(Meter(), ["h0", "h1"]), random.Random(0)
    for window in range(1000):
        found.compare(
            window, fields_of(slower(chance.randrange(4), 0, 1.0) if window % 3 else EQUAL)
        )
    assert told == []


def test_the_exchanged_numbers_are_the_seconds_since_the_last_exchange_without_waits() -> None:
    meter = Meter()
    found = Stragglers(meter, ["h0", "h1"])
    assert [sent(found, step) for step in range(1, WINDOW)] == [()] * (WINDOW - 1)
    meter.clock.seconds.update({"forward": 3.0, "backward": 5.0, "optimizer": 1.0, BETWEEN: 0.5})
    meter.waited("gather", 1.0)
    meter.waited("reduce", 2.0)
    meter.waited("rows", 0.25)
    meter.sum_seconds = 0.5
    assert sent(found, WINDOW) == (4.5, 0.75, 0.0, 0.5, *[0.0] * (WINDOW - 1), 3.25)
    meter.clock.seconds["forward"] += 2.0
    meter.waited("gather", 0.5)
    assert sent(found, WINDOW + 2) == ()
    assert sent(found, 2 * WINDOW) == (1.5, 0.0, 0.0, 0.0, 0.0, 0.5, *[0.0] * (WINDOW - 2))
    meter.reset_seconds()
    meter.clock.seconds.clear()
    assert sent(found, 3 * WINDOW) == (0.0,) * (4 + WINDOW), "the meter began anew"


def waiting(*waits: float) -> list[tuple[float, ...]]:
    """Return rows of ranks that wait this long in each step; a window takes two seconds."""
    return [(0.1, 0.1, 0.0, 0.1, *[each] * WINDOW) for each in waits]


def test_a_link_that_all_ranks_wait_for_is_named_instead_of_a_rank(told: list[str]) -> None:
    found = Stragglers(Meter(), ["h0", "h1"])
    for window in range(1, 6):
        found.compare(WINDOW * window, fields_of(waiting(1.5 / WINDOW, 1.1 / WINDOW)))
        assert len(told) == (window >= 3)
        assert bool(found.link) == (window >= 3) and found.link in "".join(told)
    found.compare(WINDOW * 6, fields_of(waiting(0.0, 0.0)))
    assert not found.link
    assert told == [
        f"step {3 * WINDOW}: steps wait for the link between h0 and h1: all ranks waited at once "
        f"for 55% of the time of {WINDOW} steps, the third time in a row."
    ]


def in_turn(first: int) -> tuple[float, ...]:
    """Return the row of a rank that waits in every second step."""
    return (0.1, 0.1, 0.0, 0.1, *[0.27 if step % 2 == first else 0.0 for step in range(WINDOW)])


def test_ranks_that_wait_for_each_other_in_turn_wait_for_no_link(told: list[str]) -> None:
    found = Stragglers(Meter(), ["h0", "h1"])
    for window in range(1, 9):
        found.compare(WINDOW * window, fields_of([in_turn(0), in_turn(1)]))
    assert told == []
