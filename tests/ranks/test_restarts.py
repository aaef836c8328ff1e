"""torchrun restarts its ranks after a kill, and the losses equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "restarted.py")
MOMENTS = (("start", 4.0), ("joining", 2.0), ("built", 1.5))
End = tuple[int, str, float]  # rank, moment, seconds after it


def restart(folder: Path, way: str, ends: Sequence[End], steps: int, seconds: float) -> list[int]:
    """Run the program with these interruptions; return the steps at which its starts resumed.

    Compares every loss of every start bit by bit with a training without interruptions.
    """
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--max-restarts={len(ends)}",
    ]
    command = [sys.executable, *launcher, PROGRAM, str(folder), str(steps), way, json.dumps(ends)]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        command, env=os.environ | paths, capture_output=True, text=True, timeout=seconds
    )
    assert ended.returncode == 0, ended.stderr[-8000:]
    undisturbed = (folder / "undisturbed").read_text().splitlines()
    assert [int(line.split()[0]) for line in undisturbed] == list(range(steps))
    assert set((folder / "restarted").read_text().splitlines()) == set(undisturbed)
    reached = [line.split() for line in (folder / "reached").read_text().splitlines()]
    assert reached.pop() == ["undisturbed", "0"]
    return [int(step) for _, step in reached]


@pytest.mark.slow  # takes half a minute
@pytest.mark.timeout(180)
def test_training_resumes_after_a_restart_under_torchrun(tmp_path: Path) -> None:
    assert restart(tmp_path, "torch", [(1, "step 6", 0.001)], 9, 150) == [0, 4]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("way", ["engine", "torch", "deepspeed"])
def test_twenty_restarts_at_random_moments_change_no_loss(way: str, tmp_path: Path) -> None:
    """Ranks are killed at startup, during steps and during saves.

    Startup includes import, rendezvous, process groups, construction and loading.
    """
    chance = random.Random(way)
    ends: list[End] = []
    for number in range(20):
        moment, most = MOMENTS[number % len(MOMENTS)]
        ends.append((chance.randrange(2), moment, round(chance.uniform(0.001, most), 3)))
    assert restart(tmp_path, way, ends, 200, 1400)[-1] > 0
