"""Run the parts of `scripts/gpu`, each in a separate process with a time limit, and write their
results.

A part is a module of this folder. It prints `RESULT` and a line of JSON for each result
(results.py). `gpu.json` and `gpu.md` are rewritten after every result, so an interrupted run keeps
all results so far. The whole output of a part is in `NAME.log`. A part that fails or exceeds its
time limit is a result, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import MARK, Result

ROOT = Path(__file__).resolve().parents[2]
# import names
REQUIRED = ("torch", "numpy", "pydantic", "typer", "rich", "psutil", "hjson", "cpuinfo")
REPORTED = ("torch", "transformers", "peft", "deepspeed", "pytest", "triton")


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        what: Title.
        seconds: Time limit.
        needs: Packages without which the part is skipped.
    """

    name: str
    what: str
    seconds: float
    needs: tuple[str, ...] = ()
    module: str = ""  # by default benchmarks.gpu.NAME


PARTS = (
    Part("smoke", "one step at each stage and number format; two engines with offload", 60),
    Part("tests", "tests/gpu", 240, needs=("pytest",)),
    Part("speed", "a step of a 1.3B model: plain PyTorch, FSDP2, this library, DeepSpeed", 150),
    Part("host", "a 3B model with its optimizer on the host", 120),
    Part("capped", "an 8B model under a cap of 24 GiB", 150),
    Part("shared", "two processes on one GPU", 120),
    Part("kernels", "codecs and attention", 60),
    Part("checks", "what a user does on one GPU", 180, needs=("transformers",)),
)


@dataclass
class Report:
    """The results of a run and its output folder."""

    out: Path
    facts: dict[str, Any]
    results: list[tuple[str, Result]] = field(default_factory=list)

    def add(self, part: str, result: Result) -> None:
        """Print one result and write both files."""
        self.results.append((part, result))
        print(f"{result.verdict:7} {part}: {result.line()}", flush=True)
        self.write()

    def write(self) -> None:
        rows = [{"part": part, **asdict(result)} for part, result in self.results]
        _replace(
            self.out / "gpu.json", json.dumps({**self.facts, "results": rows}, indent=1) + "\n"
        )
        lines = ["# One GPU", "", *(f"- {name}: {value}" for name, value in self.facts.items()), ""]
        lines += ["| part | result | verdict | found |", "|---|---|---|---|"]
        for part, result in self.results:
            found = result.found().replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {part} | {result.name} | {result.verdict} | {found} |")
        _replace(self.out / "gpu.md", "\n".join(lines) + "\n")

    @property
    def failed(self) -> list[str]:
        return [
            f"{part}: {result.name}" for part, result in self.results if result.verdict == "FAILED"
        ]


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, so that an interrupted run leaves a complete file."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(text, encoding="utf-8")
    hidden.replace(path)


def run_part(part: Part, report: Report, seconds: float, options: Sequence[str]) -> None:
    """Run one part with a time limit in seconds, and add each result immediately."""
    missing = [name for name in part.needs if find_spec(name) is None]
    if missing:
        report.add(
            part.name, Result(part.what, "skipped", why=f"{', '.join(missing)} is not installed")
        )
        return
    module = part.module or f"benchmarks.gpu.{part.name}"
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all of its processes can be killed together
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
    reader.start()
    count, last = 0, ""
    with (report.out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        while (left := began + seconds - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                break
            log.write(line)
            log.flush()
            last = line.strip() or last
            if line.startswith(MARK):
                report.add(part.name, Result(**json.loads(line.removeprefix(MARK))))
                count += 1
    code = _end(child)
    reader.join(timeout=5.0)
    if child.stdout is not None and not reader.is_alive():
        child.stdout.close()
    spent = time.monotonic() - began
    if code is None:
        report.add(
            part.name,
            Result(part.what, "FAILED", why=f"not over after {spent:.0f} s; its last line: {last}"),
        )
    elif code != 0:
        report.add(
            part.name,
            Result(part.what, "FAILED", why=f"ended with exit code {code}; its last line: {last}"),
        )
    elif count == 0:
        report.add(part.name, Result(part.what, "FAILED", why="ended without a result"))


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def _end(child: subprocess.Popen[str]) -> int | None:
    """Return the exit code of a part; kill its processes and return None after the time limit."""
    try:
        return child.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # a session without other processes
        child.wait()
        return None


def facts(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of the machine that readers need."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    found["commit"] = commit.stdout.strip() or "unknown"
    found["cores"] = os.cpu_count()
    for name in REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    asks = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    device = subprocess.run(
        [sys.executable, "-c", asks], capture_output=True, text=True
    ).stdout.strip()
    found["device"] = "cpu, dry run" if asked.dry_run else device
    return found


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the selected parts.

    Returns 1 if something failed and 2 if nothing could start.
    """
    table = "\n".join(f"  {part.name:8} {part.what}" for part in parts)
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=f"parts:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=[part.name for part in parts], help="run this part alone")
    parser.add_argument("--seconds", type=float, default=480.0, help="of the whole call")
    parser.add_argument(
        "--out", type=Path, help="folder of gpu.json, gpu.md and the logs; without it a new one"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    if missing := [name for name in REQUIRED if find_spec(name) is None]:
        print(
            f"not installed: {', '.join(missing)}. The library needs them; install them first.",
            file=sys.stderr,
        )
        return 2
    if asked.dry_run:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = asked.out or Path(tempfile.mkdtemp(prefix="deepseek_zero-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out, facts(asked))
    if not report.facts["device"]:
        print("torch sees no GPU here; --dry-run runs tiny models on the CPU.", file=sys.stderr)
        return 2
    print(f"{report.facts['device']}, torch {report.facts['torch']}; results in {out}", flush=True)
    chosen = [part for part in parts if asked.only in (None, part.name)]
    for part in chosen:
        left = began + asked.seconds - time.monotonic()
        if left < 5:
            report.add(
                part.name, Result(part.what, "skipped", why=f"the {asked.seconds:.0f} s are over")
            )
            continue
        limit = left if asked.dry_run else min(part.seconds, left)  # the limits are for a GPU
        run_part(part, report, limit, ["--dry-run"] if asked.dry_run else [])
    failed = report.failed
    print(
        f"{len(report.results)} results in {time.monotonic() - began:.0f} s, {len(failed)} failed",
        flush=True,
    )
    return 1 if failed else 0
