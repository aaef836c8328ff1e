"""Benchmark plans fit their time limit, run the goals' comparisons first and repeat no run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.cells import Cell
from benchmarks.launch import Run
from benchmarks.plan import (
    FEWEST_STEPS,
    PRIORITY,
    Costs,
    Request,
    first_pass,
    floor_runs,
    is_recorded,
    next_round,
)
from benchmarks.systems import SYSTEMS

FAST, SLOW = Cell("125m", "fp32"), Cell("125m", "bf16")
REQUEST = Request([FAST, SLOW], list(SYSTEMS))


def record(cell: Cell, system: str, seconds: float, **changes: Any) -> Mapping[str, Any]:
    """Return the record of a timed run with five steps and a start of ten seconds."""
    known = {
        "cell": cell.name,
        "system": system,
        "kind": "time",
        "round": 1,
        "ranks": 2,
        "seconds": {"first": seconds},
    }
    return known | {"steps": [seconds] * 5, "wall_seconds": 10 + 6 * seconds} | changes


FLOORS = [record(FAST, "floor", 3.0), record(SLOW, "floor", 12.0)]


def test_every_system_is_wanted_once_per_kind() -> None:
    timed = {(name, "time") for name, entry in SYSTEMS.items() if entry.timed}
    assert len(set(PRIORITY)) == len(PRIORITY)
    assert set(PRIORITY) == timed | {
        (name, "memory") for name, entry in SYSTEMS.items() if entry.learns
    }


def test_the_floor_of_every_cell_is_probed() -> None:
    assert [(run.cell, run.system) for run in floor_runs(REQUEST)] == [
        (FAST.name, "floor"),
        (SLOW.name, "floor"),
    ]


def test_a_cost_is_what_was_measured_and_otherwise_a_multiple_of_the_floor() -> None:
    costs = Costs([*FLOORS, record(FAST, "fsdp2", 5.0)])
    assert costs.run(Run(FAST.name, "fsdp2", steps=3)) == pytest.approx(10 + 4 * 5.0)
    assert costs.step(FAST, "ddp") == pytest.approx(6.0)
    assert costs.step(SLOW, "ddp") == pytest.approx(24.0)


@pytest.mark.parametrize("minutes", [5, 20, 60])
def test_the_first_pass_fits_its_time_and_names_what_it_leaves_out(minutes: float) -> None:
    runs, left_out = first_pass(REQUEST, FLOORS, 60 * minutes)
    assert Costs(FLOORS).total(runs) <= 60 * minutes
    whole = first_pass(REQUEST, FLOORS, float("inf"))[0]
    assert len(runs) + len(left_out) == len(whole)
    assert all(run.steps >= FEWEST_STEPS for run in runs if run.kind == "time")


def test_without_a_limit_everything_runs_with_all_configured_steps() -> None:
    runs, left_out = first_pass(REQUEST, FLOORS, float("inf"))
    assert not left_out
    assert len(runs) == 2 * (len(PRIORITY) - 1)  # the floors are already recorded
    assert {run.steps for run in runs if run.kind == "time"} == {5}


def test_runs_for_the_goals_precede_other_runs() -> None:
    runs, left_out = first_pass(REQUEST, FLOORS, 600)
    kept = {run.system for run in runs if run.cell == SLOW.name}
    assert {"ours-3", "fsdp2"} <= kept
    assert "deepspeed-1" in {run.system for run in left_out if run.cell == SLOW.name}


def test_runs_of_a_cell_are_consecutive_with_timed_ones_first() -> None:
    runs, _ = first_pass(Request([FAST], list(SYSTEMS)), FLOORS, float("inf"))
    names = list(SYSTEMS)
    places = [(run.kind != "time", names.index(run.system)) for run in runs]
    assert places == sorted(places)


def test_recorded_runs_are_not_repeated() -> None:
    records = [record(FAST, "floor", 3.0), record(FAST, "ddp", 4.0)]
    runs, _ = first_pass(Request([FAST], ["floor", "ddp", "fsdp2"]), records, float("inf"))
    assert [(run.system, run.kind) for run in runs] == [
        ("fsdp2", "time"),
        ("ddp", "memory"),
        ("fsdp2", "memory"),
    ]
    assert not is_recorded(Run(FAST.name, "ddp", ranks=3), records)


def rounds(
    request: Request, records: list[Mapping[str, Any]], seconds: float = float("inf")
) -> list[tuple[str, str, int]]:
    return [
        (run.cell, run.system, run.round) for run in next_round(request, records, seconds, most=3)
    ]


def test_a_round_is_completed_before_the_next_one_begins_and_failed_systems_are_left_out() -> None:
    request = Request([FAST], ["floor", "ddp", "fsdp2", "ours-3"])
    records = [record(FAST, "floor", 3.0), record(FAST, "ddp", 4.0), record(FAST, "ours-3", 4.0)]
    records.append(record(FAST, "floor", 3.0, round=2))
    records.append(record(FAST, "ours-3", 4.0, round=2, failed="rank 1 ended with 1"))
    assert rounds(request, records) == [(FAST.name, "ddp", 2)]
    records.append(record(FAST, "ddp", 4.0, round=2))
    assert rounds(request, records) == [(FAST.name, "floor", 3), (FAST.name, "ddp", 3)]


def test_the_cell_with_fewest_rounds_is_next_unless_its_round_does_not_fit() -> None:
    records = [*FLOORS, record(FAST, "floor", 3.0, round=2)]
    assert rounds(REQUEST, records) == [(SLOW.name, "floor", 2)]
    assert rounds(REQUEST, records, seconds=30) == [(FAST.name, "floor", 3)]
    assert rounds(REQUEST, records, seconds=10) == []


def test_no_round_follows_the_last_one_and_none_comes_before_the_first_pass() -> None:
    assert rounds(REQUEST, [record(FAST, "floor", 3.0, round=number) for number in (1, 2, 3)]) == []
    assert rounds(REQUEST, []) == []


def test_a_model_with_steps_of_milliseconds_runs_more_steps() -> None:
    tiny = Cell("tiny", "fp32")
    records = [record(tiny, "floor", 0.01)]
    assert {
        run.steps for run in first_pass(Request([tiny], ["floor", "ddp"]), records, 600)[0]
    } == {40}
