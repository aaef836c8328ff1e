"""The end of a program whose process holds threads of gloo's.

torch's gloo threads release the tensors of a message a moment after the call that sent it has
returned. If Python is ending at that moment, torch asks for the lock of an interpreter that is
gone, and a program that has done all its work
ends by SIGABRT: "terminate called without an active exception" (pytorch#179291).
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
    """Return when no other thread of this process runs or could run, after a second at most. For
    `atexit`.
    """
    until = time.monotonic() + MOST_EXIT_SECONDS
    quiet = 0
    while quiet < QUIET_LOOKS and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)  # without the interpreter's lock, for which they may wait
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Return whether another thread of this process runs or could run; False if the system does not
    show it.
    """
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
    except OSError:  # it has ended meanwhile
        return False
    # The state follows the name, which may contain any character
    return stat.rpartition(b") ")[2][:1] == b"R"
