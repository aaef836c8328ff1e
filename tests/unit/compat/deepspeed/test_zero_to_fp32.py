"""DeepSpeed's functions and ours consolidate a checkpoint folder into full fp32 weights."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.convert import convert_to_pth, convert_to_safetensors
from deepseek_zero.compat.deepspeed.zero_to_fp32 import to_torch_tensor
from deepseek_zero.utils import zero_to_fp32 as words
from tests.data.deepspeed.make import CASES, Small, config, small

DATA = Path(__file__).parents[3] / "data" / "deepspeed"
DEEPSPEED = [case for case in CASES if CASES[case]["stage"]]


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    """Return a checkpoint of this library from one rank and its expected fp32 state dict."""
    engine = deepseek_zero.initialize(
        model=small(8), config=config(3, "bf16") | {"optimizer": {"type": "AdamW"}}
    )[0]
    for step in range(2):
        engine.backward(engine(torch.full((4, 5), float(step))).float().square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path / "ours", client_state={"epoch": 4})
    told = dict(engine.module.state_dict())
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        master = deepseek_zero.utils.safe_get_full_fp32_param(param)
        told[name] = told[name].float() if master is None else master
    engine.destroy()
    return tmp_path / "ours", told


def same(found: dict[str, Any], told: dict[str, Tensor]) -> bool:
    return found.keys() == told.keys() and all(
        torch.equal(found[name], told[name]) for name in told
    )


def fp32_of(case: str) -> dict[str, Tensor]:
    """Return the main weights, frozen weights and running statistics of a case."""
    told = torch.load(DATA / case / "expected.pt", weights_only=True)
    return {name: value for name, value in told.items() if " " not in name and name != "losses"}


@pytest.mark.parametrize("case", DEEPSPEED)
def test_deepspeeds_folder_provides_its_main_weights(case: str) -> None:
    state = words.get_fp32_state_dict_from_zero_checkpoint(DATA / case)
    told = fp32_of(case)
    assert same({name: state[name] for name in told}, told)
    assert state["again.weight"] is state["write.weight"]
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert state.keys() == Small().state_dict().keys()
    few = words.get_fp32_state_dict_from_zero_checkpoint(
        DATA / case, exclude_frozen_parameters=True
    )
    assert state.keys() - few.keys() == {"frozen.weight", "frozen.bias"}


def test_our_folder_provides_its_main_weights(ours: Any) -> None:
    folder, told = ours
    assert same(words.get_fp32_state_dict_from_zero_checkpoint(folder), told)
    lazy = words.get_fp32_state_dict_from_zero_checkpoint(str(folder), lazy_mode=True)
    assert lazy["read.weight"].shape == (7, 5) and lazy["read.weight"].dtype == torch.float32
    assert same({name: each.contiguous() for name, each in lazy.items()}, told)
    assert same(to_torch_tensor(lazy), told)
    halves = to_torch_tensor(lazy, return_empty_tensor=True, dtype=torch.float16)
    assert halves["read.weight"].shape == (7, 5) and halves["read.weight"].dtype == torch.float16
    model = words.load_state_dict_from_zero_checkpoint(Small(), folder, tag="global_step2")
    assert same(model.state_dict(), told)


def test_files_by_deepspeeds_function(ours: Any, tmp_path: Path) -> None:
    folder, told = ours
    words.convert_zero_checkpoint_to_fp32_state_dict(
        folder, tmp_path / "torch", max_shard_size="400B"
    )
    where = json.loads((tmp_path / "torch" / "pytorch_model.bin.index.json").read_text())[
        "weight_map"
    ]
    assert len(set(where.values())) > 2
    found: dict[str, Tensor] = {}
    for file in set(where.values()):
        found |= torch.load(tmp_path / "torch" / file, weights_only=True)
    assert same(found, told) and where.keys() == told.keys()
    words.main([str(folder), str(tmp_path / "safe"), "--safe_serialization"])
    once = {name: value for name, value in told.items() if name != "again.weight"}
    assert same(load_file(tmp_path / "safe" / "model.safetensors"), once)


def test_our_own_layout_is_converted_with_little_memory(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = ours
    monkeypatch.setattr("deepseek_zero.checkpoint.read.READ_NUMEL", 5)
    assert len(convert_to_safetensors(folder, tmp_path / "many", "bf16", max_shard_bytes=200)) > 2
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "many").glob("*.safetensors"):
        found |= load_file(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert found["read.weight"].dtype == torch.bfloat16
    convert_to_pth(folder / "global_step2", tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth", weights_only=True)
    assert torch.equal(whole["again.weight"], told["write.weight"]) and whole.keys() == told.keys()
    convert_to_safetensors(DATA / "stage3", tmp_path / "genuine")
    assert torch.equal(
        load_file(tmp_path / "genuine" / "model.safetensors")["read.bias"],
        fp32_of("stage3")["read.bias"],
    )


def test_a_folder_that_is_no_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file `latest`"):
        convert_to_safetensors(tmp_path, tmp_path / "out")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere' cannot be a tag"):
        convert_to_safetensors(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="'12 parsecs' is no size"):
        words.convert_zero_checkpoint_to_fp32_state_dict(
            DATA / "stage3", tmp_path / "out", "12 parsecs"
        )
    assert not (tmp_path / "out").exists()


def test_the_files_that_lightning_looks_for(tmp_path: Path) -> None:
    folder = DATA / "stage2" / "global_step2"
    assert words.get_model_state_file(folder, 2) == str(folder / "mp_rank_00_model_states.pt")
    assert [Path(each).name[:14] for each in words.get_optim_files(folder)] == [
        "zero_pp_rank_0",
        "zero_pp_rank_1",
    ]
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="zero_pp_rank_0_mp_rank_00_model_states"):
        words.get_model_state_file(tmp_path / "copy", 3)


def test_the_files_that_lightning_looks_for_of_a_folder_of_ours(ours: Any) -> None:
    folder = next(path.parent for path in ours[0].rglob("manifest.json"))
    optimizer = torch.load(words.get_optim_files(folder)[0], weights_only=True)
    assert optimizer["optimizer_state_dict"]["zero_stage"] == 3
    model = torch.load(words.get_model_state_file(folder, 3), weights_only=True)
    assert model == {"epoch": 4, "module": {}}
    assert {path.suffix for path in folder.iterdir()} == {
        ".json",
        ".safetensors",
    }  # no other file remains
