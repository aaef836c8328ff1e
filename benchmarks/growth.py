"""Measure how the step time grows with the number of ranks, and the cost per unit with the number
of units.

    make bench-growth

Compares stage 3 with the floor on 2, 3 and 4 ranks, and on 2 ranks with 8 to 96 layers of width
256. Both lines should be flat. Writes growth.json, growth.md and growth.png in results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from deepseek_zero.report.plots import BLUE, INK

from .cells import Cell
from .journal import read
from .launch import Run
from .plot import PICTURE_WIDTH, save_figure, style_axes, titled
from .session import Session, shown
from .summary import Summary, summarise
from .systems import ROOT
from .tables import about

RESULTS = ROOT / "benchmarks" / "results" / "growth.json"
SYSTEM, FLOOR = "ours-3", "floor"
RANKS, RANKS_CELL = (2, 3, 4), Cell("30m", "fp32")
LAYERS, WIDTH = (8, 16, 32, 64, 96), 256


@dataclass(frozen=True)
class Point:
    """One point of a line. per_unit: seconds over the floor per layer."""

    at: int
    floor: float
    step: float
    layers: int

    @property
    def over_floor(self) -> float:
        return self.step / self.floor

    @property
    def per_unit(self) -> float:
        return (self.step - self.floor) / self.layers


def runs_of(rounds: int, steps: int, small: bool) -> list[Run]:
    """Return the runs of every point, once per round, floor and system in turn."""
    places = (
        [("2x64-fp32", ranks) for ranks in RANKS]
        if small
        else [(RANKS_CELL.name, ranks) for ranks in RANKS]
    )
    places += [(depth(layers).name, 2) for layers in (LAYERS[:2] if small else LAYERS)]
    return [
        Run(cell, system, steps=steps, round=number + 1, ranks=ranks)
        for number in range(rounds)
        for cell, ranks in places
        for system in (FLOOR, SYSTEM)
    ]


def depth(layers: int) -> Cell:
    return Cell(f"{layers}x{WIDTH}", "fp32")


def points_by_ranks(runs: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the points of the cell that was run with different numbers of ranks."""
    cells = {run["cell"] for run in runs if run["ranks"] != 2}
    found = [_point(name, ranks, runs, ranks) for name in cells for ranks in RANKS]
    return [point for point in found if point is not None]


def points_by_layers(runs: Sequence[Mapping[str, Any]]) -> list[Point]:
    found = [_point(depth(layers).name, 2, runs, layers) for layers in LAYERS]
    return [point for point in found if point is not None]


def _point(name: str, ranks: int, runs: Sequence[Mapping[str, Any]], at: int) -> Point | None:
    cell = Cell.parse(name)
    summary: Summary = summarise(cell, [run for run in runs if run["ranks"] == ranks])
    floor, step = (
        summary.rows[system].median if system in summary.rows else None
        for system in (FLOOR, SYSTEM)
    )
    return Point(at, floor, step, cell.shape.layers) if floor and step else None


def write_growth(results: Path) -> list[Path]:
    """Write growth.md and growth.png next to growth.json; return all three paths."""
    content = read(results)
    ranks, layers = points_by_ranks(content["runs"]), points_by_layers(content["runs"])
    page, picture = results.with_suffix(".md"), results.with_suffix(".png")
    lines = [
        "# Step time by ranks and layers, stage 3",
        "",
        *about(content["about"], content["runs"]),
        "",
        f"![growth]({picture.name})",
        "",
    ]
    lines += [*_table("ranks", ranks), "", *_table("layers", layers)]
    page.write_text("\n".join(lines) + "\n")
    _draw(ranks, layers, picture)
    return [results, page, picture]


def _table(what: str, points: Sequence[Point]) -> list[str]:
    lines = [
        f"| {what} | floor, s | step, s | over floor | ms over the floor per layer |",
        "|--:|--:|--:|--:|--:|",
    ]
    for each in points:
        figures = [
            f"{each.floor:.3g}",
            f"{each.step:.3g}",
            f"{each.over_floor:.2f}",
            f"{each.per_unit * 1e3:.2f}",
        ]
        lines.append(f"| {each.at} | {' | '.join(figures)} |")
    return lines


def _draw(ranks: Sequence[Point], layers: Sequence[Point], path: Path) -> None:
    figure = Figure(figsize=(PICTURE_WIDTH, 3.0), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    _line(left, ranks, [point.over_floor for point in ranks])
    left.axhline(1.0, color=INK, linewidth=1.2)
    left.set_xlabel("ranks", fontsize=8.5)
    left.set_ylabel("step time; 1.0: ranks\nthat do not communicate", fontsize=8.5)
    _line(right, layers, [point.per_unit * 1e3 for point in layers])
    right.set_xlabel(f"layers of width {WIDTH}", fontsize=8.5)
    right.set_ylabel("ms per layer more than ranks\nthat do not communicate", fontsize=8.5)
    most = max((point.over_floor for point in ranks), default=1.0) - 1
    titled(figure, f"Stage 3 adds at most {most * 100:.0f} % to a step, for 2 to 4 ranks")
    save_figure(figure, path)


def _line(axes: Any, points: Sequence[Point], values: Sequence[float]) -> None:
    axes.plot([point.at for point in points], values, "o-", color=BLUE, linewidth=2, markersize=5)
    for point, value in zip(points, values, strict=True):
        axes.annotate(
            f"{value:.2f}",
            (point.at, value),
            (0, 7),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.set_xticks([point.at for point in points])
    axes.set_ylim(1.3 * min(0.0, *values), 1.3 * max(values, default=1.0))
    axes.margins(x=0.1)
    axes.tick_params(labelsize=8.5)
    style_axes(axes, ticks=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results file")
    parser.add_argument("--dry-run", action="store_true", help="small models, once")
    options = parser.parse_args()
    if options.dry_run:
        options.rounds, options.steps, options.out = (
            1,
            2,
            ROOT / "runs" / "bench" / "growth-dry-run.json",
        )
        options.out.unlink(missing_ok=True)
    with Session(options.out.resolve(), Console()) as session:
        session.make(runs_of(options.rounds, options.steps, options.dry_run))
    session.say(f"written: {', '.join(shown(path) for path in write_growth(session.journal.path))}")


if __name__ == "__main__":
    main()
