"""Draw the timeline of an accelerator, its copies and its host, with the optimizer on the host.

    .venv/bin/python -m benchmarks.host_schedule    # needs g++, and PyTorch without CUDA

The order of all operations and their dependencies are recorded on the test device of `tests/toy`:
stage 3, clipping, six units, from one backward to the next. Durations are assumed (`FORWARD` and
the next lines) in the range of one H200 with 16 cores and a model of 3.15B parameters. Writes
results/host_schedule.png.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepseek_zero.report.plots import (
    BLUE,
    INK,
    ORANGE,
    STATE_COLOURS,
    add_titles,
    new_figure,
    save_figure,
    style_axes,
)
from tests import toy
from tests.toy.cases import training_on
from tests.toy.schedule import (
    ROWS,
    Span,
    Speeds,
    from_first_backward,
    overlapped_share,
    record,
    replay,
)

RESULTS = Path(__file__).parent / "results" / "host_schedule.png"
UNITS = 6
NUMEL = 3.15e9  # parameters of the model
FORWARD = 0.3  # seconds; the backward takes twice as long
UPDATE = 0.6  # seconds
BYTES = 50e9  # per second in each direction, between page-locked memory and the device


def recorded_spans() -> list[Span]:
    """Record two steps; return the spans from the first backward on, in seconds of the model."""
    with training_on(toy.NAME):
        log, numel = record(2, units=UNITS)
    total = UNITS * numel
    speeds = Speeds(
        forward=FORWARD / total,
        copy=NUMEL / total / BYTES,
        update=UPDATE / total,
    )
    return from_first_backward(replay(log, numel, speeds))


def joined(spans: Sequence[Span]) -> list[Span]:
    """Join neighbouring spans of one unit."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.row, span.start)):
        last = found[-1] if found else None
        is_same = last and (last.row, last.what, last.unit) == (span.row, span.what, span.unit)
        if is_same and span.start - last.stop < 1e-4:
            found[-1] = replace(last, stop=span.stop)
        else:
            found.append(span)
    return found


def draw(spans: Sequence[Span], path: Path) -> None:
    """Draw one row per stream."""
    colours = {
        "forward": BLUE,
        "backward": "#8fb8da",
        "gradient": ORANGE,
        "weight": STATE_COLOURS["master"],
        "update": STATE_COLOURS["moments"],
    }
    figure = new_figure(6.25, 2.7)
    axes = figure.add_subplot()
    named = set[str]()
    for span in joined(spans):
        place = ROWS.index(span.row)
        length = span.stop - span.start
        colour = colours[span.what]
        label = None if span.what in named else span.what
        named.add(span.what)
        axes.barh(
            place,
            length,
            0.72,
            span.start,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=label,
        )
        if length > 0.03:
            middle = span.start + length / 2
            ink = INK if span.what == "backward" else "white"
            axes.text(middle, place, span.unit, ha="center", va="center", color=ink, fontsize=6.5)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.invert_yaxis()
    style_axes(axes, along="x")
    axes.tick_params(labelsize=8)
    axes.set_xlabel("seconds", fontsize=8)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, frameon=False, fontsize=7.5
    )
    axes.set_xlim(0, max(span.stop for span in spans))
    title = "Updates on the host overlap with forward"
    add_titles(axes, title, "numbers: units; order and waits are recorded, lengths assumed")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    # start again, because the device must be registered when the process starts
    if toy.LIBRARY_VARIABLE not in os.environ:
        environment = {**os.environ, toy.LIBRARY_VARIABLE: toy.build(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.host_schedule", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    spans = recorded_spans()
    draw(spans, asked.out)
    for row in ROWS[1:]:
        print(f"{row}: {overlapped_share(spans, row):.0%} while the device computes")


if __name__ == "__main__":
    main()
