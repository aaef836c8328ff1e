"""Preemption signals are recorded, passed to the previous handler, or ignored, as appropriate."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepseek_zero.base import launch
from deepseek_zero.base.errors import UsageError
from deepseek_zero.config.schema import SaveOnSignal
from deepseek_zero.engine.preemption import Preemption
from deepseek_zero.optim.step_message import StepMessage

NUMBER = signal.SIGUSR2
SETTINGS = SaveOnSignal(path="nowhere", signals=("SIGUSR2",))


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Return the list of signals that a user's handler has received."""
    found: list[int] = []
    before = signal.signal(NUMBER, lambda number, _: found.append(number))
    yield found
    signal.signal(NUMBER, before)


def sent(preemption: Preemption) -> float:
    """Return the signal that this rank sends with its next step message."""
    message = StepMessage()
    preemption.add_to(message)
    return message.pack()[0]


def test_a_signal_is_recorded_and_the_users_handler_is_called(heard: list[int]) -> None:
    preemption, own = Preemption(SETTINGS), signal.getsignal(NUMBER)
    preemption.watch()
    assert sent(preemption) == 0
    signal.raise_signal(NUMBER)
    assert (sent(preemption), heard) == (NUMBER, [NUMBER])
    preemption.release()
    assert signal.getsignal(NUMBER) is own


def test_a_handler_installed_later_remains_when_the_librarys_is_removed(heard: list[int]) -> None:
    first, second = Preemption(SETTINGS), Preemption(SETTINGS)
    first.watch()
    second.watch()
    first.release()
    signal.raise_signal(NUMBER)
    assert (sent(first), sent(second), heard) == (0, NUMBER, [NUMBER])
    second.release()
    signal.raise_signal(NUMBER)
    assert heard == [NUMBER, NUMBER]


def test_the_end_of_the_survivors_is_no_request(
    heard: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = str(tmp_path / "attempt_1")
    monkeypatch.setenv(launch.ATTEMPT, attempt)
    preemption = Preemption(SETTINGS)
    preemption.watch()
    assert launch.is_marked(attempt, launch.SAVES + "SIGUSR2")
    launch.mark(attempt, launch.ENDING)
    signal.raise_signal(NUMBER)
    assert (sent(preemption), heard) == (0, [NUMBER])
    preemption.release()


@pytest.mark.parametrize("whole_job", [False, True])
def test_a_forked_worker_dies_of_a_signal_of_its_own_and_survives_one_for_the_whole_job(
    whole_job: bool,
) -> None:
    preemption = Preemption(SETTINGS)
    preemption.watch()
    if whole_job:
        signal.raise_signal(NUMBER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's data loaders also fork a process with threads
        child = os.fork()
    if child == 0:
        os.kill(os.getpid(), NUMBER)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    preemption.release()
    assert os.waitstatus_to_exitcode(status) == (0 if whole_job else -NUMBER)
    assert sent(preemption) == (NUMBER if whole_job else 0)


def test_a_thread_other_than_the_main_one_cannot_install_signal_handlers() -> None:
    raised: list[Exception] = []

    def watch() -> None:
        try:
            Preemption(SETTINGS).watch()
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "needs the main thread" in str(raised[0])


def test_a_signal_handler_installed_outside_python_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "getsignal", _unknown)
    with pytest.raises(UsageError, match="SIGUSR2 has a handler that was not set from Python"):
        Preemption(SETTINGS).watch()


def _unknown(number: int) -> Any:
    return None
