"""Checkpoints, exports and weights of an engine whose model is split over tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.convert import convert_to_safetensors
from deepseek_zero.checkpoint.verify import verify
from tests.ranks.test_tensor import config_of, engine_of, llama, train_at
from tests.tower import differences

MESHES: dict[str, dict[str, int]] = {
    "dp4": {},
    "dp2 tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "replicas": {"dp_replicate": 2, "tp": 2},
}


def build(mesh: str, stage: int) -> Any:
    config = config_of(stage, "bf16", stage3_gather_16bit_weights_on_model_save=True)
    return engine_of(llama(), MESHES[mesh] or None, config)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("saved", "stage", "loaded", "other"),
    [
        ("dp2 tp2", 3, "dp4", 1),
        ("dp4", 2, "tp4", 3),
        ("tp4", 0, "dp2 tp2", 2),
        ("replicas", 3, "dp2 tp2", 0),
        ("dp2 tp2", 1, "replicas", 3),
        ("tp4", 3, "dp4", 3),
    ],
)
def test_a_checkpoint_resumes_on_another_mesh(
    tmp_path: Path, saved: str, stage: int, loaded: str, other: int
) -> None:
    source, target = build(saved, stage), build(loaded, other)
    for step in range(2):
        train_at(source, step, 1)
    source.save_checkpoint(tmp_path, tag="first", client_state={"epoch": 3})
    train_at(target, 7, 1)
    _, client = target.load_checkpoint(tmp_path, tag="first")
    assert client == {"epoch": 3} and target.global_steps == 2
    target.save_checkpoint(tmp_path, tag="second")
    assert not verify(tmp_path / "first") and not verify(tmp_path / "second")
    folders = [tmp_path / f"{tag} {target.mesh.rank}" for tag in ("first", "second")]
    for tag, folder in zip(("first", "second"), folders, strict=True):
        convert_to_safetensors(tmp_path / tag, folder)  # full main weights
    assert bytes_of(folders[0]) == bytes_of(folders[1])
    assert not differences(dict(source.module.state_dict()), dict(target.module.state_dict()))
    source.load_checkpoint(tmp_path, tag="second")  # the moments were saved and loaded twice
    for engine in (source, again := build(saved, stage)):
        engine.load_checkpoint(tmp_path, tag="first" if engine is again else "second")
        train_at(engine, 2, 1)
    assert not differences(dict(source.module.state_dict()), dict(again.module.state_dict()))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["dp2 tp2", "tp4"])
def test_an_export_has_the_bytes_of_unsplit_ranks_and_is_loaded_into_parts(
    tmp_path: Path, mesh: str
) -> None:
    plain, engine = build("dp4", 3), build(mesh, 3)
    plain.save_checkpoint(tmp_path, tag="start")
    engine.load_checkpoint(tmp_path, tag="start")
    for each, name in ((plain, "plain"), (engine, "split")):
        each.export(tmp_path / name, "fp32", max_shard_bytes=20_000)
        each.save_16bit_model(tmp_path / f"{name} 16", "model.safetensors")
    for suffix in ("", " 16"):
        assert bytes_of(tmp_path / f"split{suffix}") == bytes_of(tmp_path / f"plain{suffix}")
    train_at(engine, 0, 1)
    engine.load_weights(tmp_path / "plain")
    assert not differences(dict(engine.module.state_dict()), dict(plain.module.state_dict()))


@pytest.mark.ranks(2)
def test_another_layout_is_refused_by_name_and_slices_are_converted(tmp_path: Path) -> None:
    from deepseek_zero.compat.deepspeed.checkpoint import convert_to_deepspeed

    engine = engine_of(
        llama(), {"tp": 2}, config_of(2, "bf16") | {"checkpoint": {"layout": "deepspeed"}}
    )
    train_at(engine, 0, 1)
    with pytest.raises(CheckpointError, match="the mesh is tp=2"):
        engine.save_checkpoint(tmp_path)
    slices = engine_of(llama(), {"tp": 2}, config_of(2, "bf16"))
    train_at(slices, 0, 1)
    slices.save_checkpoint(tmp_path, tag="slices")
    theirs = tmp_path / "theirs" / str(slices.mesh.rank)
    convert_to_deepspeed(tmp_path, theirs / "step", tag="slices", ranks=2)
    other = engine_of(llama(), {"tp": 2}, config_of(3, "bf16"))
    other.load_checkpoint(theirs.parent / "0", tag="step")
    assert not differences(dict(slices.module.state_dict()), dict(other.module.state_dict()))
    for each in (slices, other):
        train_at(each, 1, 1)
    assert not differences(dict(slices.module.state_dict()), dict(other.module.state_dict()))


@pytest.mark.ranks(2)
def test_dropout_continues_with_the_saved_random_state(tmp_path: Path) -> None:
    def run(engine: Any, first: int, last: int) -> list[Tensor]:
        return [loss for step in range(first, last) for loss in train_at(engine, step, 1)]

    def start() -> Any:
        torch.manual_seed(4)
        model = llama()
        model.config.attention_dropout = 0.2
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        return engine_of(model, {"tp": 2}, config_of(3, "fp32"))

    engine = start()
    run(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    expected = run(engine, 2, 4)
    resumed = start()
    resumed.load_checkpoint(tmp_path)
    assert all(map(torch.equal, expected, run(resumed, 2, 4)))
