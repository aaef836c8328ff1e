"""DeepSpeed's pipeline checkpoints are read by parameter name, for all stages and ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero
from deepseek_zero.base.errors import CheckpointError
from deepseek_zero.checkpoint.convert import convert_to_pth
from deepseek_zero.checkpoint.format import MOMENT, WEIGHT, StateRange
from deepseek_zero.checkpoint.verify import verify
from deepseek_zero.compat.deepspeed.checkpoint.reader import read_deepspeed

HERE = Path(__file__).parents[4] / "data" / "deepspeed"
CASES = ["pipe_stage0", "pipe_stage1", "pipe_stage1_bf16"]


class Layers(nn.Module):
    """A module with the parameter names of the saved model."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"square": nn.Linear(7, 7)})
        self.add_module("0", nn.Linear(5, 7))
        self.add_module("3", nn.LayerNorm(7))
        self.add_module("5", nn.Linear(7, 3, bias=False))

    def forward(self, x: Tensor) -> Any:
        tied, (first, norm, last) = (
            self.tied_modules["square"],
            (self.get_submodule(name) for name in "035"),
        )
        return last(tied(norm(torch.tanh(tied(first(x))))))


def expected(case: str) -> dict[str, Tensor]:
    return torch.load(HERE / case / "expected.pt")


def build(stage: int, case: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "bf16": {"enabled": "bf16" in case},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepseek_zero.initialize(model=Layers(), config=config)[0]


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_have_their_names_and_bits(case: str) -> None:
    folder, wanted = HERE / case / "global_step2", expected(case)
    assert not verify(folder)
    names = frozenset(name for name in wanted if "exp_avg" not in name)
    found = read_deepspeed(folder, names)
    assert set(found.manifest.parameters) == names
    for name, value in wanted.items():
        weight, _, key = name.partition(" ")
        kind = MOMENT if key else WEIGHT
        parts = [each for _, each in found.read(StateRange(kind, weight, key, 0, value.numel()))]
        assert torch.equal(torch.cat(parts).view(value.shape), value), name


@pytest.mark.parametrize("case", CASES[1:])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_resumes_from_it(case: str, stage: int) -> None:
    from deepseek_zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine, wanted = build(stage, case), expected(case)
    _, client = engine.load_checkpoint(HERE / case)
    assert client == {"epoch": 7} and (engine.global_steps, engine.global_samples) == (2, 32)
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), wanted[name]), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                safe_get_full_optimizer_state(param, key), wanted[f"{name} {key}"]
            ), name


def test_numbered_moments_are_refused_and_the_weights_taken() -> None:
    engine = build(3, "pipe_stage0")
    with pytest.raises(CheckpointError, match="numbered within a stage"):
        engine.load_checkpoint(HERE / "pipe_stage0")
    engine.load_checkpoint(HERE / "pipe_stage0", load_optimizer_states=False)
    state = engine.module.state_dict()
    assert not [
        name
        for name, value in expected("pipe_stage0").items()
        if not torch.equal(state[name], value)
    ]


def test_a_folder_is_converted_without_a_model(tmp_path: Path) -> None:
    convert_to_pth(HERE / "pipe_stage1", tmp_path / "out.pth", tag="global_step2")
    state, wanted = torch.load(tmp_path / "out.pth"), expected("pipe_stage1")
    assert (
        not [name for name, value in state.items() if not torch.equal(value, wanted[name])]
        and len(state) == 7
    )


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("zero_pp_rank_1_mp_rank_01_optim_states.pt", r"lacks the optimizer files of ranks \[1\]"),
        ("mp_rank_01_model_states.pt", "is missing"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, file: str, said: str) -> None:
    shutil.copytree(HERE / "pipe_stage1" / "global_step2", tmp_path / "tag")
    (tmp_path / "tag" / file).unlink()
    with pytest.raises(CheckpointError, match=said):
        read_deepspeed(tmp_path / "tag")


def test_tensor_parallel_files_are_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(HERE / "pipe_stage1" / "global_step2", tmp_path / "tag")
    for part in range(2):
        shutil.copy(
            tmp_path / "tag/layer_00-model_states.pt",
            tmp_path / f"tag/layer_00-model_{part:02d}-model_states.pt",
        )
    (tmp_path / "tag/layer_00-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="tensor parallelism of 2"):
        read_deepspeed(tmp_path / "tag")
