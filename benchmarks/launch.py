"""Start the ranks of one run, wait for them, and merge their reports into one record.

    python -m benchmarks.launch tiny-fp32 ours-3   # one short run of one system, its record as JSON

A run that fails or takes too long becomes a record with the reason. All of its processes are
killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .probes import busy_seconds
from .systems import ROOT, SYSTEMS
from .worker import Task

Record = dict[str, Any]
GRACE_SECONDS = 5.0  # for the other ranks to end and report their errors after one has failed
# One thread per rank. glibc returns freed memory immediately only in memory runs, because that
# takes time.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Modules of every system are compiled once, as after an installation.
WARM = {"PYTHONDONTWRITEBYTECODE": ""}
TRIM = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Run:
    """A run of a system in a cell, on `ranks` ranks, with `steps` steps after the first."""

    cell: str
    system: str
    kind: str = "time"
    steps: int = 2
    round: int = 1
    ranks: int = 2
    timeout: float = 600.0


def launch(run: Run) -> Record:
    """Return the record of one run. Errors inside the run do not raise."""
    record: Record = {
        "cell": run.cell,
        "system": run.system,
        "kind": run.kind,
        "round": run.round,
        "ranks": run.ranks,
    }
    record["at"] = datetime.now().isoformat(timespec="seconds")
    began, busy, own = time.perf_counter(), busy_seconds(), _children_seconds()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        processes = _start(run, Path(folder))
        try:
            failure = _wait(processes, run.timeout)
        finally:
            _kill(processes)
        wall = time.perf_counter() - began
        taken = busy_seconds() - busy - (_children_seconds() - own)
        record |= {"wall_seconds": round(wall, 2), "others_cores": round(max(0.0, taken / wall), 3)}
        if failure is not None:
            return record | {"failed": f"{failure}{_last_error(Path(folder))}"}
        reports = [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(len(processes))
        ]
    return record | merge(reports)


def merge(reports: list[dict[str, Any]]) -> Record:
    """Merge the reports of all ranks.

    Times and losses are means, because ranks step together. Start-up and memory are maxima.
    """
    merged: Record = {
        "losses": _means([report["losses"] for report in reports]),
        "versions": reports[0]["versions"],
    }
    if "memory" in reports[0]:
        merged["memory"] = {
            moment: {
                kind: max(report["memory"][moment][kind] for report in reports) for kind in sizes
            }
            for moment, sizes in reports[0]["memory"].items()
        }
        return merged
    worst = {
        name: max(report["seconds"][name] for report in reports) for name in reports[0]["seconds"]
    }
    merged["seconds"] = {name: round(seconds, 4) for name, seconds in worst.items()}
    merged["steps"] = [
        round(seconds, 5) for seconds in _means([report["steps"] for report in reports])
    ]
    merged["cpu_seconds"] = round(statistics.mean(report["cpu_seconds"] for report in reports), 4)
    merged["wire_bytes"] = round(reports[0]["wire_bytes"])
    merged["sent_bytes"] = reports[0]["sent_bytes"]
    merged["settings"] = reports[0]["settings"]
    return merged


def _means(columns: list[list[float]]) -> list[float]:
    return [statistics.mean(values) for values in zip(*columns, strict=True)]


def _start(run: Run, folder: Path) -> list[subprocess.Popen[bytes]]:
    entry = SYSTEMS[run.system]
    cores = sorted(os.sched_getaffinity(0))
    processes = 1 if entry.alone else run.ranks
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    world |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        # One core per rank if there are enough cores, for every system.
        core = cores[rank] if run.ranks <= len(cores) else None
        out = str(folder / f"{rank}.json")
        task = Task(run.cell, run.system, run.kind, run.steps, rank, run.ranks, core, out)
        environment = (
            os.environ | THREADS | WARM | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        if run.kind == "memory":
            environment |= TRIM
        if entry.module == "deepspeed":
            environment |= deepspeed_environment()
        with (folder / f"{rank}.log").open("wb") as log:
            command = [entry.python, "-m", "benchmarks.worker", task.as_json()]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
    return started


def deepspeed_environment() -> dict[str, str]:
    """Return variables that put DeepSpeed's tools (ninja) and compiled operators first."""
    home = Path(SYSTEMS["deepspeed-3"].python).parent
    path = f"{home}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "PATH": path,
        "TORCH_EXTENSIONS_DIR": str(home.parent / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Return None if every rank succeeded, else the error."""
    deadline, failure = time.monotonic() + timeout, None
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return failure or _first_failure(codes)
        if failure is None and (failure := _first_failure(codes)) is not None:
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            return failure or f"not done after {timeout:.0f} s"
        time.sleep(0.05)


def _first_failure(codes: list[int | None]) -> str | None:
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    if not failed:
        return None
    rank, code = failed[0]
    return f"rank {rank} " + (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    )


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill every rank with all its processes: each rank leads a process group."""
    for process in processes:
        with suppress(ProcessLookupError):  # the group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_error(folder: Path) -> str:
    """Return the last line of the first rank that has logged an error."""
    logs = [
        path.read_text(errors="replace").strip().splitlines()
        for path in sorted(folder.glob("*.log"))
    ]
    lines = [line for log in logs for line in log if "Error" in line] or [
        log[-1] for log in logs if log
    ]
    return f": {lines[0][:300]}" if lines else ""


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    cell, system = sys.argv[1:]
    record = launch(Run(cell, system, steps=1))
    print(json.dumps(record, indent=1))
    sys.exit("failed" in record)


if __name__ == "__main__":
    main()
