"""Plan the order and the number of steps of the runs that fit into the available time.

All functions are pure: they depend on the request, the recorded runs and the remaining time. A
first pass runs every system of a cell once and measures its memory. Further rounds repeat the timed
runs in the same order (A B C, A B C), so that a drift of the machine affects all systems. If time
is short, the systems that the goals compare run first and others are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cells import CONTEXT, SEQUENCES_PER_RANK, Cell
from .launch import Run
from .systems import SYSTEMS

FEWEST_STEPS = 2  # after the first, in a timed run
MOST_STEPS = 40  # for a model so small that its steps take milliseconds
MEMORY_STEPS = 1  # the first step creates the optimizer state
# FLOP/s of one core without bf16 instructions, for cells without a recorded run.
ROUGH_FLOPS = {"fp32": 1e11, "bf16": 3e10}
ROUGH_OVER_FLOOR = 2.0  # of a system without a recorded run, relative to the floor of its cell
STARTUP_SECONDS = 8.0  # imports and process group, and the same again for each 100M parameters
DEEPSPEED_SECONDS = 8.0  # additional start-up time of DeepSpeed

Records = Sequence[Mapping[str, Any]]

# Systems that the goals compare, by time and by memory.
TIME_GOALS = "floor ours-3 fsdp2 single ddp ours-0 deepspeed-3 ours-2".split()
MEMORY_GOALS = "ours-3 ours-3-init fsdp2".split()
# Highest priority first: those systems, then all others.
PRIORITY = [
    *((name, "time") for name in TIME_GOALS),
    *((name, "memory") for name in MEMORY_GOALS),
    *(
        (name, "time")
        for name, entry in reversed(SYSTEMS.items())
        if entry.timed and name not in TIME_GOALS
    ),
    *(
        (name, "memory")
        for name, entry in SYSTEMS.items()
        if entry.learns and name not in MEMORY_GOALS
    ),
]


@dataclass(frozen=True)
class Request:
    """The requested runs.

    Attributes:
        steps: Steps after the first in a timed run, if there is enough time.
        memory_of: Systems whose memory is measured.
    """

    cells: Sequence[Cell]
    systems: Sequence[str]
    steps: int = 5
    memory_of: Sequence[str] = tuple(SYSTEMS)

    def jobs_of(self, cell: Cell) -> list[tuple[str, str]]:
        """Return (system, kind) of one pass by priority.

        The memory of the tiny model is not measured.
        """
        weighed = self.memory_of if cell.size != "tiny" else ()
        wanted = [(name, kind) for name, kind in PRIORITY if name in self.systems]
        return [(name, kind) for name, kind in wanted if kind == "time" or name in weighed]


class Costs:
    """Estimate the seconds of a run from the recorded ones."""

    def __init__(self, records: Records) -> None:
        self.records = [record for record in records if "failed" not in record]

    def step(self, cell: Cell, system: str) -> float:
        """Return the estimated seconds of a step: recorded, else from the floor, else from
        FLOPs.
        """
        if (own := self._measured(cell, system)) is not None:
            return own
        over = ROUGH_OVER_FLOOR if system != "floor" else 1.0
        return over * (self._measured(cell, "floor") or self._arithmetic(cell))

    def run(self, run: Run) -> float:
        """Return the estimated seconds of a whole run."""
        cell = Cell.parse(run.cell)
        return self._startup(cell, run.system) + (run.steps + 1) * self.step(cell, run.system)

    def total(self, runs: Iterable[Run]) -> float:
        return sum(map(self.run, runs))

    def _measured(self, cell: Cell, system: str) -> float | None:
        found = [record["steps"] for record in self._timed(cell, system)]
        return statistics.median(seconds for steps in found for seconds in steps) if found else None

    def _timed(self, cell: Cell, system: str) -> list[Mapping[str, Any]]:
        wanted = (cell.name, system, "time")
        return [
            record
            for record in self.records
            if (record["cell"], record["system"], record["kind"]) == wanted
        ]

    def _startup(self, cell: Cell, system: str) -> float:
        """Return the estimated seconds of start and end: recorded, else the floor's, else a
        guess.
        """
        for known in (system, "floor"):
            found = [
                record["wall_seconds"] - record["seconds"]["first"] - sum(record["steps"])
                for record in self._timed(cell, known)
            ]
            if found:
                is_slower = known != system and SYSTEMS[system].module == "deepspeed"
                return max(0.0, statistics.median(found)) + (
                    DEEPSPEED_SECONDS if is_slower else 0.0
                )
        return STARTUP_SECONDS * (1 + cell.shape.numel / 1e8)

    @staticmethod
    def _arithmetic(cell: Cell) -> float:
        tokens = SEQUENCES_PER_RANK * CONTEXT * cell.accumulation
        return 6 * cell.shape.numel * tokens / ROUGH_FLOPS[cell.dtype]


def is_recorded(run: Run, records: Records) -> bool:
    """Return whether this run has been made. A failed run counts, so that it is not repeated."""
    wanted = (run.cell, run.system, run.kind, run.round, run.ranks)
    return any(
        tuple(map(each.get, ("cell", "system", "kind", "round", "ranks"))) == wanted
        for each in records
    )


def floor_runs(request: Request) -> list[Run]:
    """Return short runs of the floor for every cell, on which all other estimates depend."""
    cells = request.cells if "floor" in request.systems else []
    return [
        Run(cell.name, "floor", steps=max(FEWEST_STEPS, _quick_steps(Costs([]), cell)))
        for cell in cells
    ]


def first_pass(request: Request, records: Records, seconds: float) -> tuple[list[Run], list[Run]]:
    """Return the runs of every cell that fit into `seconds`, in order, and those left out.

    Each cell gets its proportional share of the time, and unused time goes to the next cells.
    """
    costs = Costs(records)
    chosen: list[Run] = []
    left_out: list[Run] = []
    whole = {
        cell: [run for run in _pass_of(request, cell) if not is_recorded(run, records)]
        for cell in request.cells
    }
    total = sum(map(costs.total, whole.values()))
    for cell, runs in whole.items():
        share = seconds * costs.total(runs) / total if runs else 0.0
        kept = _fitting(runs, costs, share)
        left_out += [run for run in runs if run not in kept]
        kept = _with_more_steps(kept, steps_for(cell, request, costs), costs, share)
        seconds -= costs.total(kept)
        total -= costs.total(runs)
        chosen += in_order(kept)
    return chosen, left_out


def next_round(request: Request, records: Records, seconds: float, most: float) -> list[Run]:
    """Return the next round of the cell with the fewest rounds, up to `most`.

    The number of steps depends on the cell's share of the time. The list is empty if no cell's
    round fits.
    """
    costs = Costs(records)
    rounds = [runs for cell in request.cells if (runs := _round_of(request, cell, records))]
    fitting = [runs for runs in rounds if runs[0].round <= most and costs.total(runs) <= seconds]
    fewest = min((runs[0].round for runs in fitting), default=0)
    behind = [runs for runs in fitting if runs[0].round == fewest]
    if not behind:
        return []
    share = seconds * costs.total(behind[0]) / sum(map(costs.total, behind))
    return _with_more_steps(
        behind[0], steps_for(Cell.parse(behind[0][0].cell), request, costs), costs, share
    )


def steps_for(cell: Cell, request: Request, costs: Costs) -> int:
    """Return the requested steps, or as many as fill two seconds if steps take milliseconds."""
    return max(request.steps, _quick_steps(costs, cell))


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Sort timed runs before memory runs, and systems as in the tables."""
    place = {name: number for number, name in enumerate(SYSTEMS)}
    return sorted(runs, key=lambda run: (run.kind != "time", place[run.system]))


def _pass_of(request: Request, cell: Cell) -> list[Run]:
    steps = {"time": FEWEST_STEPS, "memory": MEMORY_STEPS}
    return [Run(cell.name, name, kind, steps[kind]) for name, kind in request.jobs_of(cell)]


def _round_of(request: Request, cell: Cell, records: Records) -> list[Run]:
    """Return the missing runs of the first incomplete round without failed systems."""
    here = [
        record for record in records if record["cell"] == cell.name and record["kind"] == "time"
    ]
    failed = {record["system"] for record in here if "failed" in record}
    systems = [
        name for name in request.systems if name in {record["system"] for record in here} - failed
    ]
    number = 1
    runs: list[Run] = []
    while systems and not runs:
        number += 1
        runs = [Run(cell.name, name, "time", FEWEST_STEPS, number) for name in systems]
        runs = [run for run in runs if not is_recorded(run, records)]
    return in_order(runs)


def _quick_steps(costs: Costs, cell: Cell) -> int:
    return min(MOST_STEPS, int(2 / costs.step(cell, "floor")))


def _fitting(runs: Sequence[Run], costs: Costs, seconds: float) -> list[Run]:
    kept = []
    for run in runs:
        if costs.run(run) <= seconds:
            seconds -= costs.run(run)
            kept.append(run)
    return kept


def _with_more_steps(runs: list[Run], most: int, costs: Costs, seconds: float) -> list[Run]:
    """Return the same runs with the largest equal number of timed steps that fits."""
    for steps in range(most, FEWEST_STEPS, -1):
        longer = [replace(run, steps=steps) if run.kind == "time" else run for run in runs]
        if costs.total(longer) <= seconds:
            return longer
    return runs
