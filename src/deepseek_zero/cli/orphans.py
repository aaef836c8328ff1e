"""Finds and ends every process of one launch, and runs as the guard that does so when the launcher
itself is killed.

A launch is recognised in two ways: each rank leads its own process group, and each rank's
environment carries the launch's mark, which its children inherit (data loader workers too, even
those that left the group).  The guard is this
file run as a script: its standard input says which groups there are, and the end of that input
without "done" means that the launcher is gone.  Standard library only: the guard must start at once
and stay small.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "DEEPSEEK_ZERO_LAUNCH"
"""Environment variable that names the launch a process belongs to."""

SWEEP_SECONDS = 1.0
"""How long leftovers may take to end on SIGTERM; multiprocessing's resource tracker uses it to
unlink shared memory.
"""


@dataclass(frozen=True)
class Launch:
    """What identifies the processes of one launch: its mark and the process groups of its ranks.

    groups: of ranks that run or have just failed.  Never of one that ended long ago: once a group
    is empty, its number may become that of a stranger's.
    """

    mark: str
    groups: Collection[int]

    def living(self) -> list[int]:
        """Return the process ids of this launch that run now, without zombies.  Without /proc (not
        Linux): none.
        """
        entry = f"{MARK}={self.mark}".encode()
        return [pid for pid in _processes() if pid != os.getpid() and self._owns(pid, entry)]

    def _owns(self, pid: int, entry: bytes) -> bool:
        try:
            state, group, _ = _state_group_and_ticks(pid)
            if state in "ZX":
                return False
            return group in self.groups or entry in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            )
        except OSError:  # it ended while we looked, or it is another user's
            return False

    def end(self, patience_seconds: float = SWEEP_SECONDS) -> None:
        """Ask every living process to end, then kill what is left after `patience_seconds`."""
        deadline = time.monotonic() + patience_seconds
        send(self.living(), signal.SIGTERM)
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.02)
        send(left, signal.SIGKILL)


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _state_group_and_ticks(pid: int) -> tuple[str, int, int]:
    # The second field is the program's name in parentheses and may itself hold spaces and
    # parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[2]), int(fields[11]) + int(fields[12])


def stopped_after(pid: int) -> int | None:
    """Return the ticks of CPU time after which a signal has stopped a process; None where none has
    (a debugger at work in it is no signal).
    """
    try:
        state, _, ticks = _state_group_and_ticks(pid)
    except OSError:  # it has ended, or there is no /proc
        return None
    return ticks if state == "T" else None


def send(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to each process; one that is already gone is fine."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Guard:
    """The launcher's side of the guard process: tell it of groups as they come and go, dismiss it
    at a proper end.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        # -I and -S: nothing of the user's environment can break or slow it.  An empty environment,
        # so that it never carries the mark of an outer launch; its own session, so that a
        # terminal's Ctrl-C or hang-up passes it by.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )

    def add(self, group: int) -> None:
        """Tell the guard that a group belongs to the launch from now on."""
        self._tell(str(group))

    def drop(self, group: int) -> None:
        """Tell the guard to leave a group alone from now on: its number may become a stranger's."""
        self._tell(str(-group))

    def _tell(self, line: str) -> None:
        # A guard that somebody killed is not worth failing a training run.
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard without any action: the launcher cleans up by itself."""
        self._tell("done")
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def _stand_guard(mark: str, folder: str) -> None:
    # Schedulers send them to every process of a job
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        if line.strip() == "done":
            return
        group = int(line)
        groups.add(group) if group > 0 else groups.discard(-group)
    Launch(mark, groups).end()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _stand_guard(*sys.argv[1:])
