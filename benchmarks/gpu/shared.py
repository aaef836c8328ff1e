"""Part 6 of scripts/gpu: two processes on one GPU train bitwise like one process of plain
PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.results import attempt, begin
from tests.gpu import plain_runs
from tests.gpu.plain_runs import DEVICE, plain_run

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Run:
    """The training of two ranks.

    Attributes:
        place: Where the optimizer states are.
        is_pipeline: Each rank is a stage.
    """

    stage: int
    dtype: str
    place: str = "none"
    is_pipeline: bool = False

    @property
    def name(self) -> str:
        parts = [f"stage {self.stage}", self.dtype, "two ranks"]
        if self.place != "none":
            parts.append("the optimizer on the host")
        if self.is_pipeline:
            parts.append("two pipeline stages")
        return ", ".join(parts)

    def environment(self) -> dict[str, str]:
        return {
            "GPU_STAGE": str(self.stage),
            "GPU_DTYPE": self.dtype,
            "GPU_PLACE": self.place,
            "GPU_PIPELINE": "1" if self.is_pipeline else "",
        }


RUNS = (
    Run(3, "bf16", place="cpu"),
    Run(1, "bf16", is_pipeline=True),
    Run(3, "fp32", is_pipeline=True),
    Run(0, "fp32"),
    Run(1, "bf16"),
    Run(2, "fp32"),
    Run(3, "bf16"),
)


def two_ranks(run: Run) -> None:
    """Train on two ranks; raise if a weight differs from plain PyTorch in one process."""
    folder = tempfile.mkdtemp()
    environment = {name: value for name, value in os.environ.items() if name not in WORLD}
    environment |= {"GPU_OUT": folder, **run.environment()}
    program = str(Path(plain_runs.__file__))
    command = [sys.executable, "-m", "deepseek_zero.cli", "run", "--nproc", "2", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80)
    print(done.stdout, done.stderr, flush=True)
    assert done.returncode == 0, done.stderr[-400:]
    found = torch.load(Path(folder) / "weights.pt", weights_only=True)
    ranks_of_rows = 1 if run.is_pipeline else 2
    expected = plain_run(run.dtype, ranks_of_rows, 3, run.place)
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours.to(DEVICE), plain), f"{(ours.to(DEVICE) - plain).abs().max()} apart"


def main() -> None:
    is_dry = begin()
    for run in RUNS[:2] if is_dry else RUNS:
        attempt(run.name, partial(two_ranks, run))


if __name__ == "__main__":
    main()
