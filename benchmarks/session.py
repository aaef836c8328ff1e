"""Make runs one after another, record each immediately, and show the progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .journal import Journal
from .launch import Run, launch
from .plan import Costs, is_recorded
from .systems import ROOT

RESERVE = 0.95  # part of the time to plan with, because run times are estimates


class Session:
    """Record runs in one results file for at most `seconds`.

    As a context manager it shows a progress bar on a terminal.
    """

    def __init__(self, results: Path, console: Console, seconds: float = float("inf")) -> None:
        self.journal, self.console = Journal(results), console
        self.deadline = time.monotonic() + seconds * RESERVE
        columns = [
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}"),
        ]
        # Refresh once per second, because the bar shares its core with a rank.
        self.bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=1,
            expand=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("benchmark", total=None, left="")
        if self.journal.moved is not None:
            self.say(
                f"{results.name} is of other code or another machine; it is now "
                f"{shown(self.journal.moved)}"
            )

    def __enter__(self) -> Session:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    @property
    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def make(self, runs: Sequence[Run]) -> int:
        """Make each run that is not recorded and fits, in order; return the number of runs made."""
        runs = [run for run in runs if not is_recorded(run, self.journal.runs)]
        made = 0
        for number, run in enumerate(runs):
            costs = Costs(self.journal.runs)
            expected = costs.run(run)
            if expected > self.remaining:
                continue
            made += 1
            self._show(run, costs.total(runs[number:]))
            record = launch(replace(run, timeout=max(300.0, 8 * expected)))
            self.journal.add(record)
            self.say(describe(record))
        return made

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _show(self, run: Run, ahead: float) -> None:
        passed = self.bar.tasks[0].elapsed or 0.0
        what = f"{run.cell} {run.system} ({run.kind})"
        left = f"about {ahead / 60:.0f} min left"
        self.bar.update(
            self.task, description=what, total=passed + ahead, completed=passed, left=left
        )


def describe(record: dict[str, Any]) -> str:
    """Return one line about a run for the terminal."""
    head = f"{record['cell']:16} {record['system']:12} {record['kind']:6}"
    tail = f"({record['wall_seconds']:.0f} s)"
    if "failed" in record:
        return f"{head} FAILED {record['failed']} {tail}"
    if record["kind"] == "memory":
        steady, peak = (
            record["memory"][moment]["pss"] / 1e6 for moment in ("steady", "train_peak")
        )
        return f"{head} steady {steady:.0f} MB, peak {peak:.0f} MB PSS {tail}"
    steps = record["steps"]
    return f"{head} {min(steps):.3f}-{max(steps):.3f} s a step, {len(steps)} steps {tail}"


def shown(path: Path) -> str:
    """Return the path relative to the repository, if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
