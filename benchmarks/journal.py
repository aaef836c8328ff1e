"""The results file: every run as one line of JSON, with the code and the machine they are true for.

Written after each run, so that an interrupted benchmark goes on where it stopped.  Runs of other
code or of another
machine are never mixed with new ones: they are moved to runs/bench/.
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

# What decides a figure.  Plans, tables and plots may change without making a measurement untrue.
MEASURED = ["src/deepseek_zero", "benchmarks/systems"]
MEASURED += [f"benchmarks/{name}.py" for name in ("cells", "launch", "model", "probes", "worker")]
ASIDE = ROOT / "runs" / "bench"


class Journal:
    """Runs of this code on this machine.  `moved`: where an older file went, None if there was
    none.
    """

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
            # What failed gets another chance
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
        """Record what is true for all runs."""
        self.about |= facts
        write(self.path, {"about": self.about, "runs": self.runs})


def read(path: Path) -> dict[str, Any]:
    """{"about": ..., "runs": [...]}."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    """One run a line, so that a difference between two versions of the file can be read."""
    lines = ",\n".join(json.dumps(run) for run in content["runs"])
    text = f'{{"about": {json.dumps(content["about"])},\n"runs": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def fingerprint(root: Path) -> str:
    """A digest of all that is measured."""
    digest = hashlib.sha256()
    for place in MEASURED:
        path = root / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(
                file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:16]


def commit(root: Path) -> str:
    """The commit checked out, and whether what is measured differs from it."""
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
