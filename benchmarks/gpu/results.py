"""The result lines that a part of `scripts/gpu` prints, and the common start of all parts."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MARK = "RESULT "


@dataclass
class Result:
    """The result of one check.

    Attributes:
        name: Name of the check.
        verdict: "ok", "FAILED" or "skipped".
        figures: Values by name with unit.
        why: The reason of a failure or a skip.
    """

    name: str
    verdict: str = "ok"
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    def found(self) -> str:
        """Return the figures and the reason in one line."""
        shown = [f"{name} {_short(value)}" for name, value in self.figures.items()]
        return ", ".join([*shown, *([self.why] if self.why else [])])

    def line(self) -> str:
        return f"{self.name}: {found}" if (found := self.found()) else self.name


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_result(result: Result) -> None:
    """Send a result to the parent on a separate line, because pytest's dots have no line end."""
    print(f"\n{MARK}{json.dumps(asdict(result))}", flush=True)


def attempt(name: str, work: Callable[[], dict[str, Any] | None]) -> None:
    """Run a check and report its figures and seconds, or its error.

    The traceback goes to the log.
    """
    began = time.perf_counter()
    try:
        figures = work() or {}
        write_result(Result(name, figures={**figures, "s": round(time.perf_counter() - began, 2)}))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        write_result(Result(name, "FAILED", why=text[:600]))
    free()


def free() -> None:
    """Release the device memory of the previous check."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def begin(arguments: Sequence[str] | None = None) -> bool:
    """Parse a part's arguments and set up a world of one rank; return whether this is a dry run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args(arguments)
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in world.items():
        os.environ.setdefault(name, value)
    return bool(asked.dry_run)


def device() -> Any:
    """Return the GPU, or the CPU in a dry run."""
    import torch  # noqa: PLC0415

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
