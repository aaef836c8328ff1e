"""Checkpoints written in DeepSpeed's layout equal those that DeepSpeed wrote, value by value."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepseek_zero as dz
from deepseek_zero.base.errors import CheckpointError, UsageError
from deepseek_zero.compat.deepspeed.checkpoint.reader import PickledObject, open_file
from deepseek_zero.compat.deepspeed.checkpoint.writer import convert_to_deepspeed
from deepseek_zero.compat.deepspeed.ops import DeepSpeedCPUAdam
from tests.data.deepspeed.make import CASES

DATA = Path(__file__).parents[4] / "data" / "deepspeed"
# Keys that may differ: the configuration, and hyper-parameters that select an implementation.
ASIDE = (
    "ds_config",
    "checkpoint_parallel_dimensions",
    "clip_grad",
    "bias_correction",
    "ds_version",
)
# Elements after the end of a parameter are padding in the flat tensors and fragments of stage 3.
# Only rank 0 lists tied parameters.
PADDED = ("fp32_flat_groups", "frozen_param_fragments", "shared_params")


def differences(left: Any, right: Any, where: str = "") -> Iterator[str]:
    if isinstance(left, Tensor):
        if not (
            left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        ):
            yield where
    elif isinstance(left, dict):
        yield from (f"{where}.{key}" for key in left.keys() ^ right.keys() if key not in ASIDE)
        for key in left.keys() & right.keys():
            if key not in ASIDE:
                yield from differences(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            yield where
        for number, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(left, PickledObject):
        yield from (
            differences(vars(left), vars(right), where) if type(left) is type(right) else (where,)
        )
    elif left != right:
        yield where


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("stage0_bf16", "stage0_fp16", "stage1_bf16")]
)
def test_a_genuine_checkpoint_is_written_back_unchanged(tmp_path: Path, case: str) -> None:
    genuine = DATA / case / "global_step2"
    convert_to_deepspeed(DATA / case, tmp_path / "again")
    assert sorted(path.name for path in genuine.iterdir()) == sorted(
        path.name for path in (tmp_path / "again").iterdir()
    )
    for path in genuine.iterdir():
        found = list(differences(open_file(path), open_file(tmp_path / "again" / path.name)))
        assert not [
            each
            for each in found
            if not ("rank_1" in path.name and any(word in each for word in PADDED))
        ]
        assert stat.S_IMODE((tmp_path / "again" / path.name).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("case", "stage", "as_case"),
    [("stage3", 2, "stage2"), ("stage2", 3, "stage3"), ("stage1", 2, "stage2")],
)
def test_another_stage_is_written_as_deepspeed_would_have(
    tmp_path: Path, case: str, stage: int, as_case: str
) -> None:
    convert_to_deepspeed(DATA / case, tmp_path / "out", stage=stage)
    genuine = DATA / as_case / "global_step2"
    for path in genuine.glob("*optim_states.pt"):
        ours, told = open_file(tmp_path / "out" / path.name), open_file(path)
        assert ours.keys() == told.keys()
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        for one, other in zip(
            ours["optimizer_state_dict"][key], told["optimizer_state_dict"][key], strict=True
        ):
            assert one.shape == other.shape
            assert torch.allclose(one[:-8], other[:-8], atol=1e-5) or "rank_1" in path.name


@pytest.mark.parametrize("is_own", [False, True])
def test_an_adam_without_bias_correction_stays_one(tmp_path: Path, is_own: bool) -> None:
    model = nn.Linear(3, 2)
    params = {"lr": 0.1, "bias_correction": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
    }
    optimizer: Any = None
    if is_own:
        optimizer = DeepSpeedCPUAdam(model.parameters(), **params)
    else:
        config["optimizer"] = {"type": "Adam", "params": params}
    engine = dz.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    convert_to_deepspeed(tmp_path / "saved", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*optim_states.pt")
    (group,) = open_file(path)["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    assert group["bias_correction"] is False


def test_files_that_name_no_parameter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not say which parameter is in which group"):
        convert_to_deepspeed(DATA / "stage0_bf16", tmp_path / "out")


@pytest.mark.parametrize("stage", [-1, 4])
def test_an_unknown_stage_is_refused(tmp_path: Path, stage: int) -> None:
    with pytest.raises(UsageError, match=f"stage {stage}"):
        convert_to_deepspeed(DATA / "stage2", tmp_path / "out", stage=stage)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [-1, 0, 2.0])
def test_a_number_of_ranks_that_cannot_be_is_refused(tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(UsageError, match="ranks"):
        convert_to_deepspeed(DATA / "stage2", tmp_path / "out", ranks=ranks)
    assert not (tmp_path / "out").exists()


def test_files_of_an_earlier_conversion_are_removed(tmp_path: Path) -> None:
    convert_to_deepspeed(DATA / "stage2", tmp_path / "out", ranks=3)
    (tmp_path / "out" / "notes.txt").write_text("kept")
    convert_to_deepspeed(DATA / "stage2", tmp_path / "out", stage=3, ranks=1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "notes.txt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]
