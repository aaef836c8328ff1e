"""The compared systems by name, with the module that builds each and its options.

This module does not import torch, because the parent process reads the table. Each system module
has `build(make_model, job, ...)`, which returns a `System` (common.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = (
    ROOT / ".venv-deepspeed"
    # resolve a link to another checkout, because a different path would compile operators again
).resolve()


@dataclass(frozen=True)
class Entry:
    """The options to build one system.

    Attributes:
        alone: One process does the work of all ranks.
        learns: Its losses are those of the single-process run.
        timed: Its steps are timed, in addition to its memory.
    """

    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    learns: bool = True
    timed: bool = True

    @property
    def python(self) -> str:
        return str(DEEPSPEED / "bin" / "python") if self.module == "deepspeed" else sys.executable

    @property
    def is_installed(self) -> bool:
        return self.module != "deepspeed" or (DEEPSPEED / ".installed").exists()


# in the order of the tables
SYSTEMS: dict[str, Entry] = {
    "floor": Entry("floor", learns=False),
    "single": Entry("single", alone=True),
    "ddp": Entry("ddp"),
    "zero1": Entry("zero1"),
    "fsdp2-zero2": Entry("fsdp2", {"reshard_after_forward": False}),
    "fsdp2": Entry("fsdp2", {"reshard_after_forward": True}),
    "deepspeed-1": Entry("deepspeed", {"stage": 1}),
    "deepspeed-2": Entry("deepspeed", {"stage": 2}),
    "deepspeed-3": Entry("deepspeed", {"stage": 3}),
    "ours-0": Entry("ours", {"stage": 0}),
    "ours-1": Entry("ours", {"stage": 1}),
    "ours-2": Entry("ours", {"stage": 2}),
    "ours-3": Entry("ours", {"stage": 3}),
    "ours-3-init": Entry("ours", {"stage": 3, "init": True}, timed=False),
}
