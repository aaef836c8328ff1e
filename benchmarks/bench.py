"""Run the comparison and write its report: `make bench` (the cells with goals, 20 minutes) or `make
bench-full` (all cells).

    python -m benchmarks.bench --cells 125m-fp32 --systems floor,fsdp2,ours-3 --rounds 3
    python -m benchmarks.bench --dry-run               # every system once, with the smallest model

Writes NAME.json (every run), NAME.md (the tables) and NAME.png. Continues from the runs in
NAME.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .cells import CELLS, Cell
from .launch import Run
from .plan import MEMORY_GOALS, Request, first_pass, floor_runs, next_round
from .session import Session, shown
from .systems import ROOT, SYSTEMS
from .tables import write_report

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
GOOD_ROUNDS = 3  # enough rounds for a stable median
DRY_RUN = ROOT / "runs" / "bench" / "dry-run.json"


def run_first(session: Session, request: Request) -> list[Run]:
    """Make every run once, planning again after each batch until no more fit; report the rest."""
    session.make(floor_runs(request))
    while True:
        runs, left_out = first_pass(request, session.journal.runs, session.remaining)
        if not session.make(runs):
            return left_out + runs


def run_again(session: Session, request: Request, most: float) -> None:
    """Make further rounds, cell by cell, until there are `most` of each or none fits."""
    while session.make(next_round(request, session.journal.runs, session.remaining, most)):
        pass


def parse_cells(text: str) -> list[Cell]:
    return CELLS[text] if text in CELLS else [Cell.parse(name) for name in text.split(",")]


def parse_systems(text: str) -> list[str]:
    names = list(SYSTEMS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(
            f"no system is called {', '.join(unknown)}; there are {', '.join(SYSTEMS)}"
        )
    return names


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(f"'{name}'" for name in CELLS)
    parser.add_argument(
        "--cells", type=parse_cells, default=CELLS["bench"], help=f"{names}, or names with commas"
    )
    parser.add_argument(
        "--systems", type=parse_systems, default=list(SYSTEMS), help="'all', or names with commas"
    )
    parser.add_argument(
        "--budget-minutes", type=float, default=float("inf"), help="plan to end by then"
    )
    parser.add_argument(
        "--rounds", type=int, help="of timed runs; without it as many as the budget allows"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps of a run, fewer where time is short"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results file")
    parser.add_argument(
        "--dry-run", action="store_true", help="every system once, with the smallest model"
    )
    options = parser.parse_args()
    if options.dry_run:
        options.cells, options.rounds, options.steps, options.out = CELLS["dry"], 1, 2, DRY_RUN
        options.out.unlink(missing_ok=True)
    if options.rounds is None and options.budget_minutes == float("inf"):
        parser.error("say when to stop: --rounds or --budget-minutes")
    return options


def main() -> None:
    options = read_options()
    installed = [name for name in options.systems if SYSTEMS[name].is_installed]
    with Session(options.out.resolve(), Console(), 60 * options.budget_minutes) as session:
        if missing := [name for name in options.systems if name not in installed]:
            session.say(
                f"not installed (benchmarks/deepspeed_env installs it): {', '.join(missing)}"
            )
        request, most = (
            Request(options.cells, installed, options.steps),
            options.rounds or float("inf"),
        )
        # Further timed rounds are worth more than memory runs of systems without a memory goal.
        soon = replace(request, memory_of=MEMORY_GOALS)
        run_first(session, soon)
        run_again(session, soon, min(most, GOOD_ROUNDS))
        missed = run_first(session, request)
        run_again(session, request, most)
    left_out = [f"{run.cell} {run.system} ({run.kind})" for run in missed]
    session.journal.note(not_installed=missing, left_out=left_out)
    if left_out:
        session.say(f"left out for lack of time: {', '.join(left_out)}")
    session.say(f"written: {', '.join(shown(path) for path in write_report(session.journal.path))}")


if __name__ == "__main__":
    main()
