"""DeepSpeed's universal checkpoints are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero as dz
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.compat.deepspeed.checkpoint import universal


def make(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return dz.initialize(model=model, config={"train_batch_size": 1, **config}, **more)[0]


def train(path: Path) -> Any:
    engine = make(
        {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    )
    engine(torch.ones(1, 4)).sum().backward()
    engine.step()
    engine.save_checkpoint(path, tag="one")
    return engine


def test_a_universal_checkpoint_loads_under_its_name(tmp_path: Path) -> None:
    engine = train(tmp_path)
    given = SimpleNamespace(
        input_folder=str(tmp_path / "one"), output_folder=str(tmp_path / "one_universal")
    )
    universal.main(given)
    with pytest.raises(CheckpointError, match="exists already"):
        universal.main(given)
    (tmp_path / "latest").unlink()
    other = make(
        {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW"},
            "checkpoint": {"load_universal": True},
        }
    )
    path, _ = other.load_checkpoint(tmp_path)
    assert path is not None and path.endswith("one_universal")
    for mine, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError):
        universal.main(
            SimpleNamespace(input_folder=str(tmp_path), output_folder=str(tmp_path / "none"))
        )


def test_a_directory_means_the_checkpoint_that_latest_names(tmp_path: Path) -> None:
    train(tmp_path / "run")
    (tmp_path / "run" / "one" / "plots").mkdir()
    universal.main(
        SimpleNamespace(input_folder=str(tmp_path / "run"), output_folder=str(tmp_path / "copy"))
    )
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        path.name for path in (tmp_path / "run" / "one").iterdir() if path.is_file()
    }
