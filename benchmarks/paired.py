"""Measure a step over the floor with both in the same processes, and the phases of the step.

    # GPT-125M in fp32 and bf16, a quarter of an hour
    deepseek-zero run --nproc 2 benchmarks/paired.py
    deepseek-zero run --nproc 2 benchmarks/paired.py --cells tiny-fp32 --steps 3 --out /tmp/a.md

`make bench` starts a new process for every system, so its ratios include changes of the machine's
load. Here the floor and a stage take the same batch in turn, and each step of ours is divided by
the preceding step of the floor. The phases come from the engine (`explain`) and show the time that
a step takes beyond the floor.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

import deepseek_zero as dz
from benchmarks.cells import Cell
from benchmarks.model import Batch, Batches, build_model
from benchmarks.systems.common import Job, Step, engine_settings, engine_step, take_a_core
from benchmarks.systems.floor import floor_step
from benchmarks.systems.ours import STAGE_3
from deepseek_zero.report.explain import shares

RESULTS = Path(__file__).parent / "results" / "paired.md"
CELLS = "125m-fp32,125m-bf16"
WARM_UP = 2  # steps that are not counted
PHASES = (
    "computing",
    "the optimizer",
    "summing gradients",
    "waiting for gradients",
    "waiting for weights",
)


@dataclass
class Racer:
    """A system and its counted steps. engine: None for the floor."""

    name: str
    step: Step
    engine: Any = None
    seconds: list[float] = field(default_factory=list)
    # seconds, summed over the counted steps
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, batches: list[Batch], *, count: bool) -> None:
        """Run one step that all ranks begin together."""
        dist.barrier()
        if self.engine is not None:
            before = self._phases_so_far()
        began = time.perf_counter()
        for loss in self.step(batches):
            loss.item()
        if not count:
            self.phases.clear()
            return
        self.seconds.append(time.perf_counter() - began)
        if self.engine is not None:
            for name, seconds in self._phases_so_far().items():
                self.phases[name] += seconds - before.get(name, 0.0)

    def _phases_so_far(self) -> dict[str, float]:
        meter = self.engine.runtime.comm.meter
        total = sum(meter.clock.seconds.values())
        return {name: share * total for name, share in shares(meter).items()}

    def row(self, floor: Racer) -> str:
        ratios = sorted(mine / its for mine, its in zip(self.seconds, floor.seconds, strict=True))
        quarter = len(ratios) // 4
        step = statistics.median(self.seconds) * 1e3
        parts = [self.phases[name] / len(self.seconds) * 1e3 for name in PHASES]
        told = " | ".join(f"{part:.1f}" if part else "" for part in parts)
        over = (
            f"{statistics.median(ratios):.2f} | {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        )
        return (
            f"| {self.name} | {step:.1f} | {over} | {min(self.seconds) / min(floor.seconds):.2f} | "
            f"{told} |"
        )


def floor_racer(job: Job) -> Racer:
    racer: Racer
    began = 0.0

    def halfway() -> None:
        nonlocal began
        racer.phases["computing"] += time.perf_counter() - began
        began = time.perf_counter()

    alone = floor_step(build_model(job.cell.shape), job, halfway)

    def step(batches: list[Batch]) -> list[torch.Tensor]:
        nonlocal began
        began = time.perf_counter()
        losses = alone(batches)
        racer.phases["the optimizer"] += time.perf_counter() - began
        return losses

    racer = Racer("floor", step)
    return racer


def stage_racer(job: Job, stage: int, **keys: Any) -> Racer:
    """Return an engine of a stage. keys: additional configuration keys."""
    zero = {"stage": stage, **(STAGE_3 if stage == 3 else {})}
    config = {**engine_settings(job, zero), "steps_per_print": None, **keys}
    engine, *_ = dz.initialize(model=build_model(job.cell.shape), config=config)
    return Racer(f"stage {stage}", engine_step(engine), engine)


def race(job: Job, steps: int) -> list[str]:
    """Return the rows of one cell: each stage against the floor.

    Stages run one after another to save memory.
    """
    floor, batches, rows = floor_racer(job), Batches(job.cell, job.size, job.rank, job.size), []
    for stage in range(4):
        racer = stage_racer(job, stage)
        floor.seconds.clear()
        for number in range(WARM_UP + steps):
            for each in (floor, racer):
                each.run(batches.of_step(number), count=number >= WARM_UP)
        rows.append(racer.row(floor))
        racer.engine.destroy()
        del racer, each
        gc.collect()
    return [floor.row(floor), *rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    dz.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    cores = take_a_core(rank, size)
    lines = [
        "# A step over its floor, both in the same processes",
        "",
        f"{date.today()}, torch {torch.__version__}, {size} ranks with one thread each, {cores} "
        f"cores; {asked.steps} steps on rank 0.",
        "Written by `benchmarks/paired.py`: the floor and a stage take each batch in turn.",
        "",
        "- *Over the floor*: median of the steps' ratios, each to the floor's step before it; "
        "*middle half* of them; *fastest*: the fastest step over the floor's fastest.",
        "- The other columns: milliseconds of a step (means), by the engine's own clock. *Adding "
        "up*: reading the other ranks' gradients.",
    ]
    for name in asked.cells.split(","):
        rows = race(Job(Cell.parse(name), rank, size), asked.steps)
        lines += ["", f"## {name}", ""]
        lines += [
            "| | step, ms | over the floor | middle half | fastest | " + " | ".join(PHASES) + " |"
        ]
        lines += ["|---|" + "--:|" * (4 + len(PHASES)), *rows]
    if rank == 0:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text("\n".join(lines) + "\n")
        print("\n".join(lines[8:]))


if __name__ == "__main__":
    main()
