"""Pictures of a run: its loss curve, and memory per rank by stage.

Owns only how they look; draws from records and rows that others made.  Needs matplotlib (the extra
"plots") and draws without a display.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base.errors import NotBuiltError
from ..base.given import refuse_url
from ..base.quantities import format_bytes
from .measure import MemoryRow, common_unit, states_of
from .records import StepRecord

INK = "#22303c"
GREY = "#7a8894"
FAINT = "#e6eaed"
BLUE = "#1f6fb4"
ORANGE = "#d9662b"
STATE_COLOURS = {
    "weight": "#1f6fb4",
    "grad": "#d9662b",
    "master": "#5a9e6f",
    "moments": "#8a6fb0",
    "buffers": "#b8a03c",
}
OTHER_COLOUR = "#9aa5ae"


@dataclass(frozen=True)
class LossCurveLabels:
    """The text around a loss curve.  chance: the loss of a uniform guess, drawn as a line where
    given.
    """

    title: str = "Training loss"
    subtitle: str = ""
    unit: str = "nats per token"
    chance: float | None = None


def require_matplotlib() -> None:
    """Raise now rather than after an hour of training."""
    if find_spec("matplotlib") is None:
        raise NotBuiltError(
            "plots need matplotlib, which is not installed.",
            "It is an optional dependency.",
            'pip install "deepseek-zero[plots]".',
        )


def loss_curve(
    records: Sequence[StepRecord], path: Path | str, labels: LossCurveLabels = LossCurveLabels()
) -> None:
    """Draw loss over steps: every step faint, the running mean on top, held-out losses as dots."""
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
    """Draw measured bytes per stage, stacked by state, with the predicted total as a line across
    each bar.
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
    """Centred mean over 2 x radius + 1 values, fewer near the ends.

    At the start the window stays even, or a steep curve would start too low; at the end it reaches
    back only, or the last value would be a single noisy step.
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


def new_figure(width: float, height: float) -> Any:
    """An empty figure."""
    require_matplotlib()
    # Figure without pyplot: no global state, no window system, and Agg is what savefig picks for a
    # PNG.
    return importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), dpi=160, layout="constrained"
    )


def style_axes(axes: Any, along: str = "x", ticks: float = 3) -> None:
    """The look of every picture: a base line and no frame, grey ticks, faint lines across.

    along: the axis on which places lie, drawn with ticks of that length; values are read on the
    other one's lines.
    """
    across = "y" if along == "x" else "x"
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK, length=ticks)
    axes.tick_params(axis=across, length=0)
    axes.grid(axis=across, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def add_titles(axes: Any, title: str, subtitle: str) -> None:
    """A title and, below it, smaller, what to know about it."""
    pad = 22 if subtitle else 10
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=pad)
    if subtitle:
        place = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(subtitle, (0, 1), (0, 8), **place, color=GREY, fontsize=9.5)


def save_figure(figure: Any, path: Path | str) -> None:
    """Write a picture whole: a reader never finds half of it."""
    path = Path(path)
    refuse_url(f"'{path}'", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, format="png", facecolor="white")
    os.replace(unfinished, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def _write_at_right_edge(
    axes: Any, y: float, offset: tuple[int, int], text: str, **style: Any
) -> None:
    """Write `text` at height y and the right edge of the plot, moved by `offset` points."""
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
    """Write each curve's name and last value beside its end, where a legend would have to be looked
    up.
    """
    names = [(loss, "training", BLUE) for loss in training] + [
        (loss, "held-out", ORANGE) for loss in held_out
    ]
    # Two ends lie close together: one name above, one below
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
    # A later spike may leave the picture: the fall is the news.
    top = 1.06 * max(*losses[:1], labels.chance or 0.0, 0.1)
    bottom = min(losses, default=0.0)
    axes.set_ylim(max(0.0, bottom - 0.12 * (top - bottom)), top)
    axes.margins(x=0.01)


def _visible_states(rows: Sequence[MemoryRow]) -> list[str]:
    """States whose bar would be thicker than a line; a few buffers of a few bytes only crowd the
    legend.
    """
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
