"""After a signal on one rank, all ranks save after the same step and exit with one code.

The next run resumes bit by bit. All ranks agree on the newest valid checkpoint. test_launcher.py
tests the launcher's part.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from tests.pairwise import is_full
from tests.plain import here

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "preempted.py"


def build(accumulation: int = 1, **checkpoint: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 700), nn.Tanh(), nn.Linear(700, 5))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "checkpoint": checkpoint,
    }
    return deepseek_zero.initialize(model=model, config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    """Train this rank on micro-batches [first, last)."""
    for micro in range(first, last):
        dice = torch.Generator().manual_seed(100 * micro + here())
        engine.backward(engine(torch.randn(4, 7, generator=dice)).square().mean())
        engine.step()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_signal_on_one_rank_saves_on_all_after_the_same_step(
    tmp_path: Path, accumulation: int
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        undisturbed = build(accumulation)
        train(undisturbed, 0, 6 * accumulation)
        engine = build(accumulation, save_on_signal={"path": str(tmp_path), "signals": ["SIGTERM"]})
        engine.client_state = lambda: {"seen": engine.global_samples}
        train(engine, 0, 2 * accumulation)
        if here() == 1:
            signal.raise_signal(signal.SIGTERM)
        # Nothing happens before the end of the step
        train(engine, 2 * accumulation, 3 * accumulation - 1)
        with pytest.raises(SystemExit) as ended:
            train(engine, 3 * accumulation - 1, 4 * accumulation)
        assert (ended.value.code, engine.global_steps) == (85, 3)
        assert heard == [signal.SIGTERM] * here()
        resumed = build(accumulation)
        path, client = resumed.load_checkpoint(tmp_path, tag="newest")
        assert (path, client) == (
            str(tmp_path / "global_step3"),
            {"seen": 3 * accumulation * 4 * 2},
        )
        train(resumed, 3 * accumulation, 6 * accumulation)
        assert_same(undisturbed.module_state_dict(), resumed.module_state_dict())
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.ranks(2)
def test_a_failed_save_on_a_signal_is_an_error(tmp_path: Path) -> None:
    try:
        (tmp_path / "file").touch()
        engine = build(save_on_signal={"path": str(tmp_path / "file"), "signals": ["SIGTERM"]})
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(CheckpointError):
            train(engine, 0, 1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.ranks(2)
def test_all_ranks_load_the_newest_checkpoint_that_is_valid_on_all(tmp_path: Path) -> None:
    engine = build()
    for step in range(3):
        train(engine, step, step + 1)
        engine.save_checkpoint(tmp_path)
    if here() == 0:
        shard = tmp_path / "global_step3" / "rank_00001.safetensors"
        os.truncate(shard, shard.stat().st_size - 1)
        (tmp_path / "global_step2" / "rank_00000.safetensors").unlink()
    engine.runtime.comm.barrier("damage")
    path, _ = engine.load_checkpoint(tmp_path, tag="newest")
    assert (path, engine.global_steps) == (str(tmp_path / "global_step1"), 1)
    engine.runtime.comm.barrier("loaded")
    if here() == 0:
        os.truncate(tmp_path / "global_step1" / "rank_00001.safetensors", 3)
    engine.runtime.comm.barrier("damage")
    before = engine.module_state_dict()
    with pytest.raises(
        CheckpointError, match=r"none of the 3 checkpoint\(s\).*rank_00001.safetensors ends inside"
    ):
        engine.load_checkpoint(tmp_path, tag="newest")
    assert_same(before, engine.module_state_dict())


@pytest.mark.ranks(2)
def test_different_save_settings_on_ranks_are_reported_immediately(tmp_path: Path) -> None:
    try:
        with pytest.raises(Exception, match=r"checkpoint.save_on_signal.path: rank 0 has"):
            build(save_on_signal={"path": str(tmp_path / str(here())), "signals": ["SIGTERM"]})
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.skipif(
    not is_full(), reason="a whole training, three times: DEEPSEEK_ZERO_FULL=1 runs it"
)
def test_the_example_with_a_lost_rank_and_preemption_equals_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    launcher = [
        sys.executable,
        "-m",
        "deepseek_zero.cli",
        "run",
        "--nproc",
        "2",
        "--max-restarts",
        "1",
    ]
    command = [
        *launcher,
        str(EXAMPLE),
        "--die-at",
        "4",
        "--preempt-at",
        "8",
        "--steps",
        "10",
        "--out",
        str(tmp_path),
    ]
    source = str(Path(deepseek_zero.__path__[0]).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    runs = [
        subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        for _ in range(2)
    ]
    said = [run.stdout + run.stderr for run in runs]
    assert [run.returncode for run in runs] == [85, 0], said
    assert runs[0].stdout.splitlines() == ["begins behind step 0", "begins behind step 3"]
    assert "restarting all ranks" in runs[0].stderr
    assert f"SIGTERM: saved {tmp_path / 'global_step9'}" in runs[0].stderr
    assert "all ranks saved and ended (exit code 85)" in runs[0].stderr
    assert runs[1].stdout.splitlines() == [
        "begins behind step 9",
        "the losses of 10 steps are those of a run without interruption, bit for bit",
    ]
