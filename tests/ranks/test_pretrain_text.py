"""A short run of `make train`: the pre-training job under the launcher with two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.gpt import GPT, SIZES
from tests.step_records import read_records

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_text.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc",
        "2",
        str(EXAMPLE),
        "--size",
        "tiny",
    ]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_two_ranks_train_at_stage_three_and_rank_zero_writes_the_whole_model(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    done = run("--steps", "20", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    assert done.stdout.count("step 20/20") == 1
    records = read_records(tmp_path)
    assert [record.step for record in records] == list(range(1, 21))
    assert all(record.comm_bytes > 0 for record in records)
    model = GPT(SIZES["tiny"])
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
