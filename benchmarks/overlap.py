"""Measure how much communication overlaps with computation, from the event log of every rank
(`engine.timeline`).

    deepseek-zero run --nproc 2 benchmarks/overlap.py               # GPT-30M, two minutes
    deepseek-zero run --nproc 2 benchmarks/overlap.py --cell tiny-fp32 --steps 2 --out /tmp/a.md

Stages 2 and 3, through shared memory and through gloo, with and without `overlap_comm`, interleaved
in one run. A collective is in progress from the call that starts it until its data has arrived. It
is hidden while its rank does anything other than wait for it. Writes a table (.md) and a picture of
each setting's backward (.png).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

import deepseek_zero as dz
from benchmarks.cells import ADAMW, SEQUENCES_PER_RANK, Cell
from benchmarks.model import Batches, build_model
from benchmarks.plot import PICTURE_WIDTH, titled
from benchmarks.systems.common import take_a_core
from deepseek_zero.base.meter import Event
from deepseek_zero.report.explain import exposed_seconds, overlap_share, under_way_seconds
from deepseek_zero.report.plots import BLUE, ORANGE, save_figure, style_axes

RESULTS = Path(__file__).parent / "results" / "overlap.md"


@dataclass
class Setting:
    """An engine and its measurements. events: of its last step, in seconds since the step's
    start.
    """

    stage: int
    transport: str
    overlap: bool
    engine: Any
    seconds: list[float] = field(default_factory=list)
    under_way: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    began: float = 0.0

    @property
    def name(self) -> str:
        return f"stage {self.stage}, {self.transport}, overlap {'on' if self.overlap else 'off'}"

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], *, count: bool) -> None:
        """Run one optimizer step and record its log."""
        self.engine.runtime.comm.barrier("a step")
        self.began = time.perf_counter()
        with self.engine.timeline() as seen:
            loss = self.engine(*batch)
            self.engine.backward(loss)
            self.engine.step()
        self.events = seen.collectives
        if count:
            self.seconds.append(time.perf_counter() - self.began)
            self.under_way.append(under_way_seconds(self.events))
            self.exposed.append(exposed_seconds(self.events))
            self.shares.append(overlap_share(self.events))

    def row(self) -> str:
        step, under_way, exposed = map(
            statistics.median, (self.seconds, self.under_way, self.exposed)
        )
        share = statistics.median(self.shares)
        figures = f"{step * 1e3:.0f} | {under_way * 1e3:.0f} | {share:.0%} | {exposed / step:.1%}"
        return (
            f"| {self.stage} | {self.transport} | {'on' if self.overlap else 'off'} | {figures} |"
        )


def settings_of(cell: Cell) -> list[Setting]:
    """Return an engine for each setting. Collective."""
    found = []
    for stage, transport, overlap in product((2, 3), ("fastest", "gloo"), (True, False)):
        config = {
            "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "bf16": {"enabled": cell.dtype == "bf16"},
            "transport": transport,
            "steps_per_print": None,
            # With a window of zero, stage 3 gathers again for backward. It prefetches one unit.
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": overlap,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0,
            },
        }
        engine, *_ = dz.initialize(model=build_model(cell.shape), config=config)
        found.append(Setting(stage, transport, overlap, engine))
    return found


def draw(settings: list[Setting], path: Path) -> None:
    """Draw a line per lane and setting with the collectives in progress and the waits of the
    rank.
    """
    figure = Figure(
        figsize=(PICTURE_WIDTH, 0.45 * len(settings) + 1.2), dpi=160, layout="constrained"
    )
    axes = figure.add_subplot()
    for place, setting in enumerate(settings):
        for event in setting.events:
            if event.lane in ("gather", "reduce") and event.arrived > event.issued:
                high = place - 0.2 if event.lane == "gather" else place + 0.2
                start, length = (
                    (event.issued - setting.began) * 1e3,
                    (event.arrived - event.issued) * 1e3,
                )
                axes.barh(high, length, 0.34, start, color=BLUE, alpha=0.55)
                since, until = (
                    max(event.issued, event.waited[0]),
                    min(event.arrived, event.waited[1]),
                )
                if until > since:
                    axes.barh(
                        high,
                        (until - since) * 1e3,
                        0.34,
                        (since - setting.began) * 1e3,
                        color=ORANGE,
                    )
    axes.set_yticks(range(len(settings)), [setting.name for setting in settings], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlabel(
        "milliseconds of one step (upper row: gathers, lower row: reductions)", fontsize=8.5
    )
    titled(figure, "When collectives are in flight, and when a rank waits for them")
    parts = [Patch(color=BLUE, alpha=0.55), Patch(color=ORANGE)]
    labels = ["in flight while the rank computes", "the rank waits"]
    figure.legend(parts, labels, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    style_axes(axes, along="y", ticks=0)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", type=Cell.parse, default=Cell.parse("30m-fp32"))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    dz.init_distributed()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cores = take_a_core(rank, size)
    settings, batches = settings_of(asked.cell), Batches(asked.cell, size, rank, size)
    for number in range(2 + asked.steps):
        for setting in settings:
            setting.step(batches.of_step(number)[0], count=number >= 2)
    if rank:
        return
    lines = [
        "# Overlap of communication and computation",
        "",
        f"{date.today()}, torch {torch.__version__}, {asked.cell.name}, {size} ranks with one "
        f"thread each, {cores} cores; medians of {asked.steps} steps on rank 0.",
        "Written by `benchmarks/overlap.py`. In flight: the time from the call that starts a "
        "collective until its data has arrived.",
        "Hidden: the share of this time in which the rank did other work. Exposed: the share of "
        "the step in which it waited.",
        "",
        "| stage | transport | overlap_comm | step, ms | in flight, ms | hidden | exposed |",
        "|--:|---|---|--:|--:|--:|--:|",
        *(setting.row() for setting in settings),
        "",
        f"![when collectives were in flight]({asked.out.with_suffix('.png').name})",
    ]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    draw(settings, asked.out.with_suffix(".png"))
    asked.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[5:-2]))


if __name__ == "__main__":
    main()
