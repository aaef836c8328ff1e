"""The transfer meter of a tier counts bytes, times and the best speed, and logs fetches."""

from __future__ import annotations

import time

import pytest

from deepseek_zero.base.meter import AWAY
from deepseek_zero.tiers.tier import STRETCH_BYTES, TransferEvent, TransferMeter


class Clock:
    """A clock that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def moved(
    traffic: TransferMeter, clock: Clock, nbytes: int, seconds: float, *, is_read: bool = True
) -> TransferEvent:
    event = traffic.request("values", nbytes, is_read=is_read)
    with traffic.transfer(event):
        clock.passes(seconds)
    return event


def test_the_time_of_two_concurrent_transfers_is_counted_once(clock: Clock) -> None:
    traffic = TransferMeter()
    with traffic.transfer(traffic.request("a", 10, is_read=True)):
        clock.passes(1)
        with traffic.transfer(traffic.request("b", 20, is_read=False)):
            clock.passes(2)
        assert traffic.seconds == 3, "counted while the link is never idle"
    clock.passes(5)
    moved(traffic, clock, 30, 4)
    assert (traffic.read_bytes, traffic.written_bytes, traffic.seconds) == (40, 20, 7)
    traffic.reset()
    assert (traffic.read_bytes, traffic.written_bytes, traffic.seconds) == (0, 0, 0)


def test_the_best_speed_is_that_of_a_long_stretch(clock: Clock) -> None:
    traffic = TransferMeter()
    moved(traffic, clock, STRETCH_BYTES // 2, 1e-3)  # a burst
    assert traffic.best_rate == 0
    clock.passes(3)
    moved(traffic, clock, STRETCH_BYTES // 2, 0.5)
    assert traffic.best_rate == pytest.approx(STRETCH_BYTES / 0.501)
    moved(traffic, clock, STRETCH_BYTES, 0.25)
    moved(traffic, clock, STRETCH_BYTES, 1.0)
    assert traffic.best_rate == pytest.approx(STRETCH_BYTES / 0.25)


def test_a_wait_is_a_phase_of_its_own(clock: Clock) -> None:
    traffic = TransferMeter()
    traffic.clock.enter("forward")
    clock.passes(1)
    event = moved(traffic, clock, 10, 0)
    with pytest.raises(OSError), traffic.waiting(event):
        clock.passes(2)
        raise OSError
    clock.passes(4)
    traffic.clock.enter("backward")
    assert traffic.waited_seconds == traffic.clock.seconds[AWAY] == 2
    assert traffic.clock.seconds["forward"] == 5


def test_the_log_has_the_fetches_made_while_recording(clock: Clock) -> None:
    traffic = TransferMeter()
    moved(traffic, clock, 10, 1)
    traffic.events = []
    asked = traffic.request("a", 20, is_read=False)
    assert asked.under_way == asked.waited == (0.0, 0.0), "not yet"
    clock.passes(1)
    with traffic.transfer(asked):
        clock.passes(2)
    with traffic.waiting(asked):
        clock.passes(0.5)
    (event,) = traffic.events
    assert (event.what, event.nbytes, event.is_read, event.issued) == ("a", 20, False, 101)
    assert (event.under_way, event.waited) == ((102, 104), (104, 104.5))
