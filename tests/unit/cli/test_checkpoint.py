"""`deepseek-zero checkpoint ...`: what it says, as a table and as data, and the codes it ends with."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import deepseek_zero
import deepseek_zero.cli as cli
from deepseek_zero.base.errors import CheckpointError, UsageError

SHARD = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a small bf16 run."""
    directory = tmp_path_factory.mktemp("run")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = deepseek_zero.initialize(model=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), config=config)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 6)).square().mean())
        engine.step()
        engine.save_checkpoint(directory)
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "run")


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["checkpoint", *map(str, words)], env={"COLUMNS": "200"})


def data_of(*words: object) -> Any:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def test_a_directory_is_listed_with_what_is_wrong_in_it(directory: Path) -> None:
    cut(directory / "global_step2" / SHARD)
    (directory / ".global_step4.pruned").mkdir()
    found = data_of("inspect", directory)
    listed = [(each["tag"], each["step"], each["complete"]) for each in found["checkpoints"]]
    assert listed == [("global_step3", 3, True), ("global_step2", 2, False), ("global_step1", 1, True)]
    assert (found["latest"], len(found["leftovers"])) == ("global_step3", 1)
    assert found["checkpoints"][1]["faults"][0]["file"] == SHARD
    shown = call("inspect", directory).output
    assert all(word in shown for word in ("global_step3 (latest)", "complete", f"damaged: {SHARD} is", ".pruned"))


def test_one_checkpoint_is_shown_with_its_tensors_and_its_plan(directory: Path) -> None:
    for words in ([directory / "global_step3"], [directory, "--tag", "global_step3"]):
        found = data_of("inspect", *words)
        assert (found["step"], found["ranks"], found["stage"], found["optimizer"]) == (3, 1, 3, "AdamW")
        assert found["num_parameters"] == 6 * 5 + 5 + 5 + 5
        weight = found["parameters"]["0.weight"]
        assert (weight["shape"], sorted(weight["states"])) == ([5, 6], ["exp_avg", "exp_avg_sq"])
        assert weight["num_bytes"] == 30 * (4 + 4 + 4)
        assert found["plan"]
    shown = call("inspect", directory / "global_step3").output
    assert all(word in shown for word in ("0.weight", "5 x 6", "exp_avg, exp_avg_sq", "1.running_mean", "buffer"))


def test_verify_ends_with_0_where_all_is_good_and_1_where_a_file_is_damaged(directory: Path) -> None:
    assert call("verify", directory).exit_code == 0
    cut(directory / "global_step2" / SHARD)
    result = call("verify", directory)
    assert result.exit_code == 1
    assert "global_step2: damaged, 1 fault(s)" in result.output and f"{SHARD} is" in result.output
    assert "global_step3: good" in result.output
    assert call("verify", directory, "--tag", "global_step3").exit_code == 0
    assert call("verify", directory / "global_step2").exit_code == 1
    result = call("verify", directory, "--json")
    verdicts = {each["tag"]: each["good"] for each in json.loads(result.stdout)}
    assert (result.exit_code, verdicts) == (1, {"global_step3": True, "global_step2": False, "global_step1": True})


def test_prune_says_what_goes_and_a_dry_run_removes_nothing(directory: Path) -> None:
    (directory / ".global_step9.pruned").mkdir()
    wish = ("prune", directory, "--keep-last", 1)
    would = data_of(*wish, "--dry-run")
    assert (would["removed"], would["kept"]) == (["global_step2", "global_step1"], ["global_step3"])
    assert would["cleaned"] == [".global_step9.pruned"]
    assert len(list(directory.iterdir())) == 5
    assert data_of(*wish) == {**would, "dry_run": False}
    assert sorted(path.name for path in directory.iterdir()) == ["global_step3", "latest"]
    assert "kept global_step3" in call(*wish).output


def test_a_directory_that_refuses_is_a_named_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    result = call("prune", directory, "--keep-last", 1)
    assert isinstance(result.exception, CheckpointError)
    assert "Permission denied" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "nowhere"], "nowhere holds no checkpoint"),
        (["verify", "RUN", "--tag", "step9"], r"holds no checkpoint 'step9'.(.|\n)*Choose one of: global_step3"),
        (["prune", "RUN", "--keep-every", "5"], "--keep-every needs --keep-last"),
        (["convert", "RUN", "OUT", "--to", "deepspeed", "--dtype", "bf16"], "--dtype does not go with"),
        (["convert", "RUN", "RUN"], "is there already"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_the_house(
    directory: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    names = {"RUN": directory, "OUT": tmp_path / "out"}
    result = call(*(names.get(word, word) for word in words))
    assert isinstance(result.exception, UsageError)
    with pytest.raises(UsageError, match=said):
        raise result.exception


def test_such_an_error_ends_the_command_with_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["deepseek-zero", "checkpoint", "verify", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ([], ("safetensors", "global_step3", None)),
        (["--to", "pth", "--dtype", "bf16", "--tag", "global_step1"], ("torch", "global_step1", torch.bfloat16)),
        (["--to", "deepspeed"], ("deepspeed", "global_step3")),
    ],
)
def test_convert_calls_the_converter_with_the_right_folder(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], called: tuple[Any, ...]
) -> None:
    calls = []

    def stand_in(form: str) -> Any:
        def write(folder: Path, out: Path, *dtype: Any) -> None:
            calls.append((form, folder.name, *dtype))
            out.mkdir()
            (out / "written").write_text("12345")

        return write

    export = ModuleType("export")
    for form in ("safetensors", "torch", "deepspeed"):
        setattr(export, f"convert_to_{form}", stand_in(form))
    monkeypatch.setitem(sys.modules, "deepseek_zero.checkpoint.convert", export)
    found = data_of("convert", directory, tmp_path / "out", *words)
    assert calls == [called]
    assert (found["out"], found["num_bytes"]) == (str(tmp_path / "out"), 5)
