"""Which rank failed first, and how that is told; reads the error files that cli/worker.py writes.

Data in, text out: it starts nothing and ends nothing.  Called by cli/ranks.py and cli/run.py.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_zero.base.launch import SAVED_EXIT_CODE

NO_TRACEBACK = {
    signal.SIGKILL: "Nobody can catch SIGKILL, so there is no traceback. If nobody sent it, the machine probably ran "
    "out of memory: look at `dmesg`, and at a smaller batch or a higher ZeRO stage.",
    signal.SIGTERM: "Somebody asked this process to end (SIGTERM), so there is no traceback.",
}
CRASH = "It crashed in native code."
SAVED = "It saved a checkpoint and left, as ranks do that are asked to end; the other ranks did not follow."
SILENT_EXIT = "It left no traceback: it ended by sys.exit(code) or os._exit(code)."


@dataclass(frozen=True)
class Report:
    """What a rank wrote about its own end.  text: as the interpreter would print it; at: seconds since the epoch."""

    text: str
    summary: str
    at: float
    exit_code: int
    secondary: bool  # it blames another rank


@dataclass(frozen=True)
class Death:
    """The end of a rank with a code other than 0.

    code: as in subprocess, negative for a signal; at: when it was seen, seconds since the epoch.
    """

    rank: int
    code: int
    at: float
    report: Report | None = None
    stack: str = ""

    @property
    def exit_code(self) -> int:
        """The code the launcher ends with: the rank's own, or 128 + the signal's number as shells do."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def began_at(self) -> float:
        """When the failure began: the exception's time where known, for a process takes a while to exit after it."""
        return self.report.at if self.report else self.at

    @property
    def secondary(self) -> bool:
        """True if this rank only followed another one."""
        return self.report is not None and self.report.secondary

    def headline(self, world_size: int) -> str:
        """One sentence: which rank, and how it ended."""
        return f"rank {self.rank} of {world_size} {_how(self.code)}"

    def story(self) -> str:
        """The traceback, or what is known without one."""
        if self.report:
            return self.report.text.rstrip()
        if self.code >= 0:
            return SAVED if self.code == SAVED_EXIT_CODE else SILENT_EXIT
        with suppress(ValueError):
            if signal.Signals(-self.code) in NO_TRACEBACK:
                return NO_TRACEBACK[signal.Signals(-self.code)]
        return f"{CRASH}\n{self.stack}".rstrip()


@dataclass(frozen=True)
class Outcome:
    """How a launch ended; headline and story are empty if all went well."""

    exit_code: int = 0
    headline: str = ""
    story: str = ""


def _how(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unnamed"
    return f"was ended by signal {-code} ({name})"


def first_cause(deaths: Sequence[Death]) -> Death:
    """The failure to show: the earliest one that does not blame another rank, else the earliest.

    A rank that saved and left is shown only where no rank failed.
    """
    return min(deaths, key=lambda death: (death.code == SAVED_EXIT_CODE, death.secondary, death.began_at))


def read_report(path: Path) -> Report | None:
    """The report in an error file, torch's own @record layout included; None if there is none that can be read."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        message, ours = data["message"], data.get("deepseek_zero", {})
        return Report(
            text=message["extraInfo"]["py_callstack"],
            summary=message["message"],
            at=float(ours.get("at", message["extraInfo"]["timestamp"])),
            exit_code=int(ours.get("exit_code", 1)),
            secondary=bool(ours.get("secondary", False)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_stack(path: Path) -> str:
    """The Python stack that faulthandler left at a crash, or nothing."""
    with suppress(OSError):
        return path.with_name(f"{path.name}.stack").read_text(errors="replace")
    return ""
