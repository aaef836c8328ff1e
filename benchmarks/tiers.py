"""Measure the cost of states on the host or on disk, next to the floor and the speed of the disk.

    deepseek-zero run --nproc 2 benchmarks/tiers.py           # GPT-125M in bf16 and fp32
    deepseek-zero run --nproc 2 benchmarks/tiers.py --cells tiny-fp32 --steps 2 --out /tmp/a.md

Interleaved in the same processes: the floor (ranks that never communicate), stage 3 with everything
on the device, on the host, and on disk, and, between steps, a plain sequential O_DIRECT copy of a
few hundred megabytes. The schedule bound of a step is its backward, plus the larger of a forward
and its state traffic at the speed of that copy. Losses are compared bitwise with the run without
offload. Writes a table (.md), figures (.json) and a picture (.png).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file by a launcher

import deepseek_zero as dz
from benchmarks.cells import SEQUENCES_PER_RANK, Cell
from benchmarks.model import GPT, Batch, Batches, build_model
from benchmarks.plot import Panel, draw_panels
from benchmarks.probes import machine
from benchmarks.systems.common import Job, Step, engine_settings, engine_step
from benchmarks.systems.floor import floor_step
from deepseek_zero.report.explain import Timeline, overlap_share

RESULTS = Path(__file__).parent / "results" / "tiers.md"
COPY_BYTES = 256 << 20
BLOCK = 8 << 20


@dataclass
class Way:
    """A variant of the training.

    Attributes:
        seconds: Seconds of its timed steps.
        losses: Losses of all its steps.
        logs: Event logs of all its steps, for our engine.
    """

    name: str
    step: Step
    engine: Any = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    logs: list[Timeline] = field(default_factory=list)


@dataclass
class Row:
    """A row of the table."""

    cell: str
    name: str
    step_seconds: float
    over_floor: float
    over_bound: float | None = None
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    disk_gbps: float = 0.0
    of_copy: float = 0.0
    hidden: float = 0.0
    resting_bytes: int = 0
    same_losses: bool = True
    during_compute: float = 0.0


def floor_way(job: Job) -> Way:
    return Way("floor", floor_step(build_model(job.cell.shape), job))


def our_way(job: Job, name: str, device: str, folder: str) -> Way:
    engine = offloading_engine(build_model(job.cell.shape), job, device, folder)
    plain, logs = engine_step(engine), list[Timeline]()

    def step(batches: list[Batch]) -> list[torch.Tensor]:
        with engine.timeline() as seen:
            losses = plain(batches)
        logs.append(seen)
        return losses

    return Way(name, step, engine, logs=logs)


def offloading_engine(model: GPT, job: Job, device: str, folder: str, **zero: Any) -> Any:
    """Return an engine of stage 3 with clipping and all states on `device`."""
    place = {"device": device, "nvme_path": folder}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        **zero,
    }
    settings = engine_settings(job, zero | {"offload_optimizer": place, "offload_param": place})
    return dz.initialize(
        model=model, config=settings | {"gradient_clipping": 1.0, "steps_per_print": None}
    )[0]


def described(facts: dict[str, Any]) -> str:
    """Return a short description of the machine."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, with "
        f"{' '.join(facts['has'])}"
    )


def copy_rate(folder: str) -> float:
    """Return the bytes per second of a sequential O_DIRECT write and read of one file, averaged."""
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(4096) * (BLOCK // 4096))
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, COPY_BYTES)
        began = time.perf_counter()
        for call in (os.pwritev, os.preadv):
            for offset in range(0, COPY_BYTES, BLOCK):
                call(descriptor, [block], offset)
        return 2 * COPY_BYTES / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def job_of(cell: Cell) -> Job:
    """Return the job of this rank from the launcher's environment."""
    return Job(cell, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def measure(cell: Cell, steps: int, folder: str) -> list[Row]:
    """Run all variants over the same batches in turn. Collective.

    Each takes two steps, of which the second counts: in the first it allocates memory that the
    others had released.
    """
    job = job_of(cell)
    batches = Batches(cell, SEQUENCES_PER_RANK, job.rank, job.size)
    ways = [
        floor_way(job),
        *(our_way(job, name, device, folder) for name, device in PLACES.items()),
    ]
    fence = ways[1].engine.runtime.comm.barrier
    rates = []
    for turn in range(1 + steps):
        for way in ways:
            for number in (2 * turn, 2 * turn + 1):
                fence(f"before {way.name}")
                began = time.perf_counter()
                losses = way.step(batches.of_step(number))
                fence(f"after {way.name}")
                way.losses += [float(loss) for loss in losses]
            if turn > 0:
                way.seconds.append(time.perf_counter() - began)
        fence("before the copy")
        # all ranks at the same time, which gives the total speed of the disk
        rates.append(job.size * copy_rate(folder))
    return [row_of(cell, way, ways, statistics.median(rates)) for way in ways]


def row_of(cell: Cell, way: Way, ways: list[Way], rate: float) -> Row:
    floor, plain = ways[0], ways[1]
    ratios = [ours / bare for ours, bare in zip(way.seconds, floor.seconds, strict=True)]
    row = Row(cell.name, way.name, statistics.median(way.seconds), statistics.median(ratios))
    if way.engine is None:
        return row
    row.same_losses = way.losses == plain.losses
    runtime = way.engine.runtime
    steps, ranks = runtime.comm.meter.clock.steps, runtime.comm.size
    for memory in runtime.comm_ctx.tiers.memories.values():
        moved, row.resting_bytes = memory.traffic, memory.reserved_bytes
        if not moved.seconds:
            continue
        row.read_bytes, row.written_bytes = moved.read_bytes / steps, moved.written_bytes / steps
        row.disk_gbps = ranks * (moved.read_bytes + moved.written_bytes) / moved.seconds / 1e9
        row.of_copy = row.disk_gbps * 1e9 / rate
        row.hidden = max(0.0, 1 - moved.waited_seconds / moved.seconds)
        # only timed steps
        shares = [overlap_share(log.transfers, log.collectives) for log in way.logs[3::2]]
        row.during_compute = statistics.median(shares)
        clock = plain.engine.runtime.comm.meter.clock
        forward, backward = (
            clock.seconds.get(phase, 0.0) / clock.steps for phase in ("forward", "backward")
        )
        traffic = ranks * (row.read_bytes + row.written_bytes) / rate
        row.over_bound = row.step_seconds / (backward + max(traffic, forward))
    return row


PLACES = {"stage 3, device": "none", "stage 3, host": "cpu", "stage 3, disk": "nvme"}
NOTES = (
    "Bytes are one rank's; the disk's speed is that of all ranks together.",
    "Hidden: the part of the disk's time in which no rank waited for it. During compute, from the "
    "log of all transfers:",
    "the part of the transfer time in which this rank waited neither for the disk nor for a rank "
    "(goal: 50%).",
)


@dataclass(frozen=True)
class Goal:
    """An upper or lower bound for a variant in every cell."""

    way: str
    what: str
    column: str
    limit: float
    is_most: bool = True
    cells: tuple[str, ...] = ("fp32", "bf16")

    def line(self, row: Row) -> str:
        found = getattr(row, self.column)
        is_met = found is not None and (
            found <= self.limit if self.is_most else found >= self.limit
        )
        sign = "<=" if self.is_most else ">="
        return (
            f"| {row.cell}, {self.what} | {sign} {self.limit} | {found:.2f} | "
            f"{'yes' if is_met else 'no'} |"
        )


GOALS = (
    Goal("stage 3, host", "host: step over the floor", "over_floor", 1.25),
    Goal("stage 3, disk", "disk: step over the floor", "over_floor", 2.4, cells=("bf16",)),
    Goal(
        "stage 3, disk", "disk: step over its schedule bound", "over_bound", 1.25, cells=("bf16",)
    ),
    Goal("stage 3, disk", "disk: speed over a plain copy's", "of_copy", 0.85, is_most=False),
    Goal(
        "stage 3, disk",
        "disk: share of transfer time during compute",
        "during_compute",
        0.5,
        is_most=False,
    ),
)


def goals(rows: list[Row]) -> list[str]:
    """Return a table of the goals and results of the 125M cells."""
    found = [
        goal.line(row)
        for row in rows
        for goal in GOALS
        if row.name == goal.way and row.cell in [f"125m-{dtype}" for dtype in goal.cells]
    ]
    return ["| goal | | measured | met |", "|---|--:|--:|:-:|", *found, ""] if found else []


def table(rows: list[Row], about: str) -> str:
    lines = [
        "# States on the host and on a disk",
        "",
        "Written by `benchmarks/tiers.py`; medians; ratios within a turn. In a turn each setting "
        "takes two steps,",
        "and the second step counts.",
        "",
        about,
        "",
        *goals(rows),
        "| cell | | step, s | over floor | over schedule bound | read, MB | written, MB | disk, "
        "GB/s | of a plain copy | hidden | during compute | states there, MB | same losses |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|:-:|",
    ]
    for row in rows:
        bound = f"{row.over_bound:.2f}" if row.over_bound is not None else "-"
        disk = (
            f"{row.read_bytes / 1e6:.0f} | {row.written_bytes / 1e6:.0f} | {row.disk_gbps:.2f} | "
            f"{row.of_copy:.0%} | {row.hidden:.0%} | {row.during_compute:.0%}"
            if row.disk_gbps
            else "- | - | - | - | - | -"
        )
        same = "-" if row.name == "floor" else "yes" if row.same_losses else "**NO**"
        lines.append(
            f"| {row.cell} | {row.name} | {row.step_seconds:.3f} | {row.over_floor:.2f} | {bound} "
            f"| {disk} | {row.resting_bytes / 1e6:.0f} | {same} |"
        )
    lines += ["", *NOTES, ""]
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the steps over the floor, a panel for each cell."""
    cells = dict.fromkeys(row.cell for row in rows)
    axis = "step time; 1.0: ranks that do not communicate, states on the device"
    panels = []
    for cell in cells:
        bars = [
            (f"ours, {row.name.replace('stage 3, ', 'states on the ')}", row.over_floor)
            for row in rows
            if row.cell == cell and row.name != "floor"
        ]
        panels.append(Panel(f"GPT-{cell.replace('m-', 'M, ')}, stage 3", bars, axis=axis))
    draw_panels(f"States on a disk add {_added(rows, 'disk')} to a step", panels, path)


def _added(rows: list[Row], memory: str) -> str:
    """Return the range of additional time over the floor for a memory, in percent."""
    shares = [100 * (row.over_floor - 1) for row in rows if row.name.endswith(memory)]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=lambda text: [Cell.parse(name) for name in text.split(",")])
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="timed steps of each way; one more before each, and two to warm up",
    )
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="a directory on the disk to measure"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dz.init_distributed()
    rows = []
    for cell in options.cells or [Cell("125m", "fp32"), Cell("125m", "bf16")]:
        rows += measure(cell, options.steps, options.folder)
    if int(os.environ["RANK"]) == 0:
        about = (
            f"{date.today()}, torch {torch.__version__}, {os.environ['WORLD_SIZE']} ranks, "
            f"{described(machine())}"
        )
        options.out.write_text(table(rows, about), encoding="utf-8")
        options.out.with_suffix(".json").write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        )
        draw(rows, options.out.with_suffix(".png"))
        print(table(rows, about))


if __name__ == "__main__":
    main()
