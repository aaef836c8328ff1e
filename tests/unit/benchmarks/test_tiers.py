"""The pages of benchmarks/tiers.py and huge.py, written from made-up figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.huge import report
from benchmarks.tiers import Row, draw, table

ROWS = [
    Row("125m-fp32", "floor", 4.0, 1.0),
    Row("125m-fp32", "stage 3, device", 4.4, 1.1),
    Row(
        "125m-fp32",
        "stage 3, disk",
        6.0,
        1.5,
        1.2,
        1e9,
        8e8,
        1.1,
        0.9,
        0.6,
        900_000_000,
        during_compute=0.55,
    ),
    Row("125m-fp32", "stage 3, host", 4.6, 1.15, same_losses=False),
]


def test_the_table_has_a_line_for_each_way_and_names_losses_that_differ() -> None:
    page = table(ROWS, "a machine")
    assert "| 125m-fp32 | floor | 4.000 | 1.00 | - | - | - | - | - | - | - | 0 | - |" in page
    assert (
        "| stage 3, disk | 6.000 | 1.50 | 1.20 | 1000 | 800 | 1.10 | 90% | 60% | 55% | 900 | yes |"
        in page
    )
    assert page.count("**NO**") == 1
    assert "| 125m-fp32, disk: speed over a plain copy's | >= 0.85 | 0.90 | yes |" in page
    assert "| 125m-fp32, host: step over the floor | <= 1.25 | 1.15 | yes |" in page
    assert "bound |" in page and "disk: step over the floor" not in page, "a goal of bf16 alone"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(ROWS, tmp_path / "tiers.png")
    assert (tmp_path / "tiers.png").stat().st_size > 10_000


def test_a_step_is_set_against_its_backward_and_the_larger_of_traffic_and_forward() -> None:
    story = {
        "initialise": 10.0,
        "steps": [30.0, 24.0, 22.0],
        "losses": [5.0, 4.0, 3.0],
        "rates": [1e9, 2e9, 1e9],
        "seconds": {"forward": 4.0, "backward": 10.0, "optimizer": 3.0},
        "read": 6e9,
        "written": 4e9,
        "busy": 12.0,
        "waited": 3.0,
        "at_rest": 32e9,
    }
    options = argparse.Namespace(layers=26, width=2560, dtype="fp32")
    page = report(options, 2_000_000_000, story, 5 << 30, 4 << 30, "a machine")
    assert "| step over its schedule bound | 1.20 (24.0 s over 20.0 s) |" in page
    assert "| of the disk's time beside something else | 75% |" in page
    assert "| largest memory, control group with page cache | 5.00 GiB |" in page
