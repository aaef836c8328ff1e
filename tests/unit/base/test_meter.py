"""The meter measures one phase at a time and excludes the first step."""

from __future__ import annotations

import time

import pytest

from deepseek_zero.base.meter import BETWEEN, PhaseClock


def test_phases_add_up_to_the_time_that_passed_and_the_first_step_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = PhaseClock()
    for step in range(3):
        for phase, seconds in (
            ("forward", 2.0),
            (BETWEEN, 0.5),
            ("backward", 4.0),
            ("optimizer", 1.0),
        ):
            clock.enter(phase)
            now += seconds
        assert clock.end_step() is (step == 0)
        assert clock.steps == step
    assert clock.seconds == {BETWEEN: 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}
