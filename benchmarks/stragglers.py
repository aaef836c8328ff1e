"""Measure the cost of straggler detection as a part of a step, on two hosts of two ranks.

    python -m benchmarks.stragglers                  # as root, three minutes
    python -m benchmarks.stragglers --cells tiny-fp32 --steps 14 --out /tmp/stragglers.md

Hosts are namespaces of this machine (`tests/hosts.py`) with an unlimited link. The cost is the
calls in which a rank sums its own seconds and compares those of all ranks, timed here inside the
engine, and a few more numbers in the norm all-gather of every seventh step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepseek_zero as dz
from benchmarks.cells import Cell
from benchmarks.model import Batches, build_model
from benchmarks.systems.common import Job, engine_settings, engine_step
from deepseek_zero.engine.stragglers import WINDOW
from deepseek_zero.optim.step_message import StepMessage
from tests.hosts import free_port, hosts, run_ranks

RESULTS = Path(__file__).parent / "results" / "stragglers.md"
CELLS = "tiny-fp32,30m-bf16"
HOSTS, EACH = 2, 2
GOAL = 0.001


def be_a_rank(cell: str, steps: int) -> None:
    """Train; rank 0 writes the seconds of a step and of the detection, and the largest message."""
    torch.set_num_threads(1)
    dz.init_distributed()
    job = Job(Cell.parse(cell), dist.get_rank(), dist.get_world_size())
    config = {**engine_settings(job, {"stage": 3}), "steps_per_print": None}
    engine: Any = dz.initialize(model=build_model(job.cell.shape), config=config)[0]
    watch, batches, step = (
        engine.parts.step_fields.stragglers,
        Batches(job.cell, job.size, job.rank, job.size),
        engine_step(engine),
    )
    spent, words = 0.0, 0

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def call_timed(*given: Any) -> None:
            nonlocal spent
            began = time.perf_counter()
            call(*given)
            spent += time.perf_counter() - began

        return call_timed

    def add_to(message: StepMessage, number: int) -> None:
        nonlocal words
        before = len(message.pack())
        add(message, number)
        words = max(words, len(message.pack()) - before)

    add, watch.add_to, watch.compare = timed(watch.add_to), add_to, timed(watch.compare)
    seconds = []
    for number in range(WINDOW + steps):
        if number == WINDOW:  # earlier steps are warm-up
            spent = 0.0
        began = time.perf_counter()
        for loss in step(batches.of_step(number)):
            loss.item()
        seconds.append(time.perf_counter() - began)
    mine = statistics.mean(seconds[WINDOW:]), spent / steps, words * 8.0
    rows: list[Any] = [None] * job.size
    dist.all_gather_object(rows, mine)
    if job.rank == 0:
        sys.stdout.write(json.dumps([max(column) for column in zip(*rows, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--steps", type=int, default=10 * WINDOW)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_a_rank(options.as_rank[0], int(options.as_rank[1]))
        return
    lines = []
    for cell in options.cells.split(","):
        with hosts(HOSTS) as pair:
            said = run_ranks(
                "benchmarks.stragglers", pair, free_port(), [cell, options.steps], each=EACH
            )
        step, watch, nbytes = json.loads(said.splitlines()[-1])
        share = watch / step
        lines.append(
            f"| {cell} | {step * 1e3:.1f} | {watch * 1e6:.1f} | {share:.4%} | {share / GOAL:.2f} | "
            f"{nbytes:g} |"
        )
        sys.stderr.write(f"{lines[-1]}\n")
    text = f"""# Cost of the detection of slow ranks and links

Written by `benchmarks/stragglers.py` on {date.today()}: torch {torch.__version__}, {HOSTS} hosts \
of namespaces with
{EACH} ranks each, stage 3, {options.steps} steps; the slowest rank of each column.  The \
goal is {GOAL:.1%} of a step.

| cell | step, ms | the watch in a step, us | share | of the goal | \
bytes of a rank every {WINDOW} steps |
|---|--:|--:|--:|--:|--:|
"""
    options.out.write_text(text + "\n".join(lines) + "\n")
    sys.stderr.write(f"{options.out}\n")


if __name__ == "__main__":
    main()
