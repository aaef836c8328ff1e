"""The pretraining example: its required margin, its exit status, and a short run."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from deepseek_zero.report.records import StepRecord
from examples.gpt import GPT, SIZES
from tests.step_records import read_records

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Names = dict[str, Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Return the names of the script without running its main function."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "pretrain_text.py"), run_name="pretrain_text")


def records(losses: list[float]) -> list[StepRecord]:
    return [
        StepRecord(step, loss, 1e-3, 1.0, 1.0, 1, 1, 1.0)
        for step, loss in enumerate(losses, start=1)
    ]


@pytest.fixture
def make_run(script: Names, tmp_path: Path) -> Callable[[int | None], Any]:
    def make(steps: int | None) -> Any:
        stated = ["--steps", str(steps)] if steps else []
        options = script["parse"](["--size", "tiny", *stated])
        return script["Run"](
            options, script["JOBS"]["tiny"], tmp_path, script["Console"](quiet=True)
        )

    return make


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("pretrain_text", "--steps"),
        ("preempted", "--steps"),
        ("resnet101_digits", "--epochs"),
        ("vit_digits", "--images"),
    ],
)
def test_a_run_of_no_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    option: str,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("sys.argv", [name, option, "0"])
    script = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)
    with pytest.raises(SystemExit):
        script["parse"]()
    assert "must be at least 1" in capsys.readouterr().err


def test_the_margin_shrinks_with_fewer_steps_and_never_grows(
    make_run: Callable[[int | None], Any],
) -> None:
    full = make_run(None)
    assert make_run(full.steps // 2).least_fall == pytest.approx(full.least_fall / 2)
    assert make_run(full.steps * 10).least_fall == full.least_fall


def test_a_loss_that_falls_far_enough_passes(
    script: Names, make_run: Callable[[int | None], Any]
) -> None:
    run = make_run(None)
    script["check_fall"](
        run, records([5.5, 4.0, 5.5 - run.least_fall, 5.5 - run.least_fall, 5.4 - run.least_fall])
    )


@pytest.mark.parametrize(
    "losses", [[5.5, 5.0, 5.0, 5.0], [5.5, 5.5, 6.0, 7.0], [5.5, 1.0, float("nan"), 1.0]]
)
def test_a_loss_that_does_not_fall_far_enough_ends_the_job_with_an_error(
    script: Names, make_run: Callable[[int | None], Any], losses: list[float]
) -> None:
    with pytest.raises(SystemExit, match=r"FAILED: the loss fell by .* the margin for 60 steps is"):
        script["check_fall"](make_run(None), records(losses))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_short_run_writes_all_documented_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXAMPLES)
    arguments = ["--size", "tiny", "--steps", "12", "--stage", str(stage), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pretrain_text.py", *arguments])
    runpy.run_path(str(EXAMPLES / "pretrain_text.py"), run_name="__main__")
    names = {
        "loss.png",
        "memory.png",
        "memory.json",
        "metrics.csv",
        "metrics.jsonl",
        "model.safetensors",
        "sample.txt",
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [record.step for record in read_records(tmp_path)] == list(range(1, 13))
    assert [row["stage"] for row in json.loads((tmp_path / "memory.json").read_text())] == [
        0,
        1,
        2,
        3,
    ]
    assert (tmp_path / "sample.txt").read_text().startswith("def ")
    GPT(SIZES["tiny"]).load_state_dict(load_file(tmp_path / "model.safetensors"))
