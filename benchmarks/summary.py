"""Summarize runs: one row per system of a cell.

All functions are pure functions of the results file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cells import CONTEXT, LOSS_BOUNDS, SEQUENCES_PER_RANK, Cell
from .systems import SYSTEMS

LOSSES_COMPARED = 6  # steps; later losses diverge by rounding
Runs = Sequence[Mapping[str, Any]]


@dataclass
class Row:
    """The results of one system in one cell; None if not measured.

    Attributes:
        median: Median of the runs' medians in seconds.
        fastest: Fastest step.
        loss_gap: Largest difference of a loss from the single process's.
        seconds: Times of import, build, initialise and first step.
        memory: {moment: {kind: bytes}}.
    """

    system: str
    rounds: int = 0
    failed: str | None = None
    median: float | None = None
    fastest: float | None = None
    cpu_seconds: float | None = None
    sent_bytes: float | None = None
    counts_itself: bool = (
        False  # sent_bytes is the system's own count, not the loopback interface's
    )
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    loss_gap: float | None = None
    losses_compared: int = 0
    bound: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether it trains differently, in which case its time does not count."""
        return self.loss_gap is not None and not self.loss_gap <= self.bound

    @property
    def first_over_later(self) -> float | None:
        return self.seconds["first"] / self.median if self.median else None


@dataclass
class Summary:
    """All rows of a cell, in the order of SYSTEMS."""

    cell: Cell
    ranks: int
    rows: dict[str, Row]

    def over_floor(self, system: str, which: str = "median") -> float | None:
        """Return the step time relative to the floor, of the medians or of the fastest steps."""
        return self.ratio(system, "floor", which)

    def times_faster(self, system: str, peer: str) -> float | None:
        """Return the number of steps that the system makes during one step of the peer."""
        return self.ratio(peer, system)

    def ratio(self, above: str, below: str, which: str = "median") -> float | None:
        top, bottom = (getattr(self.rows.get(name), which, None) for name in (above, below))
        return top / bottom if top and bottom else None

    def psi(self, system: str) -> float | None:
        """Return the sent bytes relative to the model's size.

        The value is 3 at stage 3, where each rank sends its part of each gather and reduction.
        """
        row = self.rows.get(system)
        if row is None or row.sent_bytes is None:
            return None
        model = self.cell.shape.numel * (2 if self.cell.dtype == "bf16" else 4)
        return row.sent_bytes / (model * (self.ranks - 1) / self.ranks)

    def tokens_per_second(self, system: str) -> float | None:
        tokens = self.ranks * SEQUENCES_PER_RANK * CONTEXT * self.cell.accumulation
        median = self.rows[system].median
        return tokens / median if median else None

    @property
    def fastest_system(self) -> str | None:
        """The correct system with the shortest median step."""
        right = {
            name: row.median
            for name, row in self.rows.items()
            if row.median is not None and SYSTEMS[name].learns and not row.is_wrong
        }
        return min(right, key=right.__getitem__) if right else None


def summarise(cell: Cell, runs: Runs) -> Summary:
    """Return the rows of one cell from all its runs with one number of ranks."""
    here = [run for run in runs if run["cell"] == cell.name]
    truth = _losses(here, "single")
    rows = {
        name: _row(cell, name, [run for run in here if run["system"] == name], truth)
        for name in SYSTEMS
    }
    return Summary(
        cell,
        here[0]["ranks"] if here else 2,
        {name: row for name, row in rows.items() if row is not None},
    )


def cells_of(runs: Runs) -> list[Cell]:
    """Return the cells that have runs, in order of appearance."""
    return [Cell.parse(name) for name in dict.fromkeys(run["cell"] for run in runs)]


def _row(cell: Cell, system: str, runs: Runs, truth: Sequence[float]) -> Row | None:
    if not runs:
        return None
    good = [run for run in runs if "failed" not in run]
    timed = [run for run in good if run["kind"] == "time"]
    row = Row(system, rounds=len(timed), bound=LOSS_BOUNDS[cell.dtype])
    row.failed = next((run["failed"] for run in runs if "failed" in run), None)
    if timed:
        row.median = statistics.median(statistics.median(run["steps"]) for run in timed)
        row.fastest = min(seconds for run in timed for seconds in run["steps"])
        row.cpu_seconds = statistics.median(run["cpu_seconds"] for run in timed)
        row.counts_itself = timed[0]["sent_bytes"] is not None
        # Other programs can only add traffic to the interface, so the minimum is the most accurate.
        row.sent_bytes = min(
            run["sent_bytes" if row.counts_itself else "wire_bytes"] for run in timed
        )
        names = timed[0]["seconds"]
        row.settings = timed[0]["settings"]
        row.seconds = {
            name: statistics.median(run["seconds"][name] for run in timed) for name in names
        }
    row.memory = next((run["memory"] for run in good if run["kind"] == "memory"), {})
    if SYSTEMS[system].learns and truth:
        gaps = [_gaps(run["losses"], truth) for run in good]
        row.losses_compared = max(map(len, gaps), default=0)
        row.loss_gap = _largest(gap for run in gaps for gap in run)
    return row


def _losses(runs: Runs, system: str) -> list[float]:
    """Return a system's longest list of losses, up to the number that is compared."""
    found = [run["losses"] for run in runs if run["system"] == system and "failed" not in run]
    return max(found, key=len, default=[])[:LOSSES_COMPARED]


def _gaps(losses: Sequence[float], truth: Sequence[float]) -> list[float]:
    return [abs(mine - other) for mine, other in zip(losses, truth, strict=False)]


def _largest(gaps: Iterable[float]) -> float | None:
    """Return the largest gap; NaN counts as infinity."""
    return max((gap if gap == gap else float("inf") for gap in gaps), default=None)
