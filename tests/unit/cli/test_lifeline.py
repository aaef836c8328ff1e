"""The launcher detects from its standard streams that its parent is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from deepseek_zero.base.errors import UsageError
from deepseek_zero.cli import lifeline
from deepseek_zero.cli.lifeline import STREAMS, Lifeline, are_closed, is_connected


@pytest.fixture
def ends() -> tuple[int, int]:
    """Return the read end and the write end of a pipe."""
    return os.pipe()


def test_a_pipe_is_closed_once_its_other_end_is(ends: tuple[int, int]) -> None:
    reading, writing = ends
    os.write(writing, b"left unread")
    assert is_connected(reading) and is_connected(writing)
    assert not are_closed([reading]) and not are_closed([writing]) and not are_closed(ends)
    os.close(writing)
    assert are_closed([reading])
    os.close(reading)
    assert not is_connected(reading)


def test_output_without_a_reader_is_closed(ends: tuple[int, int]) -> None:
    reading, writing = ends
    os.close(reading)
    assert are_closed([writing])
    os.close(writing)


def test_an_input_that_ends_does_not_close_the_output_over_the_same_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ssh -n host command 2>&1` leads to this state.

    sshd uses one socket for all three streams and shuts down its own side for writing.
    """
    ours, theirs = socket.socketpair()
    copy = os.dup(ours.fileno())
    monkeypatch.setattr(lifeline, "INPUT", ours.fileno())
    theirs.shutdown(socket.SHUT_WR)
    assert are_closed([ours.fileno()]) and not are_closed([copy])
    assert not are_closed([ours.fileno(), copy])
    theirs.close()
    assert are_closed([ours.fileno(), copy])
    os.close(copy)
    ours.close()


def test_a_file_a_terminal_and_null_are_no_connection() -> None:
    with open(os.devnull) as null, open(__file__) as file:
        assert not is_connected(null.fileno()) and not is_connected(file.fileno())
    primary, secondary = os.openpty()
    assert not is_connected(secondary)
    os.close(primary)
    os.close(secondary)


def test_streams_that_a_launcher_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = {0, 1, 2}
    monkeypatch.setattr(lifeline, "is_connected", connected.__contains__)
    # The test suite itself may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert Lifeline.of_this_process(needs_input=True).streams == (0,)
        assert Lifeline.of_this_process(needs_input=False).streams == STREAMS
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert Lifeline.of_this_process(needs_input=False).streams == (), "nohup"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        connected.remove(2)
        assert Lifeline.of_this_process(needs_input=False).streams == (), "standard error is a file"
        connected.remove(0)
        with pytest.raises(UsageError, match="standard input is not a connection"):
            Lifeline.of_this_process(needs_input=True)
    finally:
        signal.signal(signal.SIGHUP, before)


LAUNCHER = """
import sys, time
from deepseek_zero.cli.lifeline import Lifeline
with Lifeline.of_this_process(needs_input="asked" in sys.argv):
    print("ready", flush=True)
    try:
        time.sleep(float(sys.argv[1]))
        code = 7
    except KeyboardInterrupt:  # SIGHUP, below
        print("to nobody", flush=True)
        code = 3
raise SystemExit(code)
"""
HEARS = "import signal; signal.signal(signal.SIGHUP, signal.default_int_handler)\n"


@pytest.mark.parametrize(
    ("args", "closed", "code"),
    [
        (["60"], "all", 3),
        (["2"], "input", 7),  # `ssh -n`, cron and CI start with a closed input
        (["2"], "output", 7),  # the input stays open
        (["60", "asked"], "input", 3),
    ],
)
def test_the_job_ends_when_all_streams_are_closed_or_the_input_if_configured(
    args: list[str], closed: str, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS + LAUNCHER, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    streams = {"input": [process.stdin], "output": [process.stdout, process.stderr]}
    for stream in streams["input"] + streams["output"] if closed == "all" else streams[closed]:
        stream.close()
    assert process.wait(50) == code
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()


def test_a_launcher_that_cannot_handle_signals_is_ended_by_its_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(lifeline, "are_closed", lambda streams: True)
    monkeypatch.setattr(lifeline, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(lifeline, "DEAF_SECONDS", 0.01)
    monkeypatch.setattr(lifeline, "_discard_unread_output", lambda: None)
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    monkeypatch.setattr(os, "_exit", ended.append)
    Lifeline((0,))._watch()
    assert ended == [signal.SIGHUP, 129]
