"""The results as a picture: per cell one bar per system, its step time over the floor's.

In the colours of the library's own plots.  Needs matplotlib (the extra "plots").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from deepseek_zero.report.plots import BLUE, INK, ORANGE, OTHER_COLOUR, save_figure, style_axes

from .summary import Summary


@dataclass(frozen=True)
class Panel:
    """Bars over one bound.  bars: name, value over the bound.  goal: the value to stay under."""

    title: str
    bars: Sequence[tuple[str, float]]
    goal: float | None = None


def draw_panels(title: str, panels: Sequence[Panel], path: Path) -> None:
    """One panel under the other; ours are the bars whose names begin so, the dotted line is the
    goal.
    """
    rows = [len(panel.bars) for panel in panels]
    figure = Figure(
        figsize=(6.4, 0.6 + 0.62 * len(rows) + 0.27 * sum(rows)), dpi=160, layout="constrained"
    )
    grid = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows).flatten()
    for axes, panel in zip(grid, panels, strict=True):
        for place, (name, value) in enumerate(panel.bars):
            axes.barh(place, value, 0.62, color=BLUE if name.startswith("ours") else OTHER_COLOUR)
            axes.annotate(f" {value:.2f}", (value, place), va="center", color=INK, fontsize=8.5)
        axes.axvline(1.0, color=INK, linewidth=1.2)
        if panel.goal is not None:
            axes.axvline(panel.goal, color=ORANGE, linewidth=1.2, linestyle=":")
        axes.set_yticks(range(len(panel.bars)), [name for name, _ in panel.bars])
        axes.set_xlim(0, 1.22 * max(*(value for _, value in panel.bars), panel.goal or 0))
        axes.invert_yaxis()
        axes.set_title(panel.title, loc="left", color=INK, fontsize=10.5, fontweight="bold")
        style_axes(axes, along="y", ticks=0)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    save_figure(figure, path)


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """One panel per cell that has a floor; the tiny model, whose steps are all overhead, is left to
    the table.
    """
    shown = [
        summary
        for summary in summaries
        if summary.over_floor("floor") and summary.cell.size != "tiny"
    ]
    counts = [len(_bars(summary)) for summary in shown] or [1]
    columns = min(2, len(counts))
    rows = [max(counts[start : start + columns]) for start in range(0, len(counts), columns)]
    figure = Figure(
        figsize=(5.4 * columns, 1.1 * len(rows) + 0.27 * sum(rows)), dpi=160, layout="constrained"
    )
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=rows).flatten()
    for axes, summary in zip(grid, shown, strict=False):
        _panel(axes, summary)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    figure.suptitle(
        "Step time over the floor: ranks that never talk",
        x=0.01,
        ha="left",
        color=INK,
        fontsize=13,
        fontweight="bold",
    )
    save_figure(figure, path)


def _bars(summary: Summary) -> list[tuple[str, float]]:
    found = [(name, summary.over_floor(name)) for name in summary.rows if name != "floor"]
    return [(name, value) for name, value in found if value is not None]


def _panel(axes: Any, summary: Summary) -> None:
    bars = _bars(summary)
    for place, (name, value) in enumerate(bars):
        row = summary.rows[name]
        colour = ORANGE if row.is_wrong else BLUE if name.startswith("ours") else OTHER_COLOUR
        axes.barh(place, value, 0.62, color=colour, alpha=0.35 if row.is_wrong else 1.0)
        label = f" {value:.2f}" + (" (other losses)" if row.is_wrong else "")
        axes.annotate(label, (value, place), va="center", color=INK, fontsize=8.5)
    axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(0, 1.22 * max((value for _, value in bars), default=1.0))
    axes.invert_yaxis()
    axes.set_title(summary.cell.name, loc="left", color=INK, fontsize=10.5, fontweight="bold")
    style_axes(axes, along="y", ticks=0)
