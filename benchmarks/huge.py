"""Train a model that is larger than the memory limit: two billion parameters on disk, in a few GB.

    # 2B parameters, 2 ranks, 3 steps, in a memory control group (root)
    python -m benchmarks.huge
    # a quick look, without one
    python -m benchmarks.huge --layers 2 --width 256 --steps 2 --limit-gib 0

The model is built on the meta device and never exists in memory. Reports the seconds of each step
against its schedule bound. The bound is the backward, plus the larger of a forward and the state
traffic at the speed of a plain copy in the same run. Also reports the peak memory of all ranks: as
counted by the control group, including the page cache, and as PSS. Checks first that the disk has
enough space. Writes results/huge.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.checkpoint import checkpoint

# A launcher starts the ranks as a file.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepseek_zero as dz
from benchmarks.cells import SEQUENCES_PER_RANK, Cell, Shape
from benchmarks.model import GPT, Batches
from benchmarks.probes import machine
from benchmarks.tiers import copy_rate, described, job_of, offloading_engine

RESULTS = Path(__file__).parent / "results" / "huge.md"
# version 1; version 2 has one tree for all controllers
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
GIB = 1 << 30
ONE_UNIT_AHEAD = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 1}
# Bytes per parameter on disk, over all ranks: weight, gradient, two moments, and the lower half of
# the main weight for bf16.
DISK_BYTES = {"fp32": 4 + 4 + 8, "bf16": 2 + 2 + 8 + 2}


# -- code of a rank


def train(options: argparse.Namespace) -> None:
    """Run one rank: build on the meta device and train; rank 0 prints its results as JSON at the
    end.
    """
    torch.set_num_threads(1)
    dz.init_distributed()
    job = job_of(Cell(f"{options.layers}x{options.width}", options.dtype))
    rank, size = job.rank, job.size
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(job.cell.shape)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    began = time.perf_counter()
    engine = offloading_engine(model, job, "nvme", options.folder, **ONE_UNIT_AHEAD)
    runtime = engine.runtime
    (memory,) = runtime.comm_ctx.tiers.memories.values()
    story: dict[str, Any] = {
        "initialise": time.perf_counter() - began,
        "steps": [],
        "losses": [],
        "rates": [],
    }
    batches = Batches(job.cell, SEQUENCES_PER_RANK, rank, size)
    for step in range(options.steps):
        runtime.comm.barrier("a step")
        story["rates"].append(size * copy_rate(options.folder))
        runtime.comm.barrier("a copy")
        began = time.perf_counter()
        (batch,) = batches.of_step(step)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        runtime.comm.barrier("the end of a step")
        story["steps"].append(time.perf_counter() - began)
        story["losses"].append(float(loss.detach()))
        if rank == 0:
            print(
                f"step {step}: {story['steps'][-1]:.1f} s, loss {story['losses'][-1]:.4f}",
                file=sys.stderr,
                flush=True,
            )
    clock = runtime.comm.meter.clock
    story |= {
        "seconds": {phase: spent / max(clock.steps, 1) for phase, spent in clock.seconds.items()},
        "read": size * memory.traffic.read_bytes / max(clock.steps, 1),
        "written": size * memory.traffic.written_bytes / max(clock.steps, 1),
        "busy": memory.traffic.seconds / max(clock.steps, 1),
        "waited": memory.traffic.waited_seconds / max(clock.steps, 1),
        "at_rest": size * memory.reserved_bytes,
        "explain": engine.explain().splitlines()[-6:],
    }
    if rank == 0:
        Path(options.story).write_text(json.dumps(story))


# -- code of the parent


class Memory:
    """The peak memory of a process and its children.

    Measured by a control group if one can be created, and as PSS.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.group: Path | None = None
        self.largest_pss = 0
        self._over = threading.Event()
        if limit_bytes:
            group = MEMORY_GROUPS / f"deepseek_zero-{os.getpid()}"
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            self.group = group

    def enter(self) -> None:
        """Join the control group, in the child before it becomes the launcher."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def watch(self, root: int) -> None:
        """Sum the PSS of all descendants periodically."""
        while not self._over.wait(1.0):
            total = 0
            with suppress(psutil.Error):
                for process in psutil.Process(root).children(recursive=True):
                    with suppress(OSError, psutil.Error, IndexError):
                        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                        total += int(rollup.split("Pss:")[1].split()[0]) * 1024
            self.largest_pss = max(self.largest_pss, total)

    def end(self) -> int:
        """Return the peak bytes of the control group, or 0 without one."""
        self._over.set()
        if self.group is None:
            return 0
        largest = int((self.group / "memory.max_usage_in_bytes").read_text())
        with suppress(OSError):
            self.group.rmdir()
        return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--dtype", choices=sorted(DISK_BYTES), default="bf16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--limit-gib", type=float, default=6.0, help="of the control group; 0: none"
    )
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        help="a directory on the disk that holds everything",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--story", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options)
        return
    params = Shape(options.layers, options.width).numel
    needed, free = params * DISK_BYTES[options.dtype] + GIB, shutil.disk_usage(options.folder).free
    if needed > free:
        parser.error(
            f"{needed / GIB:.0f} GiB of disk are needed in {options.folder}, {free / GIB:.0f} are "
            "free"
        )
    memory = Memory(int(options.limit_gib * GIB))
    with tempfile.TemporaryDirectory() as folder:
        story_file = Path(folder) / "story.json"
        command = [sys.executable, "-m", "deepseek_zero.cli", "run", "--nproc", "2", __file__]
        command += ["--story", str(story_file)]
        for name in ("layers", "width", "dtype", "steps", "folder"):
            command += [f"--{name}", str(getattr(options, name))]
        child = subprocess.Popen(
            command, preexec_fn=memory.enter, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        watcher = threading.Thread(target=memory.watch, args=(child.pid,), daemon=True)
        watcher.start()
        code = child.wait()
        largest = memory.end()
        if code:
            raise SystemExit(
                f"the run ended with exit code {code}; the group held {largest / GIB:.2f} GiB at "
                "most"
            )
        story = json.loads(story_file.read_text())
    page = report(options, params, story, largest, memory.largest_pss, described(machine()))
    options.out.write_text(page, encoding="utf-8")
    print(page)


def report(
    options: argparse.Namespace,
    params: int,
    story: dict[str, Any],
    group: int,
    pss: int,
    about: str,
) -> str:
    """Return the page."""
    rate = sorted(story["rates"])[len(story["rates"]) // 2]
    step = sorted(story["steps"][1:])[len(story["steps"][1:]) // 2]
    traffic, seconds = (story["read"] + story["written"]) / rate, story["seconds"]
    bound = seconds["backward"] + max(traffic, seconds["forward"])
    hidden = max(0.0, 1 - story["waited"] / story["busy"]) if story["busy"] else 0.0
    rows = {
        "parameters": (
            f"{params / 1e9:.2f} billion, {options.layers} layers of width {options.width}, "
            f"{options.dtype}"
        ),
        "states on the disk": f"{story['at_rest'] / 1e9:.1f} GB",
        "largest memory, PSS of all ranks": f"{pss / GIB:.2f} GiB",
        "largest memory, control group with page cache": f"{group / GIB:.2f} GiB" if group else "-",
        "initialise": f"{story['initialise']:.0f} s",
        "steps": ", ".join(f"{seconds:.1f} s" for seconds in story["steps"]),
        "losses": ", ".join(f"{loss:.4f}" for loss in story["losses"]),
        "step over its schedule bound": f"{step / bound:.2f} ({step:.1f} s over {bound:.1f} s)",
        "forward, backward (with recomputation), update": ", ".join(
            f"{seconds.get(phase, 0.0):.1f} s" for phase in ("forward", "backward", "optimizer")
        ),
        "a step reads, writes": f"{story['read'] / 1e9:.1f} GB, {story['written'] / 1e9:.1f} GB",
        "a plain copy of as much takes": f"{traffic:.1f} s at {rate / 1e9:.2f} GB/s",
        "of the disk's time beside something else": f"{hidden:.0%}",
    }
    lines = [
        "# A model larger than its memory",
        "",
        "Written by `benchmarks/huge.py`; 2 ranks, 1,024 tokens a step, clipping on, all states "
        "on the disk.",
        "",
        f"{date.today()}, torch {torch.__version__}, {about}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
