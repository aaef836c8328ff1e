"""Start a rank: tie it to the launcher, then run the user's script like Python.

The file is run by path and never imported by the package. It uses only the standard library, so
`sys.path`, `sys.argv`, `__main__` and pickling are the same as without the launcher. An exception
is written to the rank's error file instead of the terminal, so that the launcher can show the first
one once.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of this rank's error file; torch's @record uses it, too."""

PR_SET_PDEATHSIG = 1

LOST_PEER_TYPES = {"PeerError", "DistBackendError", "DistNetworkError", "DistStoreError"}
LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
    "communicator was aborted",
)
"""Parts of error messages that blame another rank; such an error is shown only as a last resort."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, for any reason (Linux).

    The setting is kept by exec but not inherited by children. If the parent has already ended, the
    signal would never arrive, so the process exits here.

    Args:
        parent: Process id of the launcher.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def run_script(path: str) -> None:
    """Run a file as `python path` does.

    The new `__main__` module is kept for exit handlers, threads and pickling.
    """
    script = os.path.abspath(path)
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    if not os.path.isfile(script):  # a folder or an archive that contains a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=script,
        __builtins__=__builtins__,
        __loader__=importlib.machinery.SourceFileLoader("__main__", script),
    )
    sys.modules["__main__"] = main
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """Run a module as `python -m name` does."""
    _set_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_program(path: str) -> None:
    """Replace this process with another program; the parent-death signal is kept."""
    os.execvp(path, sys.argv)


RUNNERS = {"script": run_script, "module": run_module, "program": run_program}


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:  # started as a file: the first entry is this file's folder
        sys.path[0] = folder


def _own_frames_cut(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and file != runpy.__file__ and not file.startswith("<frozen "):
            return trace
        trace = trace.tb_next
    return None


def _shown_text(error: BaseException) -> str:
    """Return the text that `sys.excepthook` prints; a script may replace the hook."""
    terminal = sys.stderr
    sys.stderr = io.StringIO()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        return sys.stderr.getvalue() or "".join(traceback.format_exception(error))
    except Exception:  # a failing hook must not hide the original error
        return "".join(traceback.format_exception(error))
    finally:
        sys.stderr = terminal


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def blames_a_peer(error: BaseException) -> bool:
    """Return whether an exception or one of its causes reports another rank's end."""
    return any(
        not LOST_PEER_TYPES.isdisjoint(kind.__name__ for kind in type(link).__mro__)
        or any(text in str(link) for text in LOST_PEER_TEXTS)
        for link in _chain(error)
    )


def write_report(text: str, summary: str, *, secondary: bool, at: float) -> None:
    """Write the error file atomically, in torch elastic's layout with one more key.

    Without an error file, the text is written to standard error.

    Args:
        text: The error as the interpreter would print it.
        summary: The error in one line.
        secondary: Whether the error blames another rank.
        at: Time of the error by `time.monotonic()`, by which the launcher orders failures.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        sys.stderr.write(text)
        return
    report = {
        "message": {
            "message": summary,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        "deepseek_zero": {"at": at, "secondary": secondary},
    }
    with open(f"{path}.part", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(report, file)
    os.replace(f"{path}.part", path)


def _report_exception(error: BaseException, at: float) -> int:
    error = error.with_traceback(_own_frames_cut(error.__traceback__))
    # As the interpreter does: exit handlers use these to find out how the program ended.
    sys.last_type = type(error)
    sys.last_value = error
    sys.last_traceback = error.__traceback__
    summary = "".join(traceback.format_exception_only(error)).strip()
    write_report(_shown_text(error), summary, secondary=blames_a_peer(error), at=at)
    return 1


def _report_exit(error: SystemExit, at: float) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    # `sys.exit("message")`: Python prints the message and exits with 1, which every rank would do.
    write_report(f"{error.code}\n", str(error.code), secondary=False, at=at)
    return 1


def _flush_whole_lines() -> None:
    """Make standard output line-buffered for pipes and files, too: one write per line.

    Unbuffered output (`python -u`, PYTHONUNBUFFERED as in many containers) writes a line's text and
    its end separately, which mixes the lines of several ranks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _keep_crash_stack() -> None:
    """Write the Python stack of a native crash next to the error file."""
    path = os.environ.get(ERROR_FILE)
    if path and not faulthandler.is_enabled():
        faulthandler.enable(file=open(f"{path}.stack", "w"))  # noqa: SIM115  open as long as the process lives


def main(parent: str, kind: str, target: str, *args: str) -> int:
    """Run the target of this rank.

    Args:
        parent: Process id of the launcher.
        kind: A key of `RUNNERS`.
        target: The script, module or program.
        args: Arguments of the target.

    Returns:
        The exit code of the target.
    """
    die_with_parent(int(parent))
    _keep_crash_stack()
    _flush_whole_lines()
    sys.argv = [target, *args]
    try:
        RUNNERS[kind](target)
    except SystemExit as error:
        return _report_exit(error, time.monotonic())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        return _report_exception(error, time.monotonic())
    return 0


def leave(code: int) -> None:
    """Exit like the interpreter, but leave releasing memory to the kernel.

    Non-daemon threads are joined, exit handlers run, and output is flushed. The interpreter would
    then destroy torch's modules object by object. This takes half a second on an idle machine and
    several seconds on a busy one.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # the first step of Python's own shutdown
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if code := main(*sys.argv[1:]):
        leave(code)
