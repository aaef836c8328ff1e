"""States and activations on a simulated GPU (tests/toy), with one rank and with two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import toy
from tests.needs import need
from tests.pairwise import is_full

ROOT = Path(__file__).parents[2]
CASES = (
    "a_step_of_one_rank",
    "copies_of_a_step",
    "schedule_of_a_step",
    "random_schedules",
    "faults_of_other_systems",
    "stages_and_tiers",
    "optimizers_and_fewer_bits",
    "kernels_on_the_device",
    "checkpoints_and_access",
    "activations_and_memory",
    "planned_on_shapes",
    "offloaded_states",
)


# Copies from the host are latest on a single rank, because two ranks communicate on the host. CI
# runs the cases that move states and offload activations; DEEPSEEK_ZERO_FULL=1 runs all.
RUNS = [(case, ranks) for case in CASES for ranks in (1, 2)]
if not is_full():
    RUNS = [
        ("a_step_of_one_rank", 1),
        ("copies_of_a_step", 1),
        ("schedule_of_a_step", 1),
        ("random_schedules", 1),
        ("faults_of_other_systems", 1),
        ("kernels_on_the_device", 1),
        ("activations_and_memory", 1),
        ("planned_on_shapes", 2),
        ("offloaded_states", 2),
    ]


@pytest.mark.parametrize(("case", "ranks"), RUNS)
def test_on_another_device(case: str, ranks: int, tmp_path: Path) -> None:
    need(toy.can_build(), "g++ and ninja")
    need(torch.version.cuda is None, "a PyTorch without CUDA, beside which no other device can be")
    together = ["deepseek_zero.cli", "run", "--nproc", str(ranks), "--module"] if ranks > 1 else []
    ran = subprocess.run(
        [sys.executable, "-m", *together, "tests.toy.cases", case, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, toy.LIBRARY_VARIABLE: toy.build(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
