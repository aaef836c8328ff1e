"""Exports of full weights, read by other libraries, equal the engine's weights bit for bit."""

from __future__ import annotations

import json
import os
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.precision.policy import cast_master
from tests.models import seeded
from tests.needs import need
from tests.plain import here
from tests.tower import BF16, Tower, differences, start, tower, train, whole
from tests.training import Run, offload, start_engine

TIED = "again.weight"


def once(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != TIED}


def read(folder: Path) -> dict[str, Tensor]:
    """Read all tensors in a folder, through its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in sorted(set(where.values())):
        found |= load_file(folder / file)
    assert {name: where[name] for name in found} == where
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("stage", "top"), [(0, {}), (3, {}), (2, BF16), (3, BF16)], ids=["0", "3", "2b", "3b"]
)
@pytest.mark.ranks("world")
def test_an_exported_folder_holds_the_weights_as_they_compute(
    tmp_path: Path, world: int, stage: int, top: dict[str, Any]
) -> None:
    engine = start(stage, **top)
    train(engine, 0, 2)
    expected = once(engine.module.state_dict())
    dist.barrier()
    statistics = {name: value for name, value in expected.items() if "running" in name}
    assert engine.export(tmp_path / "one") == tmp_path / "one"
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    found = read(tmp_path / "one")
    if here() == 0:  # buffers are taken from rank 0
        assert not differences(found, expected)
    else:
        assert not differences(
            {n: v for n, v in found.items() if n not in statistics}, drop(expected, statistics)
        )
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    engine.export(tmp_path / "many", max_shard_bytes=400)
    assert not differences(read(tmp_path / "many"), found)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > world
    train(engine, 2, 3)


def drop(state: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_weights_in_another_dtype_are_cast_from_the_main_weights(
    tmp_path: Path, master: str
) -> None:
    engine = start(3, bf16={"enabled": True, "master": master})
    train(engine, 0, 2)
    masters, live = once(whole(engine)), once(engine.module.state_dict())
    engine.export(tmp_path / "fp32", "fp32")
    found = read(tmp_path / "fp32")
    trained = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    assert not differences({n: found[n] for n in trained}, {n: masters[n] for n in trained})
    assert (
        found["frozen.weight"].dtype == torch.float32
        and found["norm.num_batches_tracked"].dtype == torch.int64
    )
    for name in trained:
        rounded = torch.empty(found[name].numel(), dtype=torch.bfloat16)
        cast_master(found[name].reshape(-1), rounded)
        assert torch.equal(rounded.view(found[name].shape), live[name]), name
    engine.export(tmp_path / "fp16.pth", torch.float16)
    half = torch.load(tmp_path / "fp16.pth", weights_only=True)
    assert torch.equal(half["read.weight"], masters["read.weight"].half())


@pytest.mark.ranks(2)
def test_a_torch_file_is_a_state_dict_with_tied_weights_under_each_name(tmp_path: Path) -> None:
    engine = start(3)
    train(engine, 0, 1)
    engine.export(tmp_path / "new" / "model.pth")
    state = torch.load(tmp_path / "new" / "model.pth", weights_only=True)
    plain = Tower()
    plain.load_state_dict(state)  # strict loading
    assert state["again.weight"].data_ptr() == state["write.weight"].data_ptr()
    kept = drop(state, [name for name in state if "running" in name])
    expected = engine.module.state_dict()
    assert not differences(kept, drop(expected, [name for name in expected if "running" in name]))


@pytest.mark.ranks(2)
def test_exported_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    os.umask(0)
    engine = start(3)
    engine.export(tmp_path / "folder", max_shard_bytes=400)
    engine.export(tmp_path / "file.pth")
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    paths = [tmp_path / "file.pth", *(tmp_path / "folder").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}


@pytest.mark.ranks(2)
def test_a_folder_that_exists_keeps_what_is_not_weights(tmp_path: Path) -> None:
    engine = start(3)
    engine.export(tmp_path / "out", max_shard_bytes=400)
    if here() == 0:
        (tmp_path / "out" / "tokenizer.json").write_text("{}")
    engine.export(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.ranks(2)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_no_file_appears(
    tmp_path: Path,
) -> None:
    engine = start(3)
    with pytest.MonkeyPatch.context() as patch:
        if here() == 1:
            patch.setattr(
                "deepseek_zero.checkpoint.safetensors_file.SafetensorsWriter.write", _full_disk
            )
        with pytest.raises(CheckpointError, match=r"rank 1 failed .*No space left"):
            engine.export(tmp_path / "out", max_shard_bytes=400)
    assert not (tmp_path / "out").exists()
    engine.export(tmp_path / "out", max_shard_bytes=400)
    assert (tmp_path / "out").exists()
    train(engine, 0, 1)


def _full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2)
def test_no_rank_holds_the_model_while_it_is_exported(tmp_path: Path) -> None:
    from deepseek_zero.checkpoint import export

    engine = start_engine(Run(3), seeded())
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        gather = export.gather_full
        patch.setattr(
            export,
            "gather_full",
            lambda *given: sizes.append(given[1].layout.numel) or gather(*given),
        )
        engine.export(tmp_path / "out")
    assert (
        sum(sizes) == sum(param.numel() for param in engine.module.parameters())
        and max(sizes) < sum(sizes) / 2
    )


@pytest.mark.ranks(2)
def test_states_on_a_disk_are_exported(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload("nvme")}
    engine = start(3, **BF16, zero_optimization=zero)
    train(engine, 0, 2)  # the last update is delayed until a forward
    engine.export(tmp_path / "out", "fp32")
    plain = start(3, **BF16)
    train(plain, 0, 2)
    found, expected = read(tmp_path / "out"), once(whole(plain))
    names = [name for name, param in plain.module.named_parameters() if param.requires_grad]
    assert not differences({n: found[n] for n in names}, {n: expected[n] for n in names})
    train(engine, 2, 3)
    train(plain, 2, 3)
    assert not differences(whole(engine), whole(plain))


@pytest.mark.ranks(2)
def test_the_other_api_exports_too(tmp_path: Path) -> None:
    model = tower()
    zero = deepseek_zero.DeepSeekZeRO3(model)
    zero.export(tmp_path / "out")
    other = tower(seed=4)
    into = deepseek_zero.DeepSeekZeRO3(other)
    into.load_weights(tmp_path / "out")
    assert not differences(model.state_dict(), other.state_dict())


@pytest.mark.ranks(2)
def test_transformers_loads_exported_folders(tmp_path: Path) -> None:
    need(find_spec("transformers") is not None, "transformers")
    import transformers

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 37, "n_positions": 11}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine = deepseek_zero.initialize(model=model, config=config)[0]
    tokens = torch.arange(11).view(1, 11)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.export(tmp_path / "one")
    engine.export(tmp_path / "many", "fp32", max_shard_bytes=4000)
    expected = engine.module.state_dict()
    if here() == 0:
        one = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
        assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "bfloat16"
        assert not differences(one.state_dict(), expected)
        assert "lm_head.weight" not in load_file(tmp_path / "one" / "model.safetensors")
        many = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
        assert many.dtype == torch.float32
        assert torch.equal(many.lm_head.weight, many.transformer.wte.weight)
    dist.barrier()
    again = deepseek_zero.initialize(
        model=transformers.GPT2LMHeadModel(model.config), config=config
    )[0]
    again.load_weights(tmp_path / "many")
    assert not differences(again.module.state_dict(), expected)
