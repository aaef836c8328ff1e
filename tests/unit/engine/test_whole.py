"""At stage 3 a small model stays whole by default: said in one line where it is wrapped, at both
doors.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import deepseek_zero as dz

WORDS = "stage3_param_persistence_threshold"


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


@pytest.mark.parametrize("door", ["initialize", "DeepSeekZeRO3"])
@pytest.mark.parametrize(
    ("model", "zero", "says"),
    [
        (layers(8), {}, "all 64 parameters"),
        (
            layers(300, 300, 300),
            {},
            "all 270000 parameters",
        ),  # each below the threshold, together above it
        (layers(400, *[300] * 20), {}, "1800000 of 1960000 parameters"),
        (layers(400, 300), {}, ""),
        (layers(8), {WORDS: 0}, ""),
        (layers(8), {"stage": 2}, ""),
        (layers(300), {"stage3_model_persistence_threshold": 0}, ""),
    ],
)
def test_what_stays_whole_at_stage_3_is_said_with_its_key(
    door: str, model: nn.Module, zero: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"stage": 3, **zero}
    if door == "initialize":
        dz.initialize(model=model, config={"zero_optimization": section})[0].destroy()
    else:
        dz.DeepSeekZeRO3(model, zero_optimization=section)
    lines = [line for line in capsys.readouterr().err.splitlines() if WORDS in line]
    assert len(lines) == bool(says)
    assert all(says in line and "INFO" in line for line in lines)
