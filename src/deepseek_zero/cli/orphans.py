"""Find and end every process of a launch, even if the launcher is killed.

A process belongs to a launch if it is in the process group of a rank, or if its environment has the
mark of the launch. Children inherit the mark, including data loader workers that left the group.
The guard is this file, run as a script. It reads the groups from standard input. If the input ends
without "done", the launcher is gone and the guard ends the processes. Only the standard library is
used, so that the guard starts quickly and stays small.
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
"""Environment variable with the mark of the launch that a process belongs to."""

SWEEP_SECONDS = 1.0
"""How long leftover processes may take to end after SIGTERM.

The resource tracker of multiprocessing uses the time to unlink shared memory.
"""


@dataclass(frozen=True)
class Launch:
    """The processes of a launch, identified by an environment variable or a process group.

    Attributes:
        mark: Value of the environment variable `MARK` in every process of the launch.
        groups: Groups of ranks that are running or have just failed. The group of a rank that ended
            earlier must not be included, because its number may be reused by another program.
    """

    mark: str
    groups: Collection[int]

    def living(self) -> list[int]:
        """Return the ids of the running processes of this launch, without zombies.

        Without /proc (not Linux) the list is empty.
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
        except OSError:  # it has ended in the meantime, or it is another user's
            return False

    def end(self, patience_seconds: float = SWEEP_SECONDS) -> None:
        """Send SIGTERM to every process, then kill those left after `patience_seconds`."""
        deadline = time.monotonic() + patience_seconds
        send(self.living(), signal.SIGTERM)
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.02)
        send(left, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _state_group_and_ticks(pid: int) -> tuple[str, int, int]:
    # The second field is the program's name in parentheses and may itself contain spaces and
    # parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[2]), int(fields[11]) + int(fields[12])


def stopped_after(pid: int) -> int | None:
    """Return the CPU ticks of a process that a signal has stopped, or None.

    A process that a debugger traces is not counted as stopped.
    """
    try:
        state, _, ticks = _state_group_and_ticks(pid)
    except OSError:  # it has ended, or /proc does not exist
        return None
    return ticks if state == "T" else None


def send(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to each process, ignoring those that have already ended.

    Args:
        pids: Ids of the processes.
        number: Number of the signal.
    """
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Guard:
    """The launcher's connection to its guard process."""

    def __init__(self, mark: str, folder: Path) -> None:
        """Start the guard process.

        Args:
            mark: Mark of the launch.
            folder: Folder that the guard removes if the launcher is killed.
        """
        # -I and -S isolate it from the user's environment. The environment is empty, so that it
        # never has the mark of an outer launch. It has its own session, so that Ctrl-C or a hang-up
        # of the terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )

    def add(self, group: int) -> None:
        """Add a process group to the launch."""
        self._tell(str(group))

    def drop(self, group: int) -> None:
        """Remove a process group, because its number may be reused by another program."""
        self._tell(str(-group))

    def _tell(self, line: str) -> None:
        # A killed guard is no reason to fail a training run.
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard without any action, because the launcher cleans up itself."""
        self._tell("done")
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def _run_watchdog(mark: str, folder: str) -> None:
    # Schedulers send these signals to every process of a job
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
    _run_watchdog(*sys.argv[1:])
