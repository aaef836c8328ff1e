"""Loading safetensors weights directly into shards gives the values of the file.

A rank reads only what it stores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.sharding.sharded_parameter import owner_of
from tests.plain import here
from tests.tower import BF16, Tower, config, differences, moments, start, tower, train, whole
from tests.training import offload

TIED = "again.weight"


def write(folder: Path, shards: int = 1, seed: int = 9, **change: Tensor) -> dict[str, Tensor]:
    """Write the weights of another seed into `shards` files on rank 0; return the state dict."""
    state = dict(tower(seed).state_dict())
    state["norm.running_mean"] = torch.arange(13.0)
    saved = {name: value.clone() for name, value in state.items() if name != TIED} | change
    if here() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        names = list(saved)
        files = {
            f"model-{k + 1:05d}-of-{shards:05d}.safetensors": names[k::shards]
            for k in range(shards)
        }
        if shards == 1:
            files = {"model.safetensors": names}
        for file, of_file in files.items():
            save_file(
                {name: saved[name] for name in of_file}, folder / file, metadata={"format": "pt"}
            )
        if shards > 1:
            where = {name: file for file, of_file in files.items() for name in of_file}
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {}, "weight_map": where})
            )
    dist.barrier()
    return state


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("stage", "top"), [(0, {}), (1, BF16), (3, {}), (3, BF16)], ids=["0", "1b", "3", "3b"]
)
@pytest.mark.ranks("world")
def test_weights_masters_and_buffers_are_the_files(
    tmp_path: Path, world: int, stage: int, top: dict[str, Any]
) -> None:
    engine = start(stage, **top)
    train(engine, 0, 1)
    expected = write(tmp_path / "three", shards=3)
    engine.load_weights(tmp_path / "three")
    found = whole(engine)
    frozen = [name for name in expected if name.startswith("frozen") and top]
    assert not differences(drop(found, frozen), drop(expected, frozen))
    for name in frozen:  # no main weight, so it is rounded to the compute dtype
        assert torch.equal(found[name], expected[name].bfloat16()), name
    reference = start(stage, seed=9, **top)
    reference.module.load_state_dict(expected)
    assert not differences(engine.module.state_dict(), reference.module.state_dict())
    train(engine, 1, 2)


def drop(state: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.ranks(2)
def test_each_rank_reads_only_what_it_holds(tmp_path: Path) -> None:
    from deepseek_zero.checkpoint.format import StateRange
    from deepseek_zero.checkpoint.hf_folder import SafetensorsFolder

    engine = start(3)
    write(tmp_path)
    ranges: list[StateRange] = []
    with pytest.MonkeyPatch.context() as patch:
        read = SafetensorsFolder.read
        patch.setattr(
            SafetensorsFolder,
            "read",
            lambda self, wanted: ranges.append(wanted) or read(self, wanted),
        )
        engine.load_weights(tmp_path)
    mine = sum(wanted.stop - wanted.start for wanted in ranges)
    held = torch.tensor([mine])
    dist.all_reduce(held)
    numel = sum(param.numel() for param in engine.module.parameters())
    assert int(held) == numel and mine <= numel


@pytest.mark.ranks(2)
def test_moments_and_counters_stay(tmp_path: Path) -> None:
    engine = start(3)
    train(engine, 0, 2)
    before = moments(engine)
    write(tmp_path)
    engine.load_weights(tmp_path / "model.safetensors")
    assert not differences(moments(engine), before) and engine.global_steps == 2


@pytest.mark.ranks(2)
def test_states_on_a_disk_take_weights(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload("nvme")}
    engine = start(3, zero_optimization=zero)
    train(engine, 0, 1)  # the pending update must not run after the load
    expected = write(tmp_path)
    engine.load_weights(tmp_path)
    assert not differences(whole(engine), expected)


@pytest.mark.ranks(2)
def test_differing_names_and_shapes_are_reported_before_anything_changes(tmp_path: Path) -> None:
    engine = start(3)
    before = engine.module.state_dict()
    write(tmp_path / "more", extra=torch.zeros(2))
    with pytest.raises(CheckpointError, match="lacks nothing and has extra too many"):
        engine.load_weights(tmp_path / "more")
    write(tmp_path / "other", **{"read.bias": torch.zeros(14)})
    with pytest.raises(
        CheckpointError, match=r"'read.bias' is \[14\] in the file and \[13\] in the model"
    ):
        engine.load_weights(tmp_path / "other")
    if here() == 0:
        save_file({"read.bias": torch.ones(13)}, tmp_path / "less.safetensors")
    dist.barrier()
    with pytest.raises(
        CheckpointError,
        match=r"lacks read.weight, blocks.0.0.weight.* and \d+ more and has nothing",
    ):
        engine.load_weights(tmp_path / "less.safetensors")
    assert not differences(engine.module.state_dict(), before)
    engine.load_weights(tmp_path / "less.safetensors", strict=False)
    assert torch.equal(engine.module.state_dict()["read.bias"], torch.ones(13))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    engine = start(3)
    folder = tmp_path / "model"
    if here() == 0:
        folder.mkdir()
        save_file({"read.bias": torch.ones(13)}, tmp_path / "secret.safetensors")
        index = {"metadata": {}, "weight_map": {"read.bias": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        engine.load_weights(folder, strict=False)


@pytest.mark.ranks(2)
def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    engine = start(3)
    if here() == 0:
        torch.save(tower().state_dict(), tmp_path / "pytorch_model.bin")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"holds no model.safetensors"):
        engine.load_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read"):
        engine.load_weights(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("how", ["meta", "init"])
@pytest.mark.ranks("world")
def test_a_model_that_is_not_wrapped_loads_its_slices(tmp_path: Path, world: int, how: str) -> None:
    expected = write(tmp_path, shards=2)
    if how == "meta":
        with torch.device("meta"):
            model = Tower()
        model.norm, model.scratch = nn.BatchNorm1d(13), torch.zeros(3)
    else:
        with deepseek_zero.zero.Init():
            model = Tower()
    deepseek_zero.zero.load_weights(model, tmp_path)
    cut = [param for param in model.parameters() if owner_of(param) is not None]
    assert len(cut) >= 12 and all(
        owner_of(each).slice.numel() == -(-each.numel() // world) for each in cut
    )
    engine = deepseek_zero.initialize(model=model, config=config(3))[0]
    assert not differences(whole(engine), expected)
    train(engine, 0, 1)
