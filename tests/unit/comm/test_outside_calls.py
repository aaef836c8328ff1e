"""Tests of the thread that watches for calls outside every engine."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

import pytest

from deepseek_zero.comm import outside_calls
from deepseek_zero.comm.flight_recorder import FlightRecorder


def test_frames_of_another_thread_are_read_without_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection would let the other thread return from the frame that is being read."""
    states: list[bool] = []
    has_looked = threading.Event()
    read = sys._current_frames

    def current_frames() -> dict[int, FrameType]:
        if threading.current_thread().name == "deepseek-zero-outside":
            states.append(gc.isenabled())
            has_looked.set()
        return read()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    monkeypatch.setattr(outside_calls, "_LOOK_SECONDS", 0.01)
    recorder = FlightRecorder.__new__(FlightRecorder)
    outside_calls.watch_outside_calls(recorder)
    assert has_looked.wait(30)
    del recorder  # ends the thread
    for thread in threading.enumerate():
        if thread.name == "deepseek-zero-outside":
            thread.join(30)
    assert not any(states)
    assert gc.isenabled()
