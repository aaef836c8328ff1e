"""Plots are drawn without a display, from what a run really leaves behind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from deepseek_zero.base.errors import NotBuiltError
from deepseek_zero.report import plots
from deepseek_zero.report.measure import MemoryRow
from deepseek_zero.report.plots import LossCurveLabels, loss_curve, memory_bars, running_mean
from deepseek_zero.report.records import StepRecord

PNG = b"\x89PNG\r\n\x1a\n"


def record(
    step: int, loss: float, held_out: float | None = None, skipped: bool = False
) -> StepRecord:
    return StepRecord(
        step, loss, 1e-3, 0.5, 1e4, 1, 1, 0.1, skipped=skipped, held_out_loss=held_out
    )


def is_png_of(path: Path, least_width: int) -> bool:
    content = path.read_bytes()
    return content.startswith(PNG) and int.from_bytes(content[16:20], "big") >= least_width


@pytest.mark.parametrize(
    "records",
    [
        [
            record(step, 5.0 - step / 10, held_out=4.0 if step % 10 == 0 else None)
            for step in range(1, 31)
        ],
        [record(1, 5.0), record(2, math.inf, skipped=True), record(3, math.nan), record(4, 4.0)],
        [record(1, 5.0)],
        [],
    ],
    ids=["a run", "an overflow", "one step", "nothing"],
)
def test_a_loss_curve_is_drawn_from_any_run(tmp_path: Path, records: list[StepRecord]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "new folder" / "loss.png"
    loss_curve(
        records, target, LossCurveLabels("title", "subtitle", "nats per byte", chance=math.log(256))
    )
    assert is_png_of(target, least_width=1000)
    assert [path.name for path in target.parent.iterdir()] == ["loss.png"]


def test_memory_bars_are_drawn_for_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    states = {"weight": 4 << 20, "grad": 4 << 20, "window": 1 << 20, "buffers": 12}
    memory_bars(
        [MemoryRow(stage, states, states, sum(states.values())) for stage in range(4)],
        tmp_path / "m.png",
    )
    assert is_png_of(tmp_path / "m.png", least_width=1000)


def test_a_missing_matplotlib_is_named_with_a_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(NotBuiltError, match="pip install matplotlib"):
        loss_curve([], tmp_path / "loss.png")


def test_the_running_mean_starts_even_and_ends_looking_back() -> None:
    assert running_mean([8.0, 4.0, 3.0, 2.0, 1.0], radius=1) == pytest.approx(
        [8.0, 5.0, 3.0, 2.0, 1.5]
    )
    assert running_mean([3.0], radius=5) == [3.0]
    assert running_mean([], radius=5) == []
