"""Rows summarize the runs; a system with different losses counts as wrong and never as fastest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.cells import Cell
from benchmarks.goals import GOALS, goal_table, show
from benchmarks.summary import Summary, cells_of, summarise
from benchmarks.tables import about, memory_table, remarks, time_table

CELL = Cell("125m", "fp32")
TRUTH = [5.0, 4.0, 3.5]
MB = 10**6


def timed(system: str, steps: list[float], **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "cell": CELL.name,
        "system": system,
        "kind": "time",
        "round": 1,
        "ranks": 2,
    }
    known |= {
        "steps": steps,
        "losses": TRUTH,
        "cpu_seconds": 1.0,
        "wire_bytes": 7 * MB,
        "sent_bytes": None,
    }
    known |= {
        "others_cores": 0.1,
        "wall_seconds": 9.0,
        "settings": {},
        "versions": {"torch": "2.13.0"},
    }
    return (
        known
        | {"seconds": {"import": 0.5, "build": 1.0, "initialise": 0.4, "first": 2 * steps[0]}}
        | changes
    )


def weighed(system: str, size: int) -> dict[str, Any]:
    moments = dict.fromkeys(("imported", "init_peak", "initialised", "train_peak", "steady"))
    memory = {moment: {"pss": size, "uss": size - MB, "rss": size + MB} for moment in moments}
    return timed(system, [1.0]) | {"kind": "memory", "memory": memory}


RUNS = [
    timed("floor", [1.0, 1.2, 1.1], losses=[5.0, 4.5, 4.4]),
    timed("single", [2.0]),
    timed("fsdp2", [2.2], losses=[5.0, 4.0, 3.5 + 1e-6]),
    timed("ddp", [1.0], losses=[5.0, 4.1, 3.5]),
    timed("ours-3", [1.2], sent_bytes=3 * CELL.shape.numel * 4 / 2),
    timed("floor", [3.0, 1.0, 3.0], round=2),
    timed("ours-3", [1.3, 1.4], round=2, sent_bytes=3 * CELL.shape.numel * 4 / 2),
    weighed("ours-3", 900 * MB),
]


def summary(runs: list[dict[str, Any]] = RUNS) -> Summary:
    return summarise(CELL, runs)


def test_a_step_is_the_median_of_the_medians_of_its_runs() -> None:
    rows = summary().rows
    assert rows["floor"].median == pytest.approx((1.1 + 3.0) / 2)
    assert rows["floor"].fastest == 1.0
    assert rows["ours-3"].rounds == 2


def test_ratios_are_of_medians_or_of_fastest_steps() -> None:
    found = summary()
    assert found.over_floor("fsdp2") == pytest.approx(2.2 / 2.05)
    assert found.over_floor("ours-3", "fastest") == pytest.approx(1.2)
    assert found.times_faster("ours-3", "fsdp2") == pytest.approx(2.2 / 1.275)
    assert found.times_faster("ours-3", "deepspeed-3") is None


def test_a_system_with_other_losses_is_wrong_and_not_the_fastest() -> None:
    found = summary()
    assert found.rows["ddp"].loss_gap == pytest.approx(0.1)
    assert found.rows["ddp"].is_wrong
    assert not found.rows["fsdp2"].is_wrong
    assert found.fastest_system == "ours-3"
    assert any("| ddp |" in line and "**WRONG** 0.1" in line for line in time_table(found))


def test_the_floor_is_not_held_to_the_losses_of_others() -> None:
    assert summary().rows["floor"].loss_gap is None
    assert not summary().rows["floor"].is_wrong


def test_a_loss_that_is_not_a_number_is_wrong() -> None:
    row = summary([timed("single", [2.0]), timed("ddp", [1.0], losses=[5.0, math.nan, 3.5])]).rows[
        "ddp"
    ]
    assert row.is_wrong


def test_a_failed_system_has_a_row_with_its_failure() -> None:
    failed = {
        "cell": CELL.name,
        "system": "ddp",
        "kind": "time",
        "round": 1,
        "ranks": 2,
        "failed": "rank 0 ended with 1",
    }
    found = summary([*RUNS[:3], failed | {"others_cores": 0.0}])
    assert any("failed" in line for line in time_table(found))
    assert any("rank 0 ended with 1" in line for line in remarks(found))


def test_sent_bytes_are_reported_in_model_sizes() -> None:
    assert summary().psi("ours-3") == pytest.approx(3.0)


def test_tables_have_as_many_cells_in_every_line() -> None:
    for table in (
        time_table(summary()),
        memory_table(summary()),
        goal_table({CELL.name: summary()}),
    ):
        assert len({line.count("|") for line in table}) == 1


def test_the_goals_are_measured_against_their_bounds() -> None:
    lines = goal_table({CELL.name: summary()})
    assert len(lines) == len(GOALS) + 2
    steady = next(line for line in lines if "steady memory" in line)
    assert (
        steady == "| stage 3, steady memory, PSS | <= 975 MB | - | - | <= 975 MB | 900 MB | yes |"
    )
    assert next(line for line in lines if "than FSDP2" in line).endswith("| >= 1.6 | 1.73 | yes |")


def test_the_header_states_the_machine_and_its_load() -> None:
    machine = {
        "cpu": "Some CPU",
        "cores": 2,
        "memory_gib": 24,
        "has": ["avx2"],
        "has_not": ["amx_bf16"],
    }
    lines = about(
        {
            "date": "2026-11-21",
            "commit": "abc",
            "machine": machine,
            "not_installed": ["deepspeed-3"],
        },
        RUNS,
    )
    text = "\n".join(lines)
    assert "without amx_bf16" in text
    assert "not installed: deepspeed-3" in text
    assert "median 0.10" in text


def test_cells_are_listed_in_the_order_of_their_runs() -> None:
    assert cells_of([{"cell": "tiny-bf16"}, {"cell": "125m-fp32"}, {"cell": "tiny-bf16"}]) == [
        Cell("tiny", "bf16"),
        CELL,
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(2e-4, "2e-4"), (1.1, "1.1"), (975.4, "975"), (0, "0"), (0.036, "0.04")]
)
def test_figures_have_the_digits_they_deserve(value: float, text: str) -> None:
    assert show(value) == text
