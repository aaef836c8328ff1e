"""The growth benchmark compares steps of equally many ranks and computes the cost of one unit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.growth import LAYERS, RANKS, points_by_layers, points_by_ranks, runs_of


def run(cell: str, system: str, ranks: int, seconds: float) -> dict[str, Any]:
    known: dict[str, Any] = {
        "cell": cell,
        "system": system,
        "kind": "time",
        "round": 1,
        "ranks": ranks,
    }
    known |= {
        "steps": [seconds],
        "losses": [5.0],
        "cpu_seconds": 1.0,
        "wire_bytes": 0,
        "sent_bytes": None,
    }
    return known | {"settings": {}, "seconds": {"first": 1.0}}


def test_every_point_is_run_once_a_round_floor_and_system_in_turn() -> None:
    runs = runs_of(2, 5, small=False)
    assert len(runs) == 2 * 2 * (len(RANKS) + len(LAYERS))
    assert [each.system for each in runs[:4]] == ["floor", "ours-3", "floor", "ours-3"]


def test_a_step_is_compared_with_the_floor_of_as_many_ranks() -> None:
    seconds = {2: (1.0, 1.1), 3: (2.0, 2.4)}
    runs = [
        run("30m-fp32", system, ranks, both[place])
        for ranks, both in seconds.items()
        for place, system in enumerate(("floor", "ours-3"))
    ]
    points = points_by_ranks(runs)
    assert [point.at for point in points] == [2, 3]
    assert [point.over_floor for point in points] == pytest.approx([1.1, 1.2])


def test_the_cost_of_a_unit_is_what_the_step_takes_beyond_the_floor() -> None:
    runs = [
        run("16x256-fp32", "floor", 2, 1.0),
        run("16x256-fp32", "ours-3", 2, 1.8),
        run("8x256-fp32", "floor", 2, 1),
    ]
    assert [(point.at, point.per_unit) for point in points_by_layers(runs)] == [
        (16, pytest.approx(0.05))
    ]
