"""Test the fields that parts of an engine add to the step message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepseek_zero.engine.step_fields import StepFields
from deepseek_zero.optim.step_message import StepMessage


class Recorded:
    """A part of an engine that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def add_to(self, message: StepMessage, step: int | None = None) -> None:
        self.calls.append(f"{self.name} adds {step}")

    def compare(self, step: int, fields: Any) -> None:
        self.calls.append(f"{self.name} compares {step} {fields}")


def test_checksums_are_added_after_gradients_are_reduced_and_all_fields_are_compared() -> None:
    calls = list[str]()
    parts: list[Any] = [Recorded(name, calls) for name in ("preemption", "stragglers", "integrity")]
    optimizer: Any = SimpleNamespace(last=SimpleNamespace(verdict=SimpleNamespace(fields="fields")))

    def update(message: Any, number: int) -> None:
        calls.append(f"step {number}")
        assert isinstance(message(), StepMessage)

    StepFields(*parts).update(optimizer, update, 3)
    assert calls == [
        "preemption adds None",
        "stragglers adds 3",
        "step 3",
        "integrity adds 3",
        "stragglers compares 3 fields",
        "integrity compares 3 fields",
    ]


def test_without_parts_and_without_a_verdict_only_the_weights_are_updated() -> None:
    seen = list[int]()
    optimizer: Any = SimpleNamespace(last=None)
    StepFields().update(optimizer, lambda message, number: seen.append(number), 1)
    assert seen == [1]
