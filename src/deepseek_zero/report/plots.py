"""Define the style of pictures, and write them as PNG files.

The module needs matplotlib (the extra "plots") and works without a display.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base.errors import NotBuiltError, UsageError
from ..base.given import refuse_url

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
FORWARD = BLUE
BACKWARD = "#7b5ea7"
OTHER_COLOUR = "#9aa5ae"


def require_matplotlib() -> None:
    """Raise an error early if matplotlib is missing, not after an hour of training.

    Raises:
        NotBuiltError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise NotBuiltError(
            "plots need matplotlib, which is not installed.",
            "It is an optional dependency.",
            "pip install matplotlib.",
        )


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure.

    Args:
        width: Width in inches.
        height: Height in inches.
    """
    require_matplotlib()
    # A Figure without pyplot has no global state and needs no window system; savefig uses Agg for a
    # PNG.
    return importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), dpi=160, layout="constrained"
    )


def style_axes(axes: Any, along: str = "x", ticks: float = 3) -> None:
    """Style axes: a base line, no frame, grey ticks, faint grid lines.

    Args:
        axes: Axes of matplotlib to change.
        along: The axis of positions, drawn with ticks; the other axis gets the grid lines.
        ticks: Length of the ticks in points.
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


def paler(colour: str, share: float) -> str:
    """Return a colour that is mixed with white.

    Args:
        colour: Colour as "#rrggbb".
        share: Fraction of white, from 0 to 1.
    """
    channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(each + (255 - each) * share):02x}" for each in channels)


def add_titles(axes: Any, title: str, subtitle: str) -> None:
    """Add a title and a smaller subtitle below it.

    Args:
        axes: Axes of matplotlib to change.
        title: Text of the title.
        subtitle: Text of the subtitle; empty for none.
    """
    pad = 22 if subtitle else 10
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=pad)
    if subtitle:
        place = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(subtitle, (0, 1), (0, 8), **place, color=GREY, fontsize=9.5)


def save_figure(figure: Any, path: Path | str) -> None:
    """Write a PNG atomically.

    Args:
        figure: Figure of matplotlib to save.
        path: Path of the PNG file to write.

    Raises:
        UsageError: The path is a directory.
    """
    path = Path(path)
    refuse_url(f"'{path}'", path)
    if path.is_dir():
        raise UsageError(
            f"the picture '{path}' is a directory.",
            "A picture is one PNG file.",
            f"add the name of a file, such as '{path / 'picture.png'}'.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, format="png", facecolor="white")
    os.replace(unfinished, path)
