"""Wait at exit for the threads of gloo.

torch's gloo threads release the tensors of a message shortly after the call that sent it has
returned. If the interpreter is being finalized at that moment, torch requests the lock of an
interpreter that no longer exists. The process then ends with SIGABRT after all its work: "terminate
called without an active exception" (pytorch#179291).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

MOST_EXIT_SECONDS = 1.0
LOOK_SECONDS = 1e-3
QUIET_LOOKS = 3


def drain_threads() -> None:
    """Wait until no other thread of this process runs, for at most one second.

    Registered with `atexit`.
    """
    until = time.monotonic() + MOST_EXIT_SECONDS
    quiet = 0
    while quiet < QUIET_LOOKS and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)  # releases the interpreter lock, which the threads may need
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Return whether another thread runs or is runnable; False if the system does not show it."""
    me = str(threading.get_native_id())
    try:
        return any(
            _wants_to_run(thread) for thread in os.listdir("/proc/self/task") if thread != me
        )
    except OSError:  # no /proc
        return False


def _wants_to_run(thread: str) -> bool:
    try:
        stat = Path("/proc/self/task", thread, "stat").read_bytes()
    except OSError:  # the thread has ended
        return False
    # The state follows the name, which may contain any character
    return stat.rpartition(b") ")[2][:1] == b"R"
