"""Run the rank processes of this machine.

The module starts them, detects the first failure, ends all of them and reports the cause:

    idle --start--> running --all exit 0--> finished
                       |
                       +--first failure, or end()--> ended       (start() again: a restart)
                       |
                       +--all exit 85 (base/launch.py)--> saved

It does not depend on torch or on other machines. The first failure is determined from the error
files of worker.py (`first_cause`).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any

from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.launch import (
    ATTEMPT,
    ENDING,
    SAVED_EXIT_CODE,
    SAVES,
    SECRET_BYTES,
    is_marked,
    mark,
)
from deepseek_zero.cli.orphans import MARK, Guard, Launch, send, stopped_after

WORKER = str(Path(__file__).with_name("worker.py"))

POLITE_SECONDS = 2.5
"""How long a rank may take to end after the signal.

Together with the sweep and the poll it is less than five seconds.
"""


LEAVING_SECONDS = 10.0
"""How long the other ranks may take to end after a rank that saved.

All of them stop training at the same step.
"""


class Target(Enum):
    """What a rank runs; the value is a key of `RUNNERS` in cli/worker.py."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True)
class Command:
    """What every rank of this machine runs."""

    kind: Target
    target: str
    args: tuple[str, ...] = ()
    pass_local_rank: bool = False  # as the first argument, like DeepSpeed
    # Ranks other than the machine's first write to files there instead of the terminal
    log_dir: Path | None = None

    def argv(self, local_rank: int) -> list[str]:
        """Return the command line of one rank."""
        option = [f"--local_rank={local_rank}"] if self.pass_local_rank else []
        return [
            sys.executable,
            WORKER,
            str(os.getpid()),
            self.kind.value,
            self.target,
            *option,
            *self.args,
        ]


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    rank: int
    error_file: Path
    death: Death | None = None
    finished: bool = False

    @property
    def saved(self) -> bool:
        """Return whether the rank was asked to end, saved and ended."""
        return self.death is not None and self.death.code == SAVED_EXIT_CODE

    def death_with(self, code: int) -> Death:
        return Death(
            self.rank,
            code,
            time.monotonic(),
            read_report(self.error_file),
            read_stack(self.error_file),
        )

    def death_by_report(self) -> Death | None:
        report = read_report(self.error_file)
        return Death(self.rank, 1, report.at, report) if report else None


@dataclass
class Ranks:
    """The ranks of this machine as processes.

    Use it as a context manager, which leaves neither processes nor files.
    """

    command: Command
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _running: list[_Running] = field(default_factory=list)  # by local rank
    _groups: set[int] = field(default_factory=set)
    _files: ExitStack = field(default_factory=ExitStack)
    _attempt: int = 0

    def __enter__(self) -> Ranks:
        self._folder = Path(tempfile.mkdtemp(prefix="deepseek_zero_"))
        self._guard = Guard(self.mark, self._folder)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.finished:
            self.end()
        self._guard.dismiss()
        self._files.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def finished(self) -> bool:
        """Return whether every rank has ended with code 0."""
        return bool(self._running) and all(rank.finished for rank in self._running)

    @property
    def saved(self) -> bool:
        """Return whether all ranks have ended, none failed, and at least one saved first."""
        have_ended = all(rank.finished or rank.saved for rank in self._running)
        return have_ended and any(rank.saved for rank in self._running)

    @property
    def have_all_ended(self) -> bool:
        """Return whether every rank has ended or has reported the error that ends it."""
        return all(rank.finished or rank.death for rank in self._running)

    def stopped(self) -> list[tuple[int, int]]:
        """Return the ranks that a signal has stopped (SIGSTOP), with their CPU ticks.

        Without /proc (not Linux) the list is empty.
        """
        running = [rank for rank in self._running if not (rank.finished or rank.death)]
        found = ((rank.rank, stopped_after(rank.process.pid)) for rank in running)
        return [(rank, ticks) for rank, ticks in found if ticks is not None]

    @property
    def secret_file(self) -> str:
        """Return the path to which `make_secret` writes the secret."""
        return str(self._folder / "secret")

    def make_secret(self) -> bytes:
        """Create a random secret for this job, write it to a private file, and return it."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with open(
            os.open(self.secret_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"
        ) as file:
            file.write(secret)
        return secret

    def save_on(self, name: signal.Signals) -> bool:
        """Return whether a rank has registered to save when it receives a signal."""
        return bool(self._attempt) and is_marked(self._notes, SAVES + name.name)

    @property
    def _notes(self) -> str:
        return str(self._folder / f"attempt_{self._attempt}")

    def start(self, environments: Sequence[Mapping[str, str]]) -> dict[int, int]:
        """Start one process per environment.

        Args:
            environments: The variables of local ranks 0, 1, ...

        Returns:
            The process ids by local rank.

        Raises:
            UsageError: The log of a rank cannot be written.
        """
        self._attempt += 1
        self._running.clear()
        for local_rank, environment in enumerate(environments):
            self._running.append(self._start_one(local_rank, environment))
        return {place: rank.process.pid for place, rank in enumerate(self._running)}

    def _start_one(self, local_rank: int, environment: Mapping[str, str]) -> _Running:
        error_file = self._folder / f"attempt_{self._attempt}_rank_{local_rank}.json"
        output = self._output(local_rank, environment)
        # The first rank keeps the terminal instead of a pipe, so that progress bars and debuggers
        # work.
        terminal = None if local_rank == 0 else subprocess.DEVNULL
        errors = subprocess.STDOUT if output else None
        process = subprocess.Popen(
            self.command.argv(local_rank),
            env={
                **os.environ,
                **environment,
                MARK: self.mark,
                ATTEMPT: self._notes,
                "TORCHELASTIC_ERROR_FILE": str(error_file),
            },
            stdin=terminal,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        self._groups.add(process.pid)
        self._guard.add(process.pid)
        return _Running(process, int(environment.get("RANK", local_rank)), error_file)

    def _output(self, local_rank: int, environment: Mapping[str, str]) -> IO[bytes] | None:
        if self.command.log_dir is None or local_rank == 0:
            return None
        rank = environment.get("RANK", local_rank)
        path = self.command.log_dir / f"rank_{rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return self._files.enter_context(open(path, "ab"))
        except OSError as error:
            raise UsageError(
                f"--log-dir: {path} cannot be written: {error.strerror}.",
                "Ranks other than the first write their output there.",
                "name a folder that can be written, or leave --log-dir out.",
            ) from None

    def wait(self, seconds: float) -> None:
        """Return when a rank ends, or after `seconds`."""
        living = [rank.process.pid for rank in self._running if rank.process.returncode is None]
        with ExitStack() as stack:
            try:
                watched = []
                for pid in living:
                    watched.append(os.pidfd_open(pid))
                    stack.callback(os.close, watched[-1])
                select.select(watched, [], [], seconds)
            except (
                AttributeError,
                OSError,
                ValueError,
            ):  # not Linux, an old kernel, or more descriptors than select supports
                time.sleep(min(seconds, 0.1))

    def poll(self) -> Death | None:
        """Check every rank, and return the failure to act on, if any."""
        for rank in self._running:
            self._look_at(rank)
        deaths = [rank.death for rank in self._running if rank.death]
        return first_cause(deaths) if deaths and not self._is_leaving(deaths) else None

    def _is_leaving(self, deaths: Sequence[Death]) -> bool:
        """Return whether all ended ranks have saved and the others may still follow."""
        since = time.monotonic() - min(death.at for death in deaths)
        return all(death.code == SAVED_EXIT_CODE for death in deaths) and (
            self.saved or since < LEAVING_SECONDS
        )

    def _look_at(self, rank: _Running) -> None:
        code = rank.process.poll()
        if rank.finished or rank.death:
            return
        if code is not None:
            rank.finished = code == 0
            rank.death = rank.death_with(code) if code else None
            if rank.finished:
                self._forget(rank.process.pid)
        elif rank.error_file.exists():
            # It raised an error: it will not recover, regardless of what its exit handlers wait for
            rank.death = rank.death_by_report()

    def _forget(self, group: int) -> None:
        self._groups.discard(group)
        self._guard.drop(group)

    def _living(self) -> list[_Running]:
        return [rank for rank in self._running if rank.process.poll() is None]

    def pass_on(self, number: signal.Signals) -> None:
        """Forward a signal of the launcher to the ranks, which handle it."""
        send([rank.process.pid for rank in self._living()], number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End every process of this launch.

        The ranks get the signal and time to end. After that, their children and the remaining ranks
        are killed.
        """
        if self._attempt:
            mark(self._notes, ENDING)
        living = self._living()
        # A rank that raised an error is already ending: its exit handlers get the time without the
        # signal.
        send([rank.process.pid for rank in living if not rank.death], number)
        deadline = time.monotonic() + POLITE_SECONDS
        for rank in living:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        Launch(self.mark, frozenset(self._groups)).end()
        for rank in self._living():  # if the sweep found nothing (without /proc)
            rank.process.kill()
            rank.process.wait()
        for group in list(self._groups):
            self._forget(group)

    def cause(self) -> Death | None:
        """Return the failure to report after all ranks have ended.

        It may be one that a rank reported only while the ranks were being ended.
        """
        found = [rank.death_by_report() or rank.death for rank in self._running]
        deaths = [death for death in found if death is not None]
        return first_cause(deaths) if deaths else None


NO_TRACEBACK = {
    signal.SIGKILL: "SIGKILL cannot be caught, so there is no traceback. If nobody sent it, the "
    "machine probably ran out of memory: look at `dmesg`, and try a smaller batch or a higher ZeRO "
    "stage.",
    signal.SIGTERM: "The process was terminated (SIGTERM), so there is no traceback.",
}
CRASH = "It crashed in native code."
SAVED = (
    "It saved a checkpoint and ended, as ranks do after a request to end; the other ranks kept "
    "running."
)
INTERRUPTED = (
    "It was interrupted: it received SIGINT, as after Ctrl-C, or raised KeyboardInterrupt."
)
SILENT_EXIT = "It left no traceback: it ended by sys.exit(code) or os._exit(code)."
STORIES = {SAVED_EXIT_CODE: SAVED, 128 + signal.SIGINT: INTERRUPTED}  # by exit code


@dataclass(frozen=True)
class Report:
    """A rank's report about its own end.

    Attributes:
        text: The error as the interpreter would print it.
        at: Time by `time.monotonic()`, which is the same clock for all processes of a machine.
        secondary: Whether the error blames another rank.
    """

    text: str
    at: float
    secondary: bool


@dataclass(frozen=True)
class Death:
    """The end of a rank with a code other than 0.

    Attributes:
        rank: The global rank.
        code: Return code as in subprocess, negative for a signal.
        at: Time of detection by `time.monotonic()`.
        report: The rank's own report, if any.
        stack: Python stack of a native crash, if any.
    """

    rank: int
    code: int
    at: float
    report: Report | None = None
    stack: str = ""

    @property
    def exit_code(self) -> int:
        """Return the launcher's exit code: the rank's own, or 128 plus the signal number."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def began_at(self) -> float:
        """Return the time of the exception if it is known, or else of the detection.

        A process takes some time to exit after an exception.
        """
        return self.report.at if self.report else self.at

    @property
    def secondary(self) -> bool:
        """Return whether this rank failed only because another one did."""
        return self.report is not None and self.report.secondary

    def headline(self, world_size: int) -> str:
        """Return one sentence that states which rank ended and how."""
        return f"rank {self.rank} of {world_size} {_how(self.code)}"

    def story(self) -> str:
        """Return the traceback, or the information available without one."""
        if self.report:
            return self.report.text.rstrip()
        if self.code >= 0:
            return STORIES.get(self.code, SILENT_EXIT)
        with suppress(ValueError):
            if signal.Signals(-self.code) in NO_TRACEBACK:
                return NO_TRACEBACK[signal.Signals(-self.code)]
        return f"{CRASH}\n{self.stack}".rstrip()


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        exit_code: Exit code of the launcher.
        headline: One sentence; empty after success.
        story: Details; empty after success.
        is_silence: Whether a machine was lost because it was silent.
    """

    exit_code: int = 0
    headline: str = ""
    story: str = ""
    is_silence: bool = False


def _how(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unnamed"
    return f"was ended by signal {-code} ({name})"


def first_cause(deaths: Sequence[Death]) -> Death:
    """Return the failure to report: the earliest one that does not blame another rank.

    If all of them blame another rank, it is the earliest one. A rank that saved and ended is
    returned only if no rank failed.
    """
    return min(
        deaths, key=lambda death: (death.code == SAVED_EXIT_CODE, death.secondary, death.began_at)
    )


def read_report(path: Path) -> Report | None:
    """Return the report in an error file, also in torch's @record layout, or None."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        message = data["message"]
        ours = data.get("deepseek_zero", {})
        # torch's timestamp has a resolution of one second
        reported_at = time.monotonic() - (time.time() - float(message["extraInfo"]["timestamp"]))
        return Report(
            text=message["extraInfo"]["py_callstack"],
            at=float(ours.get("at", reported_at)),
            secondary=bool(ours.get("secondary", False)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_stack(path: Path) -> str:
    """Return the Python stack that faulthandler wrote at a crash, or an empty string."""
    with suppress(OSError):
        return path.with_name(f"{path.name}.stack").read_text(errors="replace")
    return ""
