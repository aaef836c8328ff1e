"""The launcher determines which failure is the cause and reports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepseek_zero.base.errors import PeerError, UsageError
from deepseek_zero.cli import worker
from deepseek_zero.cli.ranks import (
    Command,
    Death,
    Ranks,
    Report,
    Target,
    first_cause,
    read_report,
)
from deepseek_zero.cli.worker import blames_a_peer


def report(at: float, *, secondary: bool = False) -> Report:
    return Report("Traceback ...\nValueError: x\n", at, secondary)


RAISED_FIRST = Death(0, 1, at=10.9, report=report(10.0))
RAISED_SECOND = Death(1, 1, at=10.5, report=report(10.1))
KILLED = Death(2, -9, at=10.3)
LOST_ITS_PEER = Death(3, 1, at=10.2, report=report(9.9, secondary=True))


def test_the_first_failure_in_time_is_the_cause() -> None:
    assert first_cause([RAISED_SECOND, RAISED_FIRST]) is RAISED_FIRST


def test_an_exception_counts_from_when_it_was_raised_not_from_when_its_process_ended() -> None:
    assert first_cause([KILLED, RAISED_FIRST]) is RAISED_FIRST


def test_a_rank_that_lost_its_peer_is_not_the_cause_if_another_failure_exists() -> None:
    assert first_cause([LOST_ITS_PEER, KILLED]) is KILLED
    assert first_cause([LOST_ITS_PEER]) is LOST_ITS_PEER


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (-9, 137), (-15, 143)])
def test_the_launcher_ends_with_the_ranks_code(code: int, exit_code: int) -> None:
    assert Death(0, code, 0.0).exit_code == exit_code


def test_the_report_is_the_traceback_if_there_is_one() -> None:
    assert RAISED_FIRST.story() == "Traceback ...\nValueError: x"
    assert RAISED_FIRST.headline(4) == "rank 0 of 4 failed with exit code 1"


def test_a_killed_rank_is_reported_with_the_likely_reason() -> None:
    assert KILLED.headline(4) == "rank 2 of 4 was ended by signal 9 (SIGKILL)"
    assert "memory" in KILLED.story()


def test_a_crash_in_native_code_is_reported_with_the_python_stack() -> None:
    assert (
        Death(0, -11, 0.0, stack="Fatal Python error\n")
        .story()
        .endswith("native code.\nFatal Python error")
    )


def test_an_exit_without_an_error_message_is_reported() -> None:
    assert "os._exit" in Death(0, 7, 0.0).story()


def test_torchs_own_error_file_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback", "timestamp": str(int(time.time()) - 12)}
    file.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    found = read_report(file)
    assert found is not None and abs(time.monotonic() - 12 - found.at) < 2
    assert found == Report("Traceback", found.at, False)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"message": "text"}', '{"message": {"message": "text"}}']
)
def test_an_error_file_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(text)
    assert read_report(file) is None
    assert read_report(tmp_path / "absent") is None


def test_an_error_caused_by_a_peer_is_recognised_through_its_chain() -> None:
    wrapped = RuntimeError("training stopped")
    wrapped.__cause__ = PeerError("rank 1 died")
    assert blames_a_peer(wrapped)
    assert blames_a_peer(
        RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1")
    )
    assert not blames_a_peer(ValueError("boom"))


def test_a_circular_exception_chain_ends() -> None:
    error = ValueError("a")
    error.__context__ = KeyError("b")
    error.__context__.__context__ = error
    assert not blames_a_peer(error)


ENDS = """
import atexit, sys, threading, time
atexit.register(lambda: sys.stdout.write("its exit handler, "))
atexit.register(lambda: open(sys.argv[1], "a").write(repr(getattr(sys, "last_value", None))))
threading.Thread(target=lambda: (time.sleep(0.2), sys.stdout.write("its thread, "))).start()
sys.stdout.write("its words, ")
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise ValueError('boom')", 1), ("sys.exit(3)", 3), ("sys.exit('boom')", 1), ("pass", 0)],
)
def test_a_failing_rank_runs_the_exit_handlers_of_python(
    end: str, code: int, tmp_path: Path
) -> None:
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(ENDS.format(end=end))
    command = [
        sys.executable,
        "-S",
        worker.__file__,
        str(os.getpid()),
        "script",
        str(script),
        str(told),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {worker.ERROR_FILE: ""}
    )
    assert (ended.returncode, ended.stdout) == (code, "its words, its thread, its exit handler, ")
    assert ("boom" in ended.stderr) == ("boom" in end)
    assert told.read_text() == ("ValueError('boom')" if "raise" in end else "None"), (
        "what told others how it ended"
    )


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    command = Command(Target.SCRIPT, str(script), log_dir=script)
    ranks = Ranks(command)
    with ranks, pytest.raises(UsageError, match=r"--log-dir: .*rank_1\.log cannot be written"):
        ranks.start([{}, {}])
