"""Measure codecs and transports that are chosen automatically, by the rate of the link between two
hosts.

    python -m benchmarks.chosen_codes                                        # as root, four minutes
    python -m benchmarks.chosen_codes --rates 100mbit --out /tmp/chosen_codes.md

The hosts are namespaces of this machine (`tests/hosts.py`) with one rank each; `tc tbf` limits
their links. At each rate four engines of stage 3 take turns, one step each: with defaults, with
int8 weights and int4 gradients, with `compression.auto`, and with that and `"transport":
"measured"`. A figure is the median of the rounds for the slower rank, next to the speedup over no
codec. The measurements that the choice needs are part of an engine's start-up time. A good choice
is close to the better of the first two rows at every rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepseek_zero as dz
from benchmarks.cells import ADAMW, SEQUENCES_PER_RANK, Cell
from benchmarks.model import Batches, build_model
from tests.hosts import bits_per_second, hosts, run_ranks

RESULTS = Path(__file__).parent / "results" / "chosen_codes.md"
CELL = Cell("8x256", "fp32")
RATES = ("100mbit", "300mbit", "1gbit", "10gbit")
PORT, ROUNDS = 29440, 3
PLAIN, STATED = "as they are", "int8 and int4, stated"
SYSTEMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    STATED: {"compression": {"weights": {"bits": 8}, "gradients": {"bits": 4}}},
    "auto": {"compression": {"auto": True}},
    "auto, transport too": {"compression": {"auto": True}, "transport": "measured"},
}


def start(zero: dict[str, Any]) -> tuple[Any, float]:
    """Return an engine and the seconds of its construction."""
    zero = dict(zero)
    transport = zero.pop("transport", "fastest")
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_RANK,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": None,
        "transport": transport,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    model = build_model(CELL.shape)
    dist.barrier()
    began = time.perf_counter()
    engine = dz.initialize(model=model, config=config)[0]
    dist.barrier()
    return engine, time.perf_counter() - began


def measure(rounds: int) -> None:
    """Print on rank 0, by system, the seconds of start-up and of a step, and the choice."""
    torch.set_num_threads(1)
    dz.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size <= (cores := len(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % cores]})
    start(SYSTEMS[PLAIN])  # opens the connections of the world
    engines = {name: start(zero) for name, zero in SYSTEMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    batches = Batches(CELL, size, rank, size)
    for number in range(rounds + 1):  # the first round records schedules and is not counted
        micro_batches = batches.of_step(number)
        for name, (engine, _) in engines.items():
            dist.barrier()
            began = time.perf_counter()
            for tokens, targets in micro_batches:
                engine.backward(engine(tokens, targets))
                engine.step()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:
                seconds[name].append(float(took))
    words = ("bits chosen by measurement", "measured between hosts", "between hosts: this rank")
    found = {
        name: {
            "start": took,
            "step": statistics.median(seconds[name]),
            "rate": engine.runtime.comm.meter.inter_node_rate,
            "said": [
                line.strip()
                for line in engine.explain().splitlines()
                if line.strip().startswith(words)
            ],
        }
        for name, (engine, took) in engines.items()
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


def run(rate: str, rounds: int) -> dict[str, Any]:
    with hosts(2, rate) as pair:
        said = run_ranks("benchmarks.chosen_codes", pair, PORT, ["--rounds", rounds])
    found: dict[str, Any] = json.loads(
        next(line for line in said.splitlines() if line.startswith("{"))
    )
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    lines = [
        "# Codes and transport chosen by measurement",
        "",
        f"Written by `benchmarks/chosen_codes.py` on {date.today()}: {CELL.name} "
        f"({CELL.shape.numel / 1e6:.1f}M",
        "parameters), stage 3, two hosts of one rank.  Milliseconds of a start and of a step, "
        "medians; times faster",
        "than without codes; the rate that was measured at the start, as a share of the link's.  "
        "Compare",
        "within a table.",
    ]
    for rate, each in found.items():
        lines += [
            "",
            f"## {rate}",
            "",
            "| system | start | step | faster | measured |",
            "|---|---|---|---|---|",
        ]
        plain = each[PLAIN]["step"]
        for name, one in each.items():
            share = f"{one['rate'] * 8 / bits_per_second(rate):.0%}" if one["rate"] else ""
            figures = (
                f"{1e3 * one['start']:.0f}",
                f"{1e3 * one['step']:.0f}",
                f"{plain / one['step']:.2f}",
                share,
            )
            lines.append(f"| {name} | {' | '.join(figures)} |")
        lines += ["", *(f"- {name}: {line}" for name, one in each.items() for line in one["said"])]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default=",".join(RATES), help="in tc's words")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as-rank", action="store_true", help="be one of the ranks")
    given = parser.parse_args()
    if given.as_rank:
        measure(given.rounds)
        return
    found = {rate: run(rate, given.rounds) for rate in given.rates.split(",")}
    given.out.write_text(table(found), encoding="utf-8")
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
