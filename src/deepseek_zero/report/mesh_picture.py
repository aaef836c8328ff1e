"""Draw the mesh of a run, and when each stage of a pipeline computes.

All values are computed elsewhere: positions by `Mesh`, times by the simulation of the schedule
(pipeline/verify.py). The module needs matplotlib, like plots.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import pipeline
from ..base.mesh import AXES, Mesh
from ..base.quantities import ceil_div
from ..planner.pieces import PipelinePlan
from .plots import BACKWARD, BLUE, FAINT, FORWARD, GREY, INK, add_titles, paler

PALEST = 0.45  # mixing ratio with white for the last virtual stage of a rank
MOST = 3  # shown coordinates of an axis if there are many ranks: the first ones and the last
FEW_RANKS = 32
BACKWARD_FORWARDS = 2.0  # duration of a backward in forwards
MESH_POINTS = 190.0  # width of the picture of a mesh
LEAST_POINTS = 4.5  # minimum size of a number


# Colours and names of computations
KINDS = {
    pipeline.StageActionKind.FORWARD: (FORWARD, "forward"),
    pipeline.StageActionKind.BACKWARD: (BACKWARD, "backward"),
}


@dataclass(frozen=True)
class RankPlace:
    """Position of a rank in the picture of a mesh.

    Attributes:
        rank: The global rank.
        row: Row, in cells.
        column: Column in cells, including gaps between groups.
    """

    rank: int
    row: float
    column: float


def axes_shown(mesh: Mesh) -> list[str]:
    """Return the axes of a mesh with several ranks, from the slowest to the fastest."""
    return [axis for axis in AXES if getattr(mesh, axis) > 1]


def shown_places(size: int, many: int) -> list[int]:
    """Return the coordinates of an axis that are shown.

    Args:
        size: Size of the axis.
        many: Number of ranks of the mesh. If it is large, only the first coordinates and the last
            one are shown.
    """
    return list(range(size)) if many <= FEW_RANKS or size <= MOST else [*range(MOST - 1), size - 1]


def places_on(mesh: Mesh) -> list[RankPlace]:
    """Return the position of each shown rank.

    The slowest axis is vertical and the others are horizontal. The fastest axis is in adjacent
    columns.
    """
    axes = axes_shown(mesh)
    right = axes[1:] or axes
    down = axes[: len(axes) - len(right)]
    columns = _coordinates(mesh, right)
    found = []
    for row, above in enumerate(_coordinates(mesh, down)):
        column = 0.0
        before = columns[0]
        for along in columns:
            if along != before:
                column += 1.0 + _gap(right, before, along)
            before = along
            rank = replace(mesh, rank=0).rank_at(**above, **along)
            found.append(RankPlace(rank, float(row), column))
    return found


def _coordinates(mesh: Mesh, axes: Sequence[str]) -> list[dict[str, int]]:
    """Return all shown coordinates along some axes, the last axis fastest."""
    sizes = [shown_places(getattr(mesh, axis), mesh.world_size) for axis in axes]
    return [dict(zip(axes, found, strict=True)) for found in itertools.product(*sizes)]


def _gap(axes: Sequence[str], before: dict[str, int], now: dict[str, int]) -> float:
    """Return the gap between neighbours.

    It is larger if a slower axis changes or coordinates are omitted.
    """
    moved = next(number for number, axis in enumerate(axes) if before[axis] != now[axis])
    skips = now[axes[moved]] > before[axes[moved]] + 1
    return 0.35 * (len(axes) - 1 - moved) + (0.5 if skips else 0.0)


def draw_mesh(panel: Any, mesh: Mesh) -> None:
    """Draw a grid of ranks with the names of the axes; this rank is highlighted.

    Args:
        panel: The axes of matplotlib.
        mesh: Mesh of ranks to draw.
    """
    names = axes_shown(mesh)
    right = names[1:] or names
    places = places_on(mesh)
    _bare(panel)
    widest = max(place.column for place in places)
    digits = len(str(mesh.world_size - 1))
    size = max(LEAST_POINTS, min(9.0, MESH_POINTS / (widest + 1.2) / (0.62 * digits + 0.4)))
    for place in places:
        is_own = place.rank == mesh.rank
        panel.broken_barh(
            [(place.column - 0.46, 0.92)],
            (place.row - 0.42, 0.84),
            facecolor=BLUE if is_own else FAINT,
            edgecolor="white",
            linewidth=1.0,
        )
        panel.text(
            place.column,
            place.row,
            str(place.rank),
            ha="center",
            va="center",
            color="white" if is_own else INK,
            fontsize=size,
            fontweight="bold" if is_own else "normal",
        )
    _write_columns(panel, mesh, right, places)
    rows = sorted({place.row for place in places})
    panel.set_yticks([])
    if len(names) > 1:
        shown = shown_places(getattr(mesh, names[0]), mesh.world_size)
        panel.set_yticks(rows, [f"{names[0]} {number}" for number in shown], fontsize=9)
    panel.set_xlim(-0.6, max(widest + 0.6, 3.0))
    panel.set_ylim(rows[-1] + 0.6, -0.65 - 0.5 * len(right))
    add_titles(panel, "Ranks in the mesh", f"{mesh}; rank {mesh.rank} is marked")
    if len(places) < mesh.world_size:
        panel.set_xlabel("long axes show their first and last coordinates", fontsize=9, color=INK)


def _write_columns(
    panel: Any, mesh: Mesh, axes: Sequence[str], places: Sequence[RankPlace]
) -> None:
    """Write the coordinates of each axis above its columns, the slowest axis on top.

    A line marks the columns that belong together.
    """
    look = {"va": "center", "color": INK, "fontsize": 8.5}
    first = [place for place in places if place.row == 0]
    coordinates = [replace(mesh, rank=place.rank).coordinates for place in first]
    for level, axis in enumerate(axes):
        height = -0.65 - 0.5 * (len(axes) - 1 - level)
        keys = [tuple(each[name] for name in axes[: level + 1]) for each in coordinates]
        for key in dict.fromkeys(keys):
            columns = [place.column for place, own in zip(first, keys, strict=True) if own == key]
            left = columns[0]
            right = columns[-1]
            is_fastest = level == len(axes) - 1
            if not is_fastest or left < right:
                line = [left - 0.4, right + 0.4]
                panel.plot(line, [height + 0.2] * 2, color=GREY, linewidth=0.8)
            panel.text((left + right) / 2, height, str(key[-1]), ha="center", **look)
        panel.text(-0.72, height, axis, ha="right", **look)


@dataclass(frozen=True)
class Bar:
    """A computation in the picture of a pipeline.

    Attributes:
        rank: The pipeline rank.
        kind: Forward or backward.
        chunk: Index of the virtual stage on its rank.
        micro: The micro-batch.
        start: Start, in units of a forward of all stages of a rank.
        length: Duration in the same unit.
    """

    rank: int
    kind: pipeline.StageActionKind
    chunk: int
    micro: int
    start: float
    length: float


def bars_of(plan: PipelinePlan) -> tuple[list[Bar], float, float]:
    """Return the computations of a step, its duration, and the idle fraction.

    A forward of all stages of a rank takes 1 and a backward 2; messages take no time.
    """
    table = pipeline.schedule_of(plan)
    spans, seconds = pipeline.simulate(table, 1.0 / plan.virtual, BACKWARD_FORWARDS / plan.virtual)
    found = [
        Bar(
            span.rank,
            span.action.kind,
            table.stages_of(span.rank).index(span.action.stage),
            span.action.micro or 0,
            span.start,
            span.end - span.start,
        )
        for span in spans
    ]
    busy = sum(bar.length for bar in found)
    return found, seconds, 1.0 - busy / (seconds * plan.ranks)


def draw_pipeline(panel: Any, plan: PipelinePlan, inches: float) -> None:
    """Draw a row per pipeline rank and a bar per computation; idle time is hatched.

    Args:
        panel: The axes of matplotlib.
        plan: Stages and schedule of the pipeline.
        inches: Width of the panel in inches.
    """
    bars, length, idle = bars_of(plan)
    _bare(panel)
    for rank in range(plan.ranks):
        row = (rank - 0.4, 0.8)
        hatched = {"facecolor": "white", "edgecolor": "#d5dbe0", "hatch": "//////"}
        panel.broken_barh([(0, length)], row, linewidth=0.0, **hatched)
        for kind, chunk in itertools.product(KINDS, range(plan.virtual)):
            own = [bar for bar in bars if (bar.rank, bar.kind, bar.chunk) == (rank, kind, chunk)]
            spans = [(bar.start, bar.length) for bar in own]
            colour = shade(kind, chunk, plan.virtual)
            panel.broken_barh(spans, row, facecolor=colour, edgecolor="white", linewidth=0.6)
    for bar in bars:
        text = str(bar.micro)
        size = min(8.5, 72 * inches * bar.length / length / (0.62 * len(text) + 0.25))
        if size >= LEAST_POINTS:
            panel.text(
                bar.start + bar.length / 2,
                bar.rank,
                text,
                ha="center",
                va="center",
                color="white",
                fontsize=size,
            )
    step = ceil_div(plan.ranks, 32)
    labels = [_row_name(plan, rank) for rank in range(0, plan.ranks, step)]
    panel.set_yticks(range(0, plan.ranks, step), labels, fontsize=9)
    for label in panel.get_yticklabels()[plan.rank // step : plan.rank // step + 1]:
        label.set_fontweight("bold")
        label.set_color(BLUE)
    panel.set_ylim(plan.ranks - 0.4, -0.6)
    panel.set_xlim(0, length)
    panel.set_xticks([])
    panel.set_xlabel("time of one step, a backward taken as two forwards", fontsize=9, color=INK)
    name = f"{plan.schedule}, {plan.micro_batches} micro-batches"
    if plan.virtual > 1:
        name += f", {plan.virtual} stages on each rank"
    about = f"{name}: ranks are idle {idle:.0%} of the time (hatched)"
    add_titles(panel, "When stages compute", about)


def legend_of(plan: PipelinePlan) -> list[tuple[str, str]]:
    """Return the colours in a pipeline's picture and their meanings."""
    found = []
    for kind, (_, word) in KINDS.items():
        for chunk in range(plan.virtual):
            where = f", stage {chunk + 1} of the rank" if plan.virtual > 1 else " of a micro-batch"
            found.append((shade(kind, chunk, plan.virtual), word + where))
    return found


def shade(kind: pipeline.StageActionKind, chunk: int, virtual: int) -> str:
    """Return the colour of a computation, paler for later stages of a rank.

    Args:
        kind: Forward or backward.
        chunk: Index of the virtual stage on its rank.
        virtual: Number of virtual stages of a rank.
    """
    colour, _ = KINDS[kind]
    return paler(colour, PALEST * chunk / max(1, virtual - 1))


def _row_name(plan: PipelinePlan, rank: int) -> str:
    """Return the label of a pipeline rank, with its stages if it has several."""
    stages = [str(stage) for stage, there in enumerate(plan.placement) if there == rank]
    return f"pp {rank}" if len(stages) == 1 else f"pp {rank}: stages {', '.join(stages)}"


def _bare(panel: Any) -> None:
    """Hide the frame and the ticks of a panel."""
    for side in ("top", "right", "left", "bottom"):
        panel.spines[side].set_visible(False)
    panel.tick_params(length=0, colors=GREY, labelcolor=INK)
    panel.set_xticks([])
