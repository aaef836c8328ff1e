"""Timers report the mean per call and discard a call that raised an exception."""

from __future__ import annotations

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.report import timers
from deepseek_zero.report.timers import Timers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by `clock[0]`, which the test sets."""
    hand = [0.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: hand[0])
    return hand


def test_the_report_gives_the_mean_of_each_used_timer_in_the_order_of_a_step(
    clock: list[float],
) -> None:
    found = Timers()
    for name, seconds in (("step", 0.5), ("forward", 0.1), ("forward", 0.3)):
        with found.timed(name):
            clock[0] += seconds
    assert found.means() == pytest.approx({"forward": 0.2, "step": 0.5})
    assert found.report() == "mean time: forward 200 ms | step 500 ms"


def test_a_report_resets_the_window_of_measurement(clock: list[float]) -> None:
    found = Timers()
    with found.timed("forward"):
        clock[0] += 1.0
    found.report()
    assert found.report() == "mean time: nothing timed yet"


def test_a_call_that_raised_is_not_counted_and_the_next_one_is(clock: list[float]) -> None:
    found = Timers()
    with pytest.raises(ZeroDivisionError), found.timed("forward"):
        clock[0] += 100.0
        raise ZeroDivisionError
    with found.timed("forward"):
        clock[0] += 2.0
    assert found.means() == pytest.approx({"forward": 2.0})


def test_stopping_a_timer_before_its_start_raises_an_error() -> None:
    with pytest.raises(UsageError, match="'reduce' was stopped before it was started"):
        Timers()["reduce"].stop()


def test_custom_timers_follow_the_standard_ones(clock: list[float]) -> None:
    found = Timers()
    for name in ("load", "step"):
        with found.timed(name):
            clock[0] += 1.0
    assert list(found.means()) == ["step", "load"]
