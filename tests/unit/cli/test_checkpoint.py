"""`deepseek-zero checkpoint ...`: output as a table and as JSON, and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

import deepseek_zero
import deepseek_zero.cli as cli
from deepseek_zero.base.errors import CheckpointError, UsageError
from deepseek_zero.checkpoint.format import MANIFEST, Manifest
from deepseek_zero.checkpoint.torch_file import torch_records
from tests.crash import flip

SHARD = "rank_00000.safetensors"


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": None,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save three checkpoints of a small bf16 run."""
    directory = tmp_path_factory.mktemp("run")
    engine, *_ = deepseek_zero.initialize(model=model(), config=CONFIG)
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
    assert listed == [
        ("global_step3", 3, True),
        ("global_step2", 2, False),
        ("global_step1", 1, True),
    ]
    assert (found["latest"], len(found["leftovers"])) == ("global_step3", 1)
    assert found["checkpoints"][1]["faults"][0]["file"] == SHARD
    shown = call("inspect", directory).output
    assert all(
        word in shown
        for word in ("global_step3 (latest)", "complete", f"damaged: {SHARD} is", ".pruned")
    )


def test_one_checkpoint_is_shown_with_its_tensors_and_its_plan(directory: Path) -> None:
    for words in ([directory / "global_step3"], [directory, "--tag", "global_step3"]):
        found = data_of("inspect", *words)
        assert (found["step"], found["ranks"], found["stage"], found["optimizer"]) == (
            3,
            1,
            3,
            "AdamW",
        )
        assert found["num_parameters"] == 6 * 5 + 5 + 5 + 5
        weight = found["parameters"]["0.weight"]
        assert (weight["shape"], sorted(weight["states"])) == ([5, 6], ["exp_avg", "exp_avg_sq"])
        assert weight["num_bytes"] == 30 * (4 + 4 + 4)
        assert found["plan"]
    shown = call("inspect", directory / "global_step3").output
    assert all(
        word in shown
        for word in ("0.weight", "5 x 6", "exp_avg, exp_avg_sq", "1.running_mean", "buffer")
    )


def rewrite(folder: Path, **extra: Any) -> None:
    """Rewrite the manifest of a checkpoint with other values in `extra`; None removes a value."""
    manifest = Manifest.read(folder / MANIFEST)
    manifest.extra = {
        name: value for name, value in (manifest.extra | extra).items() if value is not None
    }
    (folder / MANIFEST).write_text(manifest.text())


def test_the_mesh_of_a_checkpoint_is_shown_if_the_file_has_it(
    directory: Path,
) -> None:
    folder = directory / "global_step3"
    assert data_of("inspect", folder)["mesh"] == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "sp": 1,
        "tp": 1,
    }
    assert "one rank" in call("inspect", folder).output
    rewrite(folder, mesh={"pp": 1, "dp_replicate": 2, "dp_shard": 4, "sp": 1, "tp": 1})
    assert "dp_replicate=2 x dp_shard=4" in call("inspect", folder).output
    rewrite(folder, mesh=None)
    assert data_of("inspect", directory)["checkpoints"][0]["mesh"] is None
    shown = call("inspect", folder)
    assert shown.exit_code == 0 and not any(
        line.startswith("mesh") for line in shown.output.splitlines()
    )
    assert call("verify", folder).exit_code == 0


def test_a_checkpoint_without_a_mesh_is_loaded_as_one_with(directory: Path) -> None:
    found = []
    for mesh in ({"dp_replicate": 2, "an axis of a later version": 3}, None):
        rewrite(directory / "global_step3", mesh=mesh)
        engine, *_ = deepseek_zero.initialize(model=model(), config=CONFIG)
        path, _ = engine.load_checkpoint(directory)
        assert path is not None and path.endswith("global_step3") and engine.global_steps == 3
        found.append(engine.module_state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_verify_exits_with_0_for_valid_checkpoints_and_1_for_damaged_ones(
    directory: Path,
) -> None:
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
    assert (result.exit_code, verdicts) == (
        1,
        {"global_step3": True, "global_step2": False, "global_step1": True},
    )


def test_prune_lists_what_it_removes_and_a_dry_run_removes_nothing(directory: Path) -> None:
    (directory / ".global_step9.pruned").mkdir()
    wish = ("prune", directory, "--keep-last", 1)
    would = data_of(*wish, "--dry-run")
    assert (would["removed"], would["kept"]) == (["global_step2", "global_step1"], ["global_step3"])
    assert would["cleaned"] == [".global_step9.pruned"]
    assert len(list(directory.iterdir())) == 5
    assert data_of(*wish) == {**would, "dry_run": False}
    assert sorted(path.name for path in directory.iterdir()) == ["global_step3", "latest"]
    assert "kept global_step3" in call(*wish).output


def test_a_directory_without_write_access_is_an_error_with_its_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (
            ["verify", "RUN", "--tag", "step9"],
            r"holds no checkpoint 'step9'.(.|\n)*Choose one of: global_step3",
        ),
        (["prune", "RUN", "--keep-every", "5"], "--keep-every needs --keep-last"),
        (
            ["convert", "RUN", "OUT", "--to", "deepspeed", "--dtype", "bf16"],
            "--dtype does not go with",
        ),
        (["convert", "RUN", "RUN"], "exists already"),
        (["prune", "ONE"], "is one checkpoint, not a directory of checkpoints"),
    ],
)
def test_unsupported_operations_raise_the_librarys_errors(
    directory: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    names = {"RUN": directory, "OUT": tmp_path / "out", "ONE": directory / "global_step3"}
    result = call(*(names.get(word, word) for word in words))
    assert isinstance(result.exception, UsageError)
    with pytest.raises(UsageError, match=said):
        raise result.exception


def test_such_an_error_ends_the_command_with_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["deepseek-zero", "checkpoint", "verify", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        cli.answer()
    assert ended.value.code == 2


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors directory, a safetensors file or a torch file."""
    if path.is_file() and path.suffix != ".safetensors":
        return torch.load(path, weights_only=True)
    paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: value for each in paths for name, value in load_file(each).items()}


@pytest.fixture(scope="module")
def forms(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the same states in every layout that the library writes."""
    out = tmp_path_factory.mktemp("forms")
    engine, *_ = deepseek_zero.initialize(
        model=model(), config=CONFIG | {"checkpoint": {"layout": "deepspeed"}}
    )
    engine.load_checkpoint(pristine)
    engine.save_checkpoint(out / "theirs")
    for name in ("folder", "one.safetensors", "one.pth"):
        engine.export(out / name, dtype="fp32")
    engine.export(out / "cut", dtype="fp32", max_shard_bytes=50)
    return {
        "slices": pristine / "global_step3",
        "directory": pristine,
        "deepspeed": out / "theirs" / "global_step3",
        "theirs": out / "theirs",
        **{name: out / name for name in ("folder", "cut", "one.safetensors", "one.pth")},
    }


def test_every_layout_that_the_library_writes_is_read(
    forms: dict[str, Path], tmp_path: Path
) -> None:
    told = weights_of(forms["folder"])
    counts = {"slices": 1, "directory": 3, "deepspeed": 1, "theirs": 1}
    for name, path in forms.items():
        shown = call("inspect", path)
        assert shown.exit_code == 0 and (
            "0.weight" in shown.output or counts.get(name) != 1 or name == "theirs"
        ), name
        found = data_of("inspect", path)
        if name not in ("directory", "theirs"):
            assert found["complete"] and found["parameters"]["0.weight"]["shape"] == [5, 6], name
            states = {"slices", "deepspeed"}
            assert found["parameters"]["0.weight"]["states"] == (
                ["exp_avg", "exp_avg_sq"] if name in states else []
            )
            assert found["step"] == (3 if name in states else None) and found["num_bytes"] > 0
        assert call("verify", path).exit_code == 0, name
        verdicts = data_of("verify", path)
        assert len(verdicts) == counts.get(name, 1) and all(each["good"] for each in verdicts)
        for form, out in (("safetensors", "out"), ("pth", "out.pth")):
            target = tmp_path / name / out
            assert (
                data_of("convert", path, target, "--to", form, "--dtype", "fp32")["num_bytes"] > 0
            )
            made = weights_of(target)
            assert made.keys() == told.keys(), (name, form)
            assert all(torch.equal(made[each], told[each]) for each in told), (name, form)
        if name in counts:
            assert (
                call("convert", path, tmp_path / name / "ds", "--to", "deepspeed").exit_code == 0
            ), name
        else:
            refused = call("convert", path, tmp_path / name / "ds", "--to", "deepspeed").exception
            assert isinstance(refused, CheckpointError) and "only weights" in str(refused)


def test_verify_reports_what_it_compared(forms: dict[str, Path], tmp_path: Path) -> None:
    genuine = Path(__file__).parents[2] / "data" / "deepspeed" / "stage2"
    assert "torch's CRC-32" in call("verify", genuine).output
    assert "torch's CRC-32" in call("verify", forms["one.pth"]).output
    assert (
        "CRC"
        not in call("verify", forms["deepspeed"]).output + call("verify", forms["folder"]).output
    )
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "without checksums" in call("verify", tmp_path).output


def test_verify_finds_a_flipped_bit_in_every_layout(forms: dict[str, Path], tmp_path: Path) -> None:
    for name in ("slices", "deepspeed", "folder", "cut", "one.safetensors", "one.pth"):
        source, copy = forms[name], tmp_path / name
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
        path = (
            copy
            if copy.is_file()
            else max(copy.glob("*.[sp]*t*"), key=lambda each: each.stat().st_size)
        )
        records = torch_records(path) if path.suffix in (".pt", ".pth") else []
        largest = max(records, key=lambda each: each.stop - each.start, default=None)
        flip(path, largest.stop - 1 if largest is not None else int(path.stat().st_size * 0.6))
        assert call("verify", copy).exit_code == 1, name
        refused = call("convert", copy, tmp_path / "out" / name)
        assert isinstance(refused.exception, CheckpointError), name


@pytest.mark.parametrize("form", ["safetensors", "pth", "deepspeed"])
def test_a_bug_in_a_converter_is_not_reported_as_a_refusal(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("deepseek_zero.checkpoint.convert.open_checkpoint", _mistaken)
    monkeypatch.setattr(
        "deepseek_zero.compat.deepspeed.checkpoint.writer.open_checkpoint", _mistaken
    )
    result = call("convert", directory, tmp_path / "out", "--to", form)
    assert type(result.exception) is AttributeError


def _mistaken(*_: Any, **__: Any) -> None:
    raise AttributeError("a wrong name")


def test_brackets_in_a_path_are_not_markup(pristine: Path, tmp_path: Path) -> None:
    source = shutil.copytree(pristine, tmp_path / "[/x]")
    result = call("convert", source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "[/x]" in result.stdout
