"""The template of all benchmark pictures, and the picture of the side-by-side results.

A picture is about 1,000 pixels wide. Its title is its message, each axis has a label, and a system
has the same colour in all pictures. Needs matplotlib (the extra "plots").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepseek_zero.report.plots import (
    BLUE,
    INK,
    ORANGE,
    OTHER_COLOUR,
    save_figure,
    style_axes,
)

from .summary import Summary

PICTURE_WIDTH = 6.4  # inches, at 160 dots per inch
GREEN = "#5a9e6f"
PURPLE = "#8a6fb0"
# By a part of a name in lower case; the first match counts.
COLOURS = {
    "ours": BLUE,
    "this library": BLUE,
    "auto": BLUE,  # a value of the library's configuration
    "deepspeed": ORANGE,
    "tiledfusedlogitsloss": BLUE,  # of this library, through DeepSpeed's API
    "fsdp2": GREEN,
    "ddp": PURPLE,
}
OWNERS = {BLUE: "this library", ORANGE: "DeepSpeed", GREEN: "FSDP2", PURPLE: "DDP"}
LABELS = {
    "single": "one process",
    "ddp": "PyTorch DDP",
    "zero1": "PyTorch ZeRO-1 (DDP)",
    "fsdp2-zero2": "PyTorch FSDP2 as ZeRO-2",
    "fsdp2": "PyTorch FSDP2",
}
STAGED = {"deepspeed": "DeepSpeed", "ours": "this library"}


def colour_of(name: str) -> str:
    """Return the colour of a system, which is the same in all pictures."""
    lower = name.lower()
    return next((colour for word, colour in COLOURS.items() if word in lower), OTHER_COLOUR)


def label_of(system: str) -> str:
    """Return the full name of a system for readers."""
    owner, _, stage = system.partition("-")
    if owner in STAGED and stage:
        return f"{STAGED[owner]}, stage {stage}"
    return LABELS.get(system, system)


def titled(figure: Any, title: str) -> None:
    """Write the message of a picture at its top."""
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=10.5, fontweight="bold")


@dataclass(frozen=True)
class Panel:
    """Bars with one bound.

    Attributes:
        title: Title of the panel.
        bars: The name and the value of each bar.
        goal: The bound, or None.
        axis: The label of the values, with the meaning of 1.0.
    """

    title: str
    bars: Sequence[tuple[str, float]]
    goal: float | None = None
    axis: str = ""


def draw_panels(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Draw panels below each other.

    Args:
        title: The message of the picture.
        panels: Panels from top to bottom.
        path: Path of the PNG file.
    """
    rows = [len(panel.bars) + 1.6 * bool(panel.axis) for panel in panels]
    height = 1.0 + 0.5 * len(rows) + 0.27 * sum(rows)
    figure = Figure(figsize=(PICTURE_WIDTH, height), dpi=160, layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows).flatten()
    for axes, panel in zip(grid, panels, strict=True):
        for place, (name, value) in enumerate(panel.bars):
            axes.barh(place, value, 0.62, color=colour_of(name))
            _write_value(axes, place, value)
        axes.axvline(1.0, color=INK, linewidth=1.2)
        if panel.goal is not None:
            axes.axvline(panel.goal, color=INK, linewidth=1.2, linestyle=":")
        names = [name.replace("ours", "this library") for name, _ in panel.bars]
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0, 1.22 * max(*(value for _, value in panel.bars), panel.goal or 0, 1.0))
        axes.invert_yaxis()
        axes.set_title(panel.title, loc="left", color=INK, fontsize=9.5, fontweight="bold")
        axes.set_xlabel(panel.axis, fontsize=8.5)
        style_axes(axes, along="y", ticks=0)
    names = [name for panel in panels for name, _ in panel.bars]
    handles = _owners(names)
    if any(panel.goal is not None for panel in panels):
        handles.append(Line2D([], [], color=INK, linewidth=1.2, linestyle=":", label="goal"))
    _legend(figure, handles)
    titled(figure, title)
    save_figure(figure, path)


def span_of(panels: Sequence[Panel], begin: str) -> str:
    """Return the range of the bars whose names begin with a prefix.

    Args:
        panels: Panels to search.
        begin: The prefix.
    """
    values = [value for panel in panels for name, value in panel.bars if name.startswith(begin)]
    return f"{min(values):.2f} to {max(values):.2f}"


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Draw a panel for each cell that has a floor, with a bar for each system.

    The tiny model is only in the table, because overhead dominates its steps.

    Args:
        summaries: Results by cell.
        path: Path of the PNG file.
    """
    shown = [
        summary
        for summary in summaries
        if summary.over_floor("floor") and summary.cell.size != "tiny"
    ]
    names = list(dict.fromkeys(name for summary in shown for name, _ in _bars(summary)))
    columns = max(1, min(2, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    height = 0.9 + rows * (0.6 + 0.25 * len(names))
    figure = Figure(figsize=(PICTURE_WIDTH, height), dpi=160, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes, summary in zip(grid, shown, strict=False):
        _panel(axes, summary, names)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    handles = _owners(names)
    if any(row.is_wrong for summary in shown for row in summary.rows.values()):
        wrong = "wrong: losses differ from one process's"
        handles.append(Patch(facecolor="white", edgecolor=ORANGE, hatch="////", label=wrong))
    _legend(figure, handles)
    titled(figure, _message(shown))
    save_figure(figure, path)


def _message(shown: Sequence[Summary]) -> str:
    """Return the message about stage 3, or a neutral title if it was not measured."""
    told = []
    for summary in shown:
        value = summary.over_floor("ours-3")
        if value is not None:
            told.append(f"{value:.2f} ({summary.cell.dtype})")
    if not 1 <= len(told) <= 2:
        return "Step time over that of ranks that do not communicate"
    return f"A step at stage 3 takes {' and '.join(told)} times the floor's time"


def _bars(summary: Summary) -> list[tuple[str, float]]:
    found = [(name, summary.over_floor(name)) for name in summary.rows if name != "floor"]
    return [(name, value) for name, value in found if value is not None]


def _panel(axes: Any, summary: Summary, names: Sequence[str]) -> None:
    bars = _bars(summary)
    for name, value in bars:
        place = names.index(name)
        colour = colour_of(name)
        if summary.rows[name].is_wrong:
            axes.barh(place, value, 0.62, facecolor="white", edgecolor=colour, hatch="////")
            _write_value(axes, place, value, "wrong")
        else:
            axes.barh(place, value, 0.62, color=colour)
            _write_value(axes, place, value)
    axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(names)), [label_of(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.45 * max((value for _, value in bars), default=1.0))
    axes.set_title(
        f"GPT-{summary.cell.size.upper()}, {summary.cell.name.partition('-')[2]}",
        loc="left",
        color=INK,
        fontsize=9.5,
        fontweight="bold",
    )
    axes.set_xlabel(
        f"median step time; 1.0: {summary.ranks} CPU ranks\nthat do not communicate", fontsize=8.5
    )
    axes.tick_params(labelsize=8.5)
    style_axes(axes, along="y", ticks=0)


def _write_value(axes: Any, place: float, value: float, remark: str = "") -> None:
    """Write a value to the right of its bar on white, so that no line crosses it."""
    axes.annotate(
        f"{value:.2f} {remark}".strip(),
        (value, place),
        (4, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )


def _owners(names: Sequence[str]) -> list[Any]:
    """Return the legend of these systems' colours."""
    colours = dict.fromkeys(colour_of(name) for name in names)
    known = [colour for colour in OWNERS if colour in colours]
    handles = [Patch(color=colour, label=OWNERS[colour]) for colour in known]
    if OTHER_COLOUR in colours and handles:
        handles.append(Patch(color=OTHER_COLOUR, label="others"))
    return handles


def _legend(figure: Any, handles: list[Any]) -> None:
    if len(handles) > 1:
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=3,
            frameon=False,
            fontsize=8.5,
            labelcolor=INK,
            handlelength=1.4,
        )
