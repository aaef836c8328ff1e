"""The memory table lists every state, and plots are drawn without a display."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from deepseek_zero.report.records import StepRecord
from examples.run_report import (
    LossCurveLabels,
    MemoryRow,
    common_unit,
    loss_curve,
    memory_bars,
    memory_table,
    running_mean,
    states_of,
)
from tests.unit.report.test_plots import is_png_of

MIB = 1024**2
ROWS = [
    MemoryRow(
        0, {"weight": 8 * MIB, "grad": 8 * MIB, "moments": 16 * MIB, "master": 0}, {}, 32 * MIB
    ),
    MemoryRow(
        3, {"weight": 4 * MIB, "grad": 4 * MIB, "moments": 8 * MIB, "window": 1}, {}, 17 * MIB
    ),
]


def printed(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    return out.getvalue().splitlines()


def test_the_table_has_a_row_per_stage_with_predicted_and_measured_totals() -> None:
    lines = printed(memory_table(ROWS))
    assert lines[0].strip() == "Memory per rank (MiB)"
    assert "0      8.00  8.00    16.00       -      32.00     32.00   +0.00" in " ".join(lines)
    assert any(
        line.split() == ["3", "4.00", "4.00", "8.00", "0.00", "16.00", "17.00", "+6.25"]
        for line in lines
    )


def test_the_table_of_all_states_fits_eighty_columns() -> None:
    states = dict.fromkeys(("weight", "grad", "master", "moments", "buffers"), 12 * MIB)
    lines = printed(memory_table([MemoryRow(0, states, states, 60 * MIB)]))
    header = next(line for line in lines if "stage" in line)
    assert header.split() == ["stage", *states, "predicted", "measured", "diff", "%"]


def test_states_without_bytes_are_left_out_and_unusual_ones_come_last() -> None:
    assert states_of(ROWS) == ["weight", "grad", "moments", "window"]


def test_all_rows_share_the_unit_of_the_largest() -> None:
    assert common_unit(ROWS) == (MIB, "MiB")
    assert common_unit([]) == (1.0, "bytes")


def test_the_difference_of_a_memory_row_is_relative_to_the_prediction() -> None:
    row = MemoryRow(3, {"weight": 60, "grad": 40}, {"weight": 60, "grad": 40}, measured_total=110)
    assert row.predicted_total == 100
    assert row.difference == pytest.approx(0.1)


def record(
    step: int, loss: float, held_out: float | None = None, skipped: bool = False
) -> StepRecord:
    return StepRecord(
        step, loss, 1e-3, 0.5, 1e4, 1, 1, 0.1, skipped=skipped, held_out_loss=held_out
    )


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


def test_the_running_mean_uses_truncated_windows_at_the_ends() -> None:
    assert running_mean([8.0, 4.0, 3.0, 2.0, 1.0], radius=1) == pytest.approx(
        [8.0, 5.0, 3.0, 2.0, 1.5]
    )
    assert running_mean([3.0], radius=5) == [3.0]
    assert running_mean([], radius=5) == []
