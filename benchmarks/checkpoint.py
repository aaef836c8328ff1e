"""Measure checkpoints: how long training is blocked, the disk throughput, and the extra memory.

    # GPT-350M in bf16 (make bench-checkpoint)
    deepseek-zero run --nproc 2 benchmarks/checkpoint.py
    deepseek-zero run --nproc 2 benchmarks/checkpoint.py --cells tiny-fp32 --rounds 1 --out ~/a.md

These take turns in one run: a plain sequential write of the same bytes, with and without the page
cache, each followed by an fsync; a synchronous save; an asynchronous save during steps; a load into
a new engine, as when resuming, and into a trained one, with and without checksums; a plain read of
the same bytes, into one block and into separate memory. All ranks write concurrently. Writes a
table (.md) and figures (.json).
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

import deepseek_zero as dz
from benchmarks.cells import SEQUENCES_PER_RANK, Cell
from benchmarks.model import Batches, build_model
from benchmarks.probes import Peak, machine, settled_memory
from benchmarks.systems.common import engine_settings, engine_step
from benchmarks.tiers import described, job_of
from deepseek_zero.checkpoint.readahead import BLOCK_BYTES, BLOCKS
from deepseek_zero.engine.saving import Restore, load_checkpoint

RESULTS = Path(__file__).parent / "results" / "checkpoint.md"
# Memory that a save may use in addition to the states and one piece in progress.
STAGING_BYTES = BLOCKS * BLOCK_BYTES


@dataclass
class Found:
    """Seconds of every round by operation, and the bytes of this rank."""

    nbytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    extra_bytes: dict[str, int] = field(default_factory=dict)

    def timed(self, what: str, act: Callable[[], Any], fence: Callable[[str], None]) -> None:
        fence(f"before {what}")
        began = time.perf_counter()
        act()
        fence(f"after {what}")
        self.note(what, time.perf_counter() - began)

    def watched(self, what: str, act: Callable[[], Any], fence: Callable[[str], None]) -> None:
        """Record the memory above the level before.

        Not for timed runs, because sampling takes time.
        """
        fence(f"before watching {what}")
        before = settled_memory()["pss"]
        with Peak() as peak:
            act()
            fence(f"after watching {what}")
        self.extra_bytes[what] = peak.highest["pss"] - before

    def note(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def median(self, what: str) -> float:
        return statistics.median(self.seconds[what])


def plain_write(path: Path, nbytes: int, flag: int) -> None:
    """Write with one thread, sequentially, one request at a time, and fsync."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(4096) * (BLOCK_BYTES // 4096))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o600)
    try:
        for offset in range(0, nbytes, BLOCK_BYTES):
            os.pwritev(descriptor, [block], offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_read(path: Path, *, keeps: bool = False) -> None:
    """Read one request at a time.

    keeps: read into newly allocated pages, as a resuming run does, instead of one reused block.
    """
    length = os.stat(path).st_size
    room = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE if keeps else BLOCK_BYTES
    memory = memoryview(mmap.mmap(-1, room))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset in range(0, length, BLOCK_BYTES):
            place = offset if keeps else 0
            os.preadv(descriptor, [memory[place : place + BLOCK_BYTES]], offset)
    finally:
        os.close(descriptor)


def forget_cache(folder: Path) -> None:
    """Drop the files from the page cache, so that a load reads the disk."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(cell: Cell, rounds: int, folder: Path) -> Found:
    """Measure all operations. Collective; `folder` is the same on all ranks."""
    job = job_of(cell)
    settings = engine_settings(job, {"stage": 3}) | {"steps_per_print": None}
    engine = dz.initialize(model=build_model(cell.shape), config=settings)[0]
    step, batches = engine_step(engine), Batches(cell, SEQUENCES_PER_RANK, job.rank, job.size)
    fence, found, numbers = engine.runtime.comm.barrier, Found(), itertools.count()

    def one_step() -> None:
        step(batches.of_step(next(numbers)))

    plain = folder / f"plain{job.rank}"
    for _ in range(2):
        one_step()
    for _ in range(rounds):
        found.timed("save", lambda: engine.save_checkpoint(folder, tag="now"), fence)
        found.nbytes = (folder / "now" / f"rank_{job.rank:05d}.safetensors").stat().st_size
        found.timed(
            "plain write past the page cache",
            lambda: plain_write(plain, found.nbytes, os.O_DIRECT),
            fence,
        )
        found.timed("plain write through it", lambda: plain_write(plain, found.nbytes, 0), fence)
        for _ in range(2):
            found.timed("step", one_step, fence)
        save_behind(
            found, engine, folder, lambda: found.timed("step while one is written", one_step, fence)
        )
        for what, verify in (
            ("load over a run", True),
            ("load over a run, checksums not looked at", False),
        ):
            forget_cache(folder)
            found.timed(what, partial(load, engine, folder, verify), fence)
        resumed = dz.initialize(model=build_model(cell.shape), config=settings)[0]
        forget_cache(folder)
        found.timed("load", partial(load, resumed, folder, True), fence)
        resumed.destroy()
        del resumed
        found.timed("plain read", lambda: plain_read(plain), fence)
        found.timed("plain read into new memory", lambda: plain_read(plain, keeps=True), fence)
    found.watched("save", lambda: engine.save_checkpoint(folder, tag="now"), fence)
    found.watched("load over a run", lambda: load(engine, folder, True), fence)
    found.watched("step", one_step, fence)
    found.watched(
        "step while one is written", lambda: save_behind(Found(), engine, folder, one_step), fence
    )
    return found


def save_behind(found: Found, engine: Any, folder: Path, one_step: Callable[[], None]) -> None:
    """Train until an asynchronous save is complete; record its time and how long it blocked
    training.
    """
    began = time.perf_counter()
    engine.save_checkpoint(folder, tag="behind", wait=False)
    called = time.perf_counter() - began
    written = engine.parts.saver.current.write
    while engine.parts.saver.current is not None:
        one_step()
    found.note("save behind: writing", written.seconds)
    still = {
        "call": called,
        "steps that wait": written.blocked_seconds,
        "end": engine.parts.saver.commit_seconds,
    }
    for what, seconds in still.items():
        found.note(f"save behind, still: {what}", seconds)
    found.note("save behind: training stands still", sum(still.values()))


def load(engine: Any, folder: Path, verify: bool) -> None:
    load_checkpoint(engine, folder, "now", Restore(verify=verify))


@dataclass(frozen=True)
class Goal:
    """An upper or lower bound and the measured value."""

    what: str
    limit: float
    found: float
    is_most: bool = True

    def line(self) -> str:
        is_met = self.found <= self.limit if self.is_most else self.found >= self.limit
        sign = "<=" if self.is_most else ">="
        return (
            f"| {self.what} | {sign} {self.limit:.0%} | {self.found:.0%} | "
            f"{'yes' if is_met else 'no'} |"
        )


def goals_of(found: Found) -> list[Goal]:
    """Return the goals, relative to the faster of the two plain writes."""
    fastest = min(
        found.median("plain write past the page cache"), found.median("plain write through it")
    )
    still = found.median("save behind: training stands still") / found.median(
        "save behind: writing"
    )
    read, new = found.median("plain read"), found.median("plain read into new memory")
    return [
        Goal("training stands still, of the time a save behind is written", 0.10, still),
        Goal(
            "save: bandwidth over a plain write's",
            0.80,
            fastest / found.median("save"),
            is_most=False,
        ),
        Goal(
            "load: bandwidth over that of a plain read into new memory",
            0.80,
            new / found.median("load"),
            False,
        ),
        *(
            Goal(f"{what}: bandwidth over a plain read's", 0.80, read / found.median(what), False)
            for what in ("load over a run", "load over a run, checksums not looked at")
        ),
    ]


def table(name: str, found: Found, ranks: int) -> str:
    lines = [
        f"## {name}, {found.nbytes / 1e9:.2f} GB a rank",
        "",
        "| goal | | measured | met |",
        "|---|--:|--:|:-:|",
    ]
    lines += [goal.line() for goal in goals_of(found)]
    lines += [
        "",
        "| | seconds | GB/s, all ranks | extra memory of a rank, MB |",
        "|---|--:|--:|--:|",
    ]
    for what, seconds in found.seconds.items():
        moves = "step" not in what and "still" not in what
        rate = f"{ranks * found.nbytes / statistics.median(seconds) / 1e9:.2f}" if moves else "-"
        extra = f"{found.extra_bytes[what] / 1e6:.0f}" if what in found.extra_bytes else "-"
        lines.append(f"| {what} | {statistics.median(seconds):.3f} | {rate} | {extra} |")
    lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=lambda text: [Cell.parse(name) for name in text.split(",")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="a directory on the disk to measure"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dz.init_distributed()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(options.folder) / f"checkpoint-bench-{os.environ.get('MASTER_PORT', '0')}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = {}
    try:
        for cell in options.cells or [Cell("350m", "bf16")]:
            found[cell.name] = measure(cell, options.rounds, folder)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank:
        return
    about = f"{date.today()}, torch {torch.__version__}, {ranks} ranks, {described(machine())}"
    text = "\n".join(
        [
            "# Checkpoints",
            "",
            "Written by `benchmarks/checkpoint.py`; medians of interleaved rounds.",
            "",
            about,
            "",
            *(table(name, each, ranks) for name, each in found.items()),
            f"A save stages {STAGING_BYTES / 1e6:.0f} MB per rank and one piece of a million "
            "elements. A background save copies up to `checkpoint.snapshot_bytes` more.",
            "",
        ]
    )
    options.out.write_text(text, encoding="utf-8")
    record = {name: asdict(each) for name, each in found.items()}
    options.out.with_suffix(".json").write_text(
        json.dumps({"about": about, **record}, indent=1) + "\n"
    )
    print(text)


if __name__ == "__main__":
    main()
