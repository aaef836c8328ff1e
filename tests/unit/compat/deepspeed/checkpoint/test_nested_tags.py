"""Under the name `deepspeed`, tags may contain "/", but never leave the directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


@pytest.fixture(autouse=True)
def alone(as_deepspeed: None) -> Iterator[None]:
    """Enable the drop-in, and destroy the process group that `initialize` creates."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def built(stage: int, **more: Any) -> Any:
    import deepspeed

    given = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    model = nn.Linear(3, 3)
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=given | more
    )[0]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_tag_may_be_a_path_below_the_directory(stage: int, wait: bool, tmp_path: Path) -> None:
    engine = built(stage)
    for tag in ("epoch/1", "a/b/c", "epoch/1", "epoch/2"):
        with torch.no_grad():
            engine.module.weight.add_(1.0)
        engine.save_checkpoint(tmp_path, tag, client_state={"tag": tag}, wait=wait)
        assert (tmp_path / "latest").read_text().strip() == tag
        assert engine.load_checkpoint(tmp_path) == (str(tmp_path / tag), {"tag": tag})
    engine.save_checkpoint(tmp_path, "epoch/3", save_latest=False)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(found["weight"], engine.module.weight)
    assert engine.load_checkpoint(tmp_path, tag="a/b/c")[1] == {"tag": "a/b/c"}
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "a/b/c")
    assert torch.equal(found["weight"], engine.module.weight)
    visible = {path.name for path in tmp_path.iterdir() if path.name[0] != "."}
    assert visible - {"zero_to_fp32.py"} == {"a", "epoch", "latest"}


@pytest.mark.parametrize("tag", ["../one", "a/../../one", "/one", "a//b", "a/", ".a/b", "a/.."])
def test_a_tag_stays_inside_the_directory(tag: str, tmp_path: Path) -> None:
    engine = built(0)
    folder = tmp_path / "inner"
    for use in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(CheckpointError, match="cannot be a tag"):
            use(folder, tag=tag)
    folder.mkdir(exist_ok=True)
    (folder / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        engine.load_checkpoint(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
