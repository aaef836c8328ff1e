"""Show the results of a run: its loss curve, and its memory per rank at each stage.

The memory is a table (rich) and a picture (matplotlib). Both compare the prediction of the plan
with the measurement.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from deepseek_zero.base.quantities import format_bytes, unit_of
from deepseek_zero.report.plots import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    OTHER_COLOUR,
    STATE_COLOURS,
    add_titles,
    new_figure,
    save_figure,
    style_axes,
)
from deepseek_zero.report.records import StepRecord

STATES = ("weight", "grad", "master", "moments", "buffers")  # the order of tables and pictures
_MAX_DIFFERENCE = 0.01  # a larger difference means that the plan and the allocation disagree


@dataclass(frozen=True)
class MemoryRow:
    """Predicted and measured bytes of one rank at one ZeRO stage, by state."""

    stage: int
    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    measured_total: int

    @property
    def predicted_total(self) -> int:
        """Return the sum of the predicted states."""
        return sum(self.predicted.values())

    @property
    def difference(self) -> float:
        """Return (measured - predicted) / predicted."""
        return (self.measured_total - self.predicted_total) / max(self.predicted_total, 1)


def states_of(rows: Sequence[MemoryRow]) -> list[str]:
    """Return the states with bytes in any row, the usual five first."""
    sizes = [
        item for row in rows for kind in (row.predicted, row.measured) for item in kind.items()
    ]
    found = {state: None for state, size in sizes if size}
    return [state for state in STATES if state in found] + [
        state for state in found if state not in STATES
    ]


def common_unit(rows: Sequence[MemoryRow]) -> tuple[float, str]:
    """Return the size in bytes and the name of a unit that suits every row."""
    return unit_of(max((row.measured_total for row in rows), default=0))


def memory_table(rows: Sequence[MemoryRow], title: str = "Memory per rank") -> Table:
    """Return a table with one row per stage.

    Columns are the predicted bytes by state, the predicted and measured totals, and the difference
    in percent.

    Args:
        rows: The stages.
        title: Title of the table.
    """
    states = states_of(rows)
    unit_bytes, unit = common_unit(rows)
    table = Table(
        title=f"{title} ({unit})", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    table.title_style = "bold"
    table.title_justify = "left"
    table.add_column("stage", justify="center", no_wrap=True)
    for state in states:
        table.add_column(state, justify="right", style="dim", no_wrap=True)
    for column in ("predicted", "measured", "diff %"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        sizes = [_cell(row.predicted.get(state, 0), unit_bytes) for state in states]
        totals = [_cell(row.predicted_total, unit_bytes), _cell(row.measured_total, unit_bytes)]
        table.add_row(str(row.stage), *sizes, *totals, _difference(row))
    return table


def _cell(size: int, unit_bytes: float) -> str:
    if not size:
        return "-"
    return f"{size / unit_bytes:.0f}" if unit_bytes == 1 else f"{size / unit_bytes:.2f}"


def _difference(row: MemoryRow) -> Text:
    style = "green" if abs(row.difference) < _MAX_DIFFERENCE else "red"
    return Text(f"{row.difference * 100:+.2f}", style=style)


@dataclass(frozen=True)
class LossCurveLabels:
    """Texts of a loss curve.

    Attributes:
        title: Title of the picture.
        subtitle: Second line below the title.
        unit: Unit of the loss.
        chance: Loss of a uniform guess, drawn as a line if given.
    """

    title: str = "Training loss"
    subtitle: str = ""
    unit: str = "nats per token"
    chance: float | None = None


def loss_curve(
    records: Sequence[StepRecord], path: Path | str, labels: LossCurveLabels = LossCurveLabels()
) -> None:
    """Plot the loss over steps, with a running mean and held-out losses.

    Args:
        records: Records of the steps in order.
        path: Path of the PNG file.
        labels: Texts of the picture.
    """
    figure, axes = _figure(8.4, 4.8)
    points: list[tuple[int, float]] = []
    kept = []
    for record in records:
        if record.loss is not None and math.isfinite(record.loss) and not record.skipped:
            points.append((record.step, record.loss))
            kept.append(record)
    steps = [step for step, _ in points]
    losses = [loss for _, loss in points]
    held_out = [
        (record.step, record.held_out_loss) for record in kept if record.held_out_loss is not None
    ]
    axes.plot(steps, losses, color=BLUE, alpha=0.28, linewidth=0.9)
    smooth = running_mean(losses, radius=max(1, len(losses) // 40))
    axes.plot(steps, smooth, color=BLUE, linewidth=2.2, solid_capstyle="round")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            "o",
            color=ORANGE,
            markersize=5.5,
            markeredgecolor="white",
            zorder=5,
        )
    if labels.chance is not None:
        axes.axhline(labels.chance, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        _write_at_right_edge(
            axes,
            labels.chance,
            (0, 4),
            f"chance {labels.chance:.2f}",
            ha="right",
            color=GREY,
            fontsize=9.5,
        )
    _label_curve_ends(axes, smooth[-1:], [loss for _, loss in held_out][-1:])
    _scale_axes(axes, losses, labels)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss ({labels.unit})")
    add_titles(axes, labels.title, labels.subtitle)
    save_figure(figure, path)


def memory_bars(
    rows: Sequence[MemoryRow], path: Path | str, title: str = "Memory per rank by ZeRO stage"
) -> None:
    """Plot measured bytes by stage, stacked by state.

    The predicted total is a line across each bar.

    Args:
        rows: The stages.
        path: The PNG file.
        title: Title of the picture.
    """
    figure, axes = _figure(7.2, 4.6)
    unit_bytes, unit = common_unit(rows)
    states = _visible_states(rows)
    for place, row in enumerate(rows):
        bottom = 0.0
        for state in states:
            height = row.measured.get(state, 0) / unit_bytes
            colour = STATE_COLOURS.get(state, OTHER_COLOUR)
            axes.bar(place, height, 0.58, bottom, color=colour, edgecolor="white", linewidth=0.8)
            bottom += height
        predicted = row.predicted_total / unit_bytes
        axes.plot(
            [place - 0.37, place + 0.37],
            [predicted] * 2,
            color=INK,
            linewidth=1.6,
            solid_capstyle="butt",
        )
        top = max(bottom, predicted)
        label = format_bytes(row.measured_total)
        axes.annotate(
            label,
            (place, top),
            (0, 5),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=10,
        )
    axes.set_xticks(range(len(rows)), [f"stage {row.stage}" for row in rows])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(f"memory ({unit})")
    axes.margins(y=0.12)
    _state_legend(axes, states)
    add_titles(axes, title, "bars: measured, by state; black lines: predicted by the plan")
    save_figure(figure, path)


def running_mean(values: Sequence[float], radius: int) -> list[float]:
    """Return the centred mean of 2 x radius + 1 values, or fewer near the ends.

    At the start the window stays symmetric, because a steep curve would otherwise start too low. At
    the end it is shortened only ahead, because the last mean would otherwise be a single noisy
    step.

    Args:
        values: The values.
        radius: Number of values on each side.
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for place in range(len(values)):
        back = min(radius, place)
        ahead = min(back, len(values) - 1 - place)
        means.append((sums[place + ahead + 1] - sums[place - back]) / (back + ahead + 1))
    return means


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def _write_at_right_edge(
    axes: Any, y: float, offset: tuple[int, int], text: str, **style: Any
) -> None:
    """Write text at height y of the right edge, shifted by `offset` points."""
    place = (axes.get_yaxis_transform(), "offset points")
    axes.annotate(
        text,
        (1.0, y),
        offset,
        xycoords=place[0],
        textcoords=place[1],
        annotation_clip=False,
        **style,
    )


def _label_curve_ends(axes: Any, training: list[float], held_out: list[float]) -> None:
    """Write the name and last value of each curve next to its end."""
    names = [(loss, "training", BLUE) for loss in training] + [
        (loss, "held-out", ORANGE) for loss in held_out
    ]
    # The two ends are close together: one label above, one below
    rises = {1: (0,), 2: (9, -9)}.get(len(names), ())
    for rise, (loss, name, colour) in zip(rises, sorted(names, reverse=True), strict=False):
        _write_at_right_edge(
            axes,
            loss,
            (8, rise),
            f"{name} {loss:.2f}",
            va="center",
            color=colour,
            fontsize=10,
            fontweight="bold",
        )


def _scale_axes(axes: Any, losses: Sequence[float], labels: LossCurveLabels) -> None:
    # A later spike may exceed the plot, which is scaled for the decrease of the loss.
    top = 1.06 * max(*losses[:1], labels.chance or 0.0, 0.1)
    bottom = min(losses, default=0.0)
    axes.set_ylim(max(0.0, bottom - 0.12 * (top - bottom)), top)
    axes.margins(x=0.01)


def _visible_states(rows: Sequence[MemoryRow]) -> list[str]:
    """Return the states with a visible bar, to keep tiny buffers out of the legend."""
    least = 0.003 * max(row.measured_total for row in rows)
    return [
        state
        for state in states_of(rows)
        if max(row.measured.get(state, 0) for row in rows) >= least
    ]


def _state_legend(axes: Any, states: Sequence[str]) -> None:
    patches = importlib.import_module("matplotlib.patches")
    handles = [
        patches.Patch(color=STATE_COLOURS.get(state, OTHER_COLOUR), label=state) for state in states
    ]
    axes.legend(
        handles=handles,
        frameon=False,
        labelcolor=INK,
        loc="upper right",
        handlelength=1,
        handleheight=1,
    )
