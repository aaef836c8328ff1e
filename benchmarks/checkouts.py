"""Compare this checkout with another one of the library, step by step on the same machine.

    git worktree add /tmp/before COMMIT
    # GPT-125M and tiny, half an hour
    .venv/bin/python -m benchmarks.checkouts /tmp/before
    .venv/bin/python -m benchmarks.checkouts /tmp/before --cells tiny-fp32 --steps 5 --out /tmp/a.md

Each side has separate ranks, which wait while the other side's ranks take a step on the same batch.
The order within a pair alternates, so a drift of the machine's speed affects both sides. A ratio is
this checkout's time divided by the other's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch.distributed as dist

import deepseek_zero as dz
from benchmarks.cells import Cell
from benchmarks.model import Batches, build_model
from benchmarks.probes import memory_now
from benchmarks.systems.common import Job, engine_settings, engine_step, take_a_core

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "checkouts.md"
CELLS = "tiny-fp32,tiny-bf16,125m-fp32,125m-bf16"
WAYS = "0,1,2,3,host,disk"  # stages; stage 3 with every state on the host or on a disk
WARM_UP = 3  # steps that are not counted
RANKS = 2


def zero_settings(way: str, folder: str) -> dict[str, Any]:
    if way.isdigit():
        return {"stage": int(way), "stage3_param_persistence_threshold": 0}
    rest = {"device": "cpu"} if way == "host" else {"device": "nvme", "nvme_path": folder}
    return {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": rest,
        "offload_optimizer": rest,
    }


def work(cell: Cell, way: str, folder: str) -> None:
    """Run one rank of one side: print a line when ready, then one for each line on standard
    input.
    """
    dz.init_distributed()
    rank = dist.get_rank()
    take_a_core(rank, RANKS)
    job = Job(cell, rank, RANKS)
    model = build_model(cell.shape)
    began = time.perf_counter()
    config = engine_settings(job, zero_settings(way, folder)) | {"steps_per_print": None}
    engine, *_ = dz.initialize(model=model, config=config)
    say({"seconds": time.perf_counter() - began, "file": dz.__file__})
    step, batches = engine_step(engine), Batches(cell, RANKS, rank, RANKS)
    for number, line in enumerate(sys.stdin):
        if line.strip() == "memory":
            gc.collect()
            say({"memory": memory_now()["pss"]})
            continue
        dist.barrier()
        began, ran = time.perf_counter(), time.process_time()
        losses = [loss.item() for loss in step(batches.of_step(number))]
        say(
            {
                "seconds": time.perf_counter() - began,
                "cpu": time.process_time() - ran,
                "losses": losses,
            }
        )
    engine.destroy()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


@dataclass
class Side:
    """The ranks of one checkout."""

    checkout: Path
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # summed over ranks
    losses: list[Any] = field(default_factory=list)
    start_seconds: float = 0.0
    memory: int = 0

    def start(self, cell: Cell, way: str, folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(RANKS):
            world = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
            }
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment = os.environ | {key: str(value) for key, value in world.items()}
            environment["PYTHONPATH"] = str(self.checkout / "src")
            # Start like an installed package, with bytecode files.
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            command = [
                sys.executable,
                "-m",
                "benchmarks.checkouts",
                "--worker",
                cell.name,
                way,
                folder,
            ]
            self.ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        ready = self.heard()
        assert all(Path(each["file"]).is_relative_to(self.checkout) for each in ready), ready
        self.start_seconds = max(each["seconds"] for each in ready)

    def heard(self) -> list[dict[str, Any]]:
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        if not all(lines):
            raise RuntimeError(f"a rank of {self.checkout} ended; its error stands above")
        return [json.loads(line) for line in lines]

    def ask(self, what: str) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(what + "\n")
            rank.stdin.flush()
        return self.heard()

    def step(self, *, count: bool) -> None:
        told = self.ask("step")
        self.losses.append([each["losses"] for each in told])
        if count:
            self.seconds.append(max(each["seconds"] for each in told))
            self.cpu.append(sum(each["cpu"] for each in told))

    def end(self) -> None:
        self.memory = sum(each["memory"] for each in self.ask("memory"))
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


def compare(cell: Cell, way: str, other: Path, steps: int) -> str:
    """Return a row of the table."""
    ours, theirs = Side(ROOT), Side(other)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for side in (theirs, ours):
            side.start(cell, way, folder)
        for number in range(WARM_UP + steps):
            for side in (ours, theirs) if number % 2 else (theirs, ours):
                side.step(count=number >= WARM_UP)
        for side in (ours, theirs):
            side.end()
    ratio, quartiles = of_pairs(ours.seconds, theirs.seconds)
    cpu, _ = of_pairs(ours.cpu, theirs.cpu)
    step_ms = (
        f"{statistics.median(theirs.seconds) * 1e3:.1f} | "
        f"{statistics.median(ours.seconds) * 1e3:.1f}"
    )
    fastest = min(ours.seconds) / min(theirs.seconds)
    start = f"{theirs.start_seconds:.2f} | {ours.start_seconds:.2f}"
    same = "equal" if ours.losses == theirs.losses else "differ"
    memory = f"{theirs.memory / 1e6:.0f} | {ours.memory / 1e6:.0f}"
    name = f"stage {way}" if way.isdigit() else way
    middle = f"**{ratio}** | {quartiles} | {fastest:.3f} | {cpu}"
    return f"| {cell.name} | {name} | {step_ms} | {middle} | {start} | {memory} | {same} |"


def of_pairs(ours: list[float], theirs: list[float]) -> tuple[str, str]:
    """Return the median of the ratios and their interquartile range."""
    ratios = sorted(mine / its for mine, its in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    return (
        f"{statistics.median(ratios):.3f}",
        f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}",
    )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Cell.parse(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps that are counted")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    other = asked.other.resolve()
    columns = (
        "cell, , ms other, ours, ratio, middle half, fastest, CPU time, start s other, ours, MB "
        "other, ours, losses"
    )
    names = columns.split(",")
    rows = [
        "# Steps of two checkouts",
        "",
        f"{date.today()}, {RANKS} ranks with a thread each, {len(os.sched_getaffinity(0))} cores, "
        f"{asked.steps} pairs",
        f"of steps a row.  `python -m benchmarks.checkouts` of {commit(ROOT)} against "
        f"{commit(other)}: ratios of our",
        "time to the other's, for each pair.  Fastest: the ratio of the fastest steps.  CPU time: "
        "the ratio of the CPU time of all ranks.",
        "Start: one construction of the engine.  MB: proportional set size of all ranks at the "
        "end.  Losses: compared bit by bit.",
        "",
        f"|{'|'.join(names)} |",
        "|" + "---|" * len(names),
    ]
    for name in asked.cells.split(","):
        for way in asked.ways.split(","):
            row = compare(Cell.parse(name), way, other, asked.steps)
            print(row, flush=True)
            rows.append(row)
            asked.out.write_text("\n".join(rows) + "\n", encoding="utf-8")


def commit(checkout: Path) -> str:
    return subprocess.check_output(
        ["git", "-C", checkout, "log", "-1", "--format=%h"], text=True
    ).strip()


if __name__ == "__main__":
    main()
