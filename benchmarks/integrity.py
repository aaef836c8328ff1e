"""Measure the cost of integrity checks of memory: a step with `integrity` against a step without
it.

    # GPT-30M in fp32 and bf16, ten minutes
    deepseek-zero run --nproc 2 benchmarks/integrity.py
    deepseek-zero run --nproc 2 benchmarks/integrity.py --cells tiny-fp32 --steps 3 --out /tmp/a.md

Two engines, with a check in every step and without checks, take the same batch in turn, in the
same processes. The difference of a pair is the cost of one check, and a hundredth of it is the cost
per step at the default interval of 100. The lower bound is one read of this rank's states at the
read bandwidth of this core.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

import deepseek_zero as dz
from benchmarks.cells import Cell
from benchmarks.model import Batches
from benchmarks.paired import WARM_UP, stage_racer
from benchmarks.systems.common import Job, take_a_core
from deepseek_zero.base.checksums import block_sums

RESULTS = Path(__file__).parent / "results" / "integrity.md"
CELLS = "30m-fp32,30m-bf16"
EVERY = 100  # default interval in steps
READ_BYTES = 1 << 28


def held(engine: Any) -> int:
    """Return the bytes that a check sums, without gathered weights."""
    return sum(values.nbytes for _, values in engine.parts.integrity._states())


def seconds_a_byte() -> float:
    values = torch.ones(READ_BYTES // 4)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        block_sums(values)
        taken.append(time.perf_counter() - began)
    return min(taken) / READ_BYTES


def race(job: Job, steps: int) -> list[str]:
    """Return the rows of one cell, one per stage."""
    batches, rows = Batches(job.cell, job.size, job.rank, job.size), []
    for stage in (0, 1, 2, 3):
        pair = [
            stage_racer(job, stage, integrity={"mode": mode, "every": 1}) for mode in ("off", "end")
        ]
        for number in range(WARM_UP + steps):
            for each in pair:
                each.run(batches.of_step(number), count=number >= WARM_UP)
        off, on = pair
        more = statistics.median(
            mine - its for mine, its in zip(on.seconds, off.seconds, strict=True)
        )
        step, nbytes = statistics.median(off.seconds), held(on.engine)
        rows.append(
            f"| {stage} | {step * 1e3:.0f} | {more * 1e3:.1f} | {nbytes / 1e6:.0f} | "
            f"{nbytes * seconds_a_byte() * 1e3:.1f} | {more / step:.2%} | "
            f"{more / step / EVERY:.3%} |"
        )
        for each in pair:
            each.engine.destroy()
        del pair, off, on, each
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    dz.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    cores = take_a_core(rank, size)
    lines = [
        "# Cost of the integrity comparison",
        "",
        f"{date.today()}, torch {torch.__version__}, {size} ranks with one thread each, {cores} "
        f"cores; medians of {asked.steps} pairs on rank 0.",
        "Written by `benchmarks/integrity.py`: an engine with `integrity` at every step and an "
        "engine without it take each batch in turn.",
        "",
        "*One comparison*: the difference of a pair. *Held*: bytes of weights, main weights and "
        "moments on a rank. *One reading*: the time to read these bytes at this core's rate; "
        "slices are read twice, and gathered weights once.",
    ]
    for name in asked.cells.split(","):
        rows = race(Job(Cell.parse(name), rank, size), asked.steps)
        lines += ["", f"## {name}", ""]
        lines += [
            "| stage | step, ms | one comparison, ms | held, MB | one reading, ms | at every step "
            "| every 100 |"
        ]
        lines += ["|---|" + "--:|" * 6, *rows]
    if rank == 0:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text("\n".join(lines) + "\n")
        print("\n".join(lines[7:]))


if __name__ == "__main__":
    main()
