"""The Python cost of a step per unit does not depend on the number of units."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

import deepseek_zero
from tests.models import Gpt, seeded
from tests.training import Run, start_engine, train_step

HOME = deepseek_zero.__path__[0]
# Loops in Comm wait for other ranks, so their line counts vary
MAX_IN_FLIGHT = ("sharding", "optim", "engine")


def lines_of_a_step(blocks: int) -> int:
    """Return the executed lines of the library in one step, each loop iteration counted."""
    run, lines = Run(3, window=0), Counter[str]()
    engine = start_engine(run, seeded(Gpt, blocks=blocks))
    for step in range(3):  # ranks agree on the order of units after the first step
        train_step(engine, run, step)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        room = frame.f_code.co_filename.removeprefix(f"{HOME}/").partition("/")[0]
        if room not in MAX_IN_FLIGHT:
            return None
        lines[room] += event == "line"
        return trace

    sys.settrace(trace)
    try:
        train_step(engine, run, 3)
    finally:
        sys.settrace(None)
    engine.destroy()
    return lines.total()


@pytest.mark.ranks(2)
def test_the_cost_of_a_unit_does_not_depend_on_their_number() -> None:
    few, more, many = map(lines_of_a_step, (3, 9, 15))
    assert few > 500
    assert abs((many - more) - (more - few)) <= 0.005 * (more - few), (few, more, many)
