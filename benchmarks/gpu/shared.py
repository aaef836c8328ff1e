"""Part 6 of scripts/gpu: two processes on one GPU train as one process of plain PyTorch does, to
the bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.results import attempt, begin
from tests.gpu import plain_runs
from tests.gpu.plain_runs import DEVICE, plain_run


def two_ranks(stage: int, dtype: str, place: str) -> None:
    folder = tempfile.mkdtemp()
    environment = {name: value for name, value in os.environ.items() if name not in WORLD}
    environment |= {"GPU_STAGE": str(stage), "GPU_DTYPE": dtype, "GPU_OUT": folder}
    environment["GPU_PLACE"] = place
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc",
        "2",
        str(Path(plain_runs.__file__)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80)
    print(done.stdout, done.stderr, flush=True)
    assert done.returncode == 0, done.stderr[-400:]
    found = torch.load(Path(folder) / "weights.pt", weights_only=True)
    for ours, plain in zip(found, plain_run(dtype, 2, 3, place), strict=True):
        assert torch.equal(ours.to(DEVICE), plain), f"{(ours.to(DEVICE) - plain).abs().max()} apart"


WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


RUNS = (
    (3, "bf16", "cpu"),
    (0, "fp32", "none"),
    (1, "bf16", "none"),
    (2, "fp32", "none"),
    (3, "bf16", "none"),
)


def main() -> None:
    is_dry = begin()
    for stage, dtype, place in RUNS[:1] if is_dry else RUNS:
        name = f"stage {stage}, {dtype}, two ranks"
        if place != "none":
            name += ", the optimizer on the host"
        attempt(name, lambda s=stage, d=dtype, p=place: two_ranks(s, d, p))


if __name__ == "__main__":
    main()
