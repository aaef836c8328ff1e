"""Each example runs on CPU as documented, under the launcher on two ranks.

Seed 000 also runs as plain `python`. DEEPSEEK_ZERO_FULL=1 adds plain runs of the other seeds and
both ResNet-101 runs. The examples fail unless their loss falls by the stated margin, so a
successful exit is the check. The settings are small; only the seeds' model sizes are those of the
articles. pretrain_text.py has a separate test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import deepseek_zero
from tests.pairwise import is_full

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PACKAGE = Path(deepseek_zero.__path__[0]).parent
LAUNCHER = ("-m", "deepseek_zero.cli", "run", "--nproc", "2")
ALONE = ()


@dataclass(frozen=True)
class Run:
    """One example with the settings of CI."""

    script: str
    starter: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    says: str = ""

    def __str__(self) -> str:
        return f"{self.script}-{'two ranks' if self.starter else 'alone'}"


SEED_000 = {"SEED_SAMPLES": "2"}
SEED_001 = {"SEED_SAMPLES": "256"}
SEED_002 = {"SEED_SAMPLES": "64", "SEED_BATCH": "16", "SEED_LR": "3e-3"}
RUNS = [
    Run("seed_001", LAUNCHER, environment=SEED_001, says="epoch 5"),
    Run("vit_digits", LAUNCHER, says="the loss fell by"),
    Run("hf_language_model", LAUNCHER, ("--steps", "40"), says="the model writes:"),
]
if is_full():  # CI runs only seed 000 as plain `python`
    RUNS += [
        Run("seed_002", LAUNCHER, environment=SEED_002, says="Finished Training"),
        Run("resnet101_digits", LAUNCHER, ("--epochs", "3"), says="the loss fell by"),
        Run("seed_001", ALONE, environment=SEED_001, says="epoch 5"),
        Run("seed_002", ALONE, environment=SEED_002, says="Finished Training"),
    ]


def run_example(run: Run, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in an empty folder, check its exit code and return its output."""
    environment = {**os.environ, **run.environment, "PYTHONPATH": str(PACKAGE)}
    # Spinning threads on busy cores are four times slower. A single process may use both CI cores.
    environment["OMP_NUM_THREADS"] = "1" if run.starter else "2"
    command = [
        sys.executable,
        "-W",
        "ignore",
        *run.starter,
        str(EXAMPLES / f"{run.script}.py"),
        *run.arguments,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.says in done.stdout
    return done


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_example_runs_and_its_loss_falls_by_its_margin(run: Run, tmp_path: Path) -> None:
    run_example(run, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor"
)  # torch's warning about the article's Transformer
@pytest.mark.parametrize("starter", [LAUNCHER, ALONE], ids=["two ranks", "alone"])
def test_seed_000_runs_and_leaves_full_weights_that_a_plain_model_loads(
    starter: tuple[str, ...], tmp_path: Path
) -> None:
    run_example(Run("seed_000", starter, environment=SEED_000, says="Epoch [3/3]"), tmp_path)
    saved = torch.load(tmp_path / "model.pth", weights_only=True)
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(10000, 512),
            "transformer": torch.nn.Transformer(512, 8, 6, 6),
            "fc": torch.nn.Linear(512, 10000),
        }
    )
    model.load_state_dict(saved)
    assert all(
        type(tensor) is torch.Tensor and bool(tensor.isfinite().all()) for tensor in saved.values()
    )
    assert (tmp_path / "model.pth").stat().st_size < 1.01 * sum(
        tensor.nbytes for tensor in saved.values()
    )
