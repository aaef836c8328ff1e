"""Run one rank: build one system, train a few steps, and write its measurements.

    python -m benchmarks.worker '{"cell": "tiny-fp32", "system": "floor", ...}'

launch.py starts this program. A run of kind "time" times the steps and does not sample memory. A
run of kind "memory" samples memory in a thread and times nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .cells import CONTEXT, Cell
from .probes import Peak, loopback_bytes, settled_memory
from .systems import SYSTEMS

Report = dict[str, Any]
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@dataclass(frozen=True)
class Task:
    """The task of one rank.

    Attributes:
        steps: Steps after the first.
        core: Core to pin to, or None.
        context: Tokens per sequence.
    """

    cell: str
    system: str
    kind: str
    steps: int
    rank: int
    ranks: int
    core: int | None
    out: str
    context: int = CONTEXT

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Trial:
    """One system on this rank, with the times of its construction."""

    def __init__(self, task: Task) -> None:
        self.task, self.cell, self.entry = task, Cell.parse(task.cell), SYSTEMS[task.system]
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        return result

    def load(self) -> None:
        """Import torch, then the system's module and with it the measured library."""
        torch = self.timed("import_torch", lambda: importlib.import_module("torch"))
        torch.set_num_threads(1)
        self.versions = {"torch": torch.__version__}
        if self.entry.module == "deepspeed":
            self.versions["deepspeed"] = metadata.version("deepspeed")
        package = f"{__package__}.systems"
        self.module = self.timed(
            "import", lambda: importlib.import_module(f"{package}.{self.entry.module}")
        )
        self.common, self.model = (
            sys.modules[f"{package}.common"],
            sys.modules[f"{__package__}.model"],
        )

    def build(self) -> None:
        """Build the model and the system; `initialise` is the time beyond a plain model."""
        job = self.common.Job(self.cell, self.task.rank, self.task.ranks)
        share, shares = (0, 1) if self.entry.alone else (job.rank, job.size)
        self.batches = self.model.Batches(self.cell, job.size, share, shares, self.task.context)

        def make_model() -> Any:
            return self.timed("build", lambda: self.model.build_model(self.cell.shape))

        self.system = self.timed(
            "initialise", lambda: self.module.build(make_model, job, **self.entry.options)
        )
        self.seconds["initialise"] -= self.seconds["build"]

    def step(self, number: int) -> float:
        """Run one optimizer step; return the mean loss of its micro-batches."""
        losses = [loss.item() for loss in self.system.step(self.batches.of_step(number))]
        return sum(losses) / len(losses)

    def leave(self) -> None:
        distributed = importlib.import_module("torch.distributed")
        if distributed.is_initialized():
            distributed.destroy_process_group()


def measure_time(task: Task) -> Report:
    """Time everything up to the first step, and each later step with its CPU time and traffic."""
    trial = Trial(task)
    trial.load()
    trial.build()
    seconds, losses = [], []
    cpu = wire = sent = 0.0
    for number in range(1 + task.steps):
        if number == 1:
            cpu, wire, sent = time.process_time(), loopback_bytes(), _own_count(trial)
        began = time.perf_counter()
        losses.append(trial.step(number))
        seconds.append(time.perf_counter() - began)
    report = {
        "seconds": trial.seconds | {"first": seconds[0]},
        "steps": seconds[1:],
        "losses": losses,
        "cpu_seconds": (time.process_time() - cpu) / task.steps,
        "wire_bytes": (loopback_bytes() - wire) / task.steps / task.ranks,
        "sent_bytes": (_own_count(trial) - sent) / task.steps if trial.system.sent_bytes else None,
        "settings": trial.system.settings,
        "versions": trial.versions,
    }
    trial.leave()
    return report


def measure_memory(task: Task) -> Report:
    """Measure memory after the imports, at the peak and the end of initialization, and in
    training.
    """
    trial = Trial(task)
    trial.load()
    memory = {"imported": settled_memory()}
    with Peak() as peak:
        trial.build()
    memory |= {"init_peak": peak.highest, "initialised": settled_memory()}
    with Peak() as peak:
        losses = [trial.step(number) for number in range(1 + task.steps)]
    memory |= {"train_peak": peak.highest, "steady": settled_memory()}
    trial.leave()
    return {"memory": memory, "losses": losses, "versions": trial.versions}


def _own_count(trial: Trial) -> int:
    return trial.system.sent_bytes() if trial.system.sent_bytes else 0


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    # A killed benchmark must not leave ranks running.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if task.core is not None:
        os.sched_setaffinity(0, {task.core})
    report = {"time": measure_time, "memory": measure_memory}[task.kind](task)
    Path(task.out).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
