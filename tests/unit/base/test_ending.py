"""At its end, a process waits for threads that are still running."""

from __future__ import annotations

import threading
import time

import pytest

from deepseek_zero.base import ending


def busy(until: float) -> threading.Thread:
    def work() -> None:
        while time.monotonic() < until:
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_end_waits_for_a_thread_that_still_runs() -> None:
    thread = busy(time.monotonic() + 0.2)
    ending.drain_threads()
    assert not thread.is_alive()


def test_the_end_waits_for_no_thread_that_sleeps_and_for_none_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    sleeper = threading.Thread(target=release.wait, daemon=True)
    sleeper.start()
    began = time.monotonic()
    ending.drain_threads()
    assert time.monotonic() - began < ending.MOST_EXIT_SECONDS / 2
    monkeypatch.setattr(ending, "MOST_EXIT_SECONDS", 0.1)
    thread = busy(time.monotonic() + 0.5)
    ending.drain_threads()
    assert thread.is_alive() and sleeper.is_alive()
    release.set()
    thread.join()
