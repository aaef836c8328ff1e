"""The results file: one line of JSON per run, with the code and the machine that produced it.

It is written after each run, so that an interrupted benchmark can continue. Runs of other code or
of another machine are never mixed with new ones: they are moved to runs/bench/.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from .probes import machine
from .systems import ROOT

# Files that affect measurements. Changes to plans, tables and plots do not invalidate a run.
MEASURED = ["src/deepseek_zero", "benchmarks/systems"]
MEASURED += [f"benchmarks/{name}.py" for name in ("cells", "launch", "model", "probes", "worker")]
ASIDE = ROOT / "runs" / "bench"


class Journal:
    """The runs of this code on this machine. moved: new path of an older file, or None."""

    def __init__(self, path: Path) -> None:
        self.path, self.moved = path, None
        self.about: dict[str, Any] = {
            "code": fingerprint(ROOT),
            "commit": commit(ROOT),
            "machine": machine(),
        }
        self.runs: list[dict[str, Any]] = []
        if not path.exists():
            return
        found = read(path)
        if all(found["about"].get(key) == self.about[key] for key in ("code", "machine")):
            # run failed runs again
            self.runs = [run for run in found["runs"] if "failed" not in run]
        else:
            self.moved = (
                ASIDE
                / f"{path.stem}-{found['about'].get('commit', 'unknown').replace(' ', '')}.json"
            )
            self.moved.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, self.moved)

    def add(self, run: dict[str, Any]) -> None:
        """Record a run."""
        self.runs.append(run)
        self.note(date=str(date.today()))

    def note(self, **facts: Any) -> None:
        """Record facts that apply to all runs."""
        self.about |= facts
        write(self.path, {"about": self.about, "runs": self.runs})


def read(path: Path) -> dict[str, Any]:
    """Return {"about": ..., "runs": [...]}."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    """Write one run per line, so that diffs between versions are readable."""
    lines = ",\n".join(json.dumps(run) for run in content["runs"])
    text = f'{{"about": {json.dumps(content["about"])},\n"runs": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def fingerprint(root: Path) -> str:
    """Return a digest of all measured code."""
    digest = hashlib.sha256()
    for place in MEASURED:
        path = root / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(
                file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:16]


def commit(root: Path) -> str:
    """Return the current commit, and whether measured files differ from it."""
    try:
        name = _git(root, "rev-parse", "--short=10", "HEAD")
        return name + (
            " with changes" if _git(root, "status", "--porcelain", "--", *MEASURED) else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()
