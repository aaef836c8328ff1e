"""Draw the placement of each unit of a plan, and when the unit is used.

All values are computed elsewhere: bytes by `Plan.bytes_of_unit`, times by the schedule. The module
needs matplotlib, like plots.py.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.mesh import Mesh
from ..base.quantities import format_bytes, unit_of
from ..planner.memory import STATES
from ..planner.pieces import PipelinePlan
from ..planner.plan import Plan
from ..planner.schedule import Action, ActionKind, Schedule
from ..tiers.tier import Tier
from .mesh_picture import axes_shown, draw_mesh, draw_pipeline, legend_of, shown_places
from .plots import (
    BACKWARD,
    BLUE,
    FAINT,
    FORWARD,
    GREY,
    INK,
    ORANGE,
    add_titles,
    new_figure,
    paler,
    save_figure,
    style_axes,
)

TIER_COLOURS = {Tier.DEVICE: BLUE, Tier.HOST: "#3f8f5b", Tier.NVME: ORANGE}
PALER = {"weight": 0.0, "grad": 0.3, "master": 0.52, "moments": 0.7}  # mixing ratio with white
GATHERED = "#c3d9ee"
TIMES = [
    (FORWARD, "forward"),
    (GATHERED, "gathered"),
    (BACKWARD, "backward"),
    (FAINT, "whole all the time"),
    (INK, "gradients reduced after it"),
]
MESH_TO_PIPELINE = (1, 2.2)  # ratio of the widths
# Width in inches; maximum number of rows that are all labelled with bytes
WIDTH = 11.0
FEW = 12


@dataclass(frozen=True)
class UnitPlace:
    """One unit on one rank.

    Attributes:
        name: Name of the unit.
        nbytes: Bytes by state and tier.
        is_gathered: Whether its weight is sharded.
        is_promoted: Whether it computes in fp32 in a 16-bit run (precision "auto").
    """

    name: str
    nbytes: Mapping[tuple[str, Tier], int]
    is_gathered: bool
    is_promoted: bool = False

    @property
    def label(self) -> str:
        """Return the label of the unit in the picture."""
        return f"{self.name} (fp32)" if self.is_promoted else self.name

    @property
    def total(self) -> int:
        """Return the bytes of all states."""
        return sum(self.nbytes.values())


def places_of(plan: Plan) -> list[UnitPlace]:
    """Return the bytes and tiers of each unit on this rank."""
    return [
        UnitPlace(unit.name, plan.bytes_of_unit(number), bool(unit.sharded), unit.is_promoted)
        for number, unit in enumerate(plan.units)
    ]


@dataclass
class Strip:
    """A list of actions in columns, one column for each use.

    Attributes:
        gathered: Triples of unit, first column, and end column.
        used: Triples of unit, column, and whether it is a forward or backward.
        reduced: Pairs of unit and the column after which its gradients are reduced.
    """

    gathered: list[tuple[int, int, int]] = field(default_factory=list)
    used: list[tuple[int, int, ActionKind]] = field(default_factory=list)
    reduced: list[tuple[int, int]] = field(default_factory=list)


def strip_of(actions: Sequence[Action]) -> Strip:
    """Return the actions of a schedule in columns, one column for each use.

    A unit is gathered from the column after its gather to the column of its release.
    """
    strip = Strip()
    since = dict[int, int]()
    for action in actions:
        column = len(strip.used)
        match action.kind:
            case ActionKind.GATHER:
                since[action.unit] = column
            case ActionKind.FORWARD | ActionKind.BACKWARD:
                strip.used.append((action.unit, column, action.kind))
            case ActionKind.REDUCE:
                strip.reduced.append((action.unit, column))
            case ActionKind.RELEASE:
                strip.gathered.append((action.unit, since.pop(action.unit), column))
    return strip


def draw(plan: Plan, path: Path | str) -> None:
    """Draw a plan as a PNG: the bytes of each unit, and when the unit is used.

    If the mesh has several ranks, the mesh is drawn below. If the plan has a pipeline, its schedule
    is drawn next to the mesh.

    Args:
        plan: Plan of the run to draw.
        path: Path of the PNG file to write. Its folder is created if it is missing, and an existing
            file is replaced.

    Raises:
        NotBuiltError: matplotlib is not installed, or `path` is a URL.
        OSError: The file cannot be written.
    """
    draw_plan(places_of(plan), plan.schedule, path, plan.explain()[0], plan.mesh, plan.pipeline)


def draw_plan(
    places: Sequence[UnitPlace],
    schedule: Schedule,
    path: Path | str,
    about: str = "",
    mesh: Mesh | None = None,
    pipeline: PipelinePlan | None = None,
) -> None:
    """Draw one row per unit, in the order of use: its bytes, then its times.

    Args:
        places: Units with their bytes on this rank.
        schedule: Schedule of a step, which has the uses of units.
        path: Path of the PNG file to write.
        about: Description in the subtitle.
        mesh: The mesh, drawn if it has several ranks.
        pipeline: The pipeline, drawn if given.
    """
    order = schedule.forward.order
    rows = len(places)
    height = max(1.2, min(0.28 * rows, 4 + 0.07 * rows, 16))  # of the rows, in inches
    axes_height = _axes_height(mesh, pipeline)
    figure = new_figure(WIDTH, height + 1.9 + axes_height)
    above = figure
    if axes_height:
        above, below = figure.subfigures(2, 1, height_ratios=(height + 1.9, axes_height))
        _draw_axes(below, mesh, pipeline)
    left, right = above.subplots(1, 2, sharey=True, width_ratios=(1, 1.25))
    _draw_bytes(left, [places[unit] for unit in order])
    _draw_times(right, places, schedule)
    add_titles(left, "Memory of states", f"on each rank: {_sums(places)}")
    add_titles(right, "When it is used", f"{about}; one column per use")
    _legend(left, *_named_colours(places))
    _legend(right, TIMES, 3)
    points = 72 * height / rows
    size = max(6.0, min(9.0, 0.8 * points))
    shown = range(0, rows, math.ceil(1.1 * size / points))
    labels = [f"{unit}  {places[unit].label}" for unit in order[:: shown.step]]
    left.set_yticks(shown, labels, fontsize=size)
    left.set_ylim(rows - 0.5, -0.5)
    save_figure(figure, path)


def _axes_height(mesh: Mesh | None, pipeline: PipelinePlan | None) -> float:
    """Return the height in inches for the pictures of axes; 0 if there are none."""
    if mesh is None or mesh.world_size == 1:
        return 0.0
    names = axes_shown(mesh)
    rows = len(shown_places(getattr(mesh, names[0]), mesh.world_size)) if len(names) > 1 else 1
    grid = 1.3 + 0.34 * rows + 0.2 * len(names)
    return max(grid, 1.9 + 0.3 * min(pipeline.ranks, 40)) if pipeline is not None else grid


def _draw_axes(figure: Any, mesh: Mesh | None, pipeline: PipelinePlan | None) -> None:
    """Draw the mesh, and next to it the pipeline if there is one."""
    assert mesh is not None
    if pipeline is None:
        draw_mesh(figure.subplots(), mesh)
        return
    left, right = figure.subplots(1, 2, width_ratios=MESH_TO_PIPELINE)
    draw_mesh(left, mesh)
    draw_pipeline(right, pipeline, (WIDTH - 1.2) * MESH_TO_PIPELINE[1] / sum(MESH_TO_PIPELINE))
    entries = legend_of(pipeline)
    columns = 2 if pipeline.virtual > 1 else len(entries)
    _legend(right, entries, columns)


def _draw_bytes(axes: Any, places: Sequence[UnitPlace]) -> None:
    """Draw a bar per unit with the bytes of its states, and write its total next to it.

    The total is omitted if there are many units and the previous one has the same.
    """
    style_axes(axes, along="y", ticks=0)
    unit_bytes, unit = unit_of(max((place.total for place in places), default=0))
    rows = range(len(places))
    ends = [0.0] * len(places)
    keys = _keys(places)
    for state, tier in keys:
        widths = [place.nbytes.get((state, tier), 0) / unit_bytes for place in places]
        axes.barh(
            rows, widths, 0.74, ends, color=_colour(state, tier), edgecolor="white", linewidth=0.5
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, place in enumerate(places):
        if len(places) <= FEW or row == 0 or place.total != places[row - 1].total:
            look = {"textcoords": "offset points", "va": "center", "color": INK, "fontsize": 8}
            axes.annotate(format_bytes(place.total), (ends[row], row), (4, 0), **look)
    axes.set_xlim(0, 1.2 * max(ends, default=1.0) or 1.0)
    axes.set_xlabel(unit, fontsize=9)


def _draw_times(axes: Any, places: Sequence[UnitPlace], schedule: Schedule) -> None:
    """Draw a row per unit: when its weight is gathered, and when it is used and reduced."""
    style_axes(axes, along="y", ticks=0)
    axes.grid(False)
    strip = strip_of(schedule.actions())
    row = {unit: at for at, unit in enumerate(schedule.forward.order)}
    whole = [row[unit] for unit in row if not places[unit].is_gathered]
    axes.barh(whole, len(strip.used), 0.3, 0, color=FAINT)
    for unit, start, stop in strip.gathered:
        if places[unit].is_gathered:
            axes.barh(row[unit], stop - start, 0.74, start, color=GATHERED)
    for unit, column, kind in strip.used:
        color = FORWARD if kind is ActionKind.FORWARD else BACKWARD
        axes.barh(row[unit], 1, 0.74, column, color=color)
    thick = max(0.5, min(1.5, 120 / len(strip.used)))  # in points; less than a column
    for unit, column in strip.reduced:
        axes.plot(
            column, row[unit], "|", color=INK, markersize=7, markeredgewidth=thick, clip_on=False
        )
    axes.axvline(len(strip.used) / 2, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, len(strip.used))
    axes.set_xticks([len(strip.used) / 4, 3 * len(strip.used) / 4], ["forward", "backward"])


def _sums(places: Sequence[UnitPlace]) -> str:
    """Return the bytes in each tier as text."""
    found = Counter[Tier]()
    for place in places:
        for (_, tier), nbytes in place.nbytes.items():
            found[tier] += nbytes
    return ", ".join(f"{format_bytes(found[tier])} {tier.value}" for tier in Tier if found[tier])


def _keys(places: Sequence[UnitPlace]) -> list[tuple[str, Tier]]:
    """Return the states and tiers that have bytes, ordered by tier and then by state."""
    found = {key for place in places for key in place.nbytes}
    return [(state, tier) for tier in Tier for state in STATES if (state, tier) in found]


def _named_colours(places: Sequence[UnitPlace]) -> tuple[list[tuple[str, str]], int]:
    """Return the entries of the legend of bytes and its number of columns.

    Rows are tiers and columns are states.
    """
    keys = _keys(places)
    tiers = dict.fromkeys(tier for _, tier in keys)
    states = [state for state in STATES if any(state == each for each, _ in keys)]
    entries = []
    for state, tier in itertools.product(states, tiers):
        entry = ("none", "")
        if (state, tier) in keys:
            entry = (_colour(state, tier), f"{state}, {tier.value}")
        entries.append(entry)
    return entries, len(states)


def _colour(state: str, tier: Tier) -> str:
    return paler(TIER_COLOURS[tier], PALER[state])


def _legend(axes: Any, entries: Sequence[tuple[str, str]], columns: int) -> None:
    """Place a legend below the axis and its label, for any height of the figure."""
    patch = importlib.import_module("matplotlib.patches").Patch
    shift = importlib.import_module("matplotlib.transforms").ScaledTranslation
    place = axes.transAxes + shift(0, -0.52, axes.figure.dpi_scale_trans)  # inches
    legend = axes.legend(
        [patch(color=colour, label=label) for colour, label in entries],
        [label for _, label in entries],
        ncols=max(1, columns),
        loc="upper left",
        frameon=False,
        labelcolor=INK,
        fontsize=8.5,
        handlelength=1,
        handleheight=1,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.2,
        handletextpad=0.5,
    )
    legend.set_bbox_to_anchor((0, 0), transform=place)
