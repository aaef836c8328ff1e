"""Interfaces of what extensions and the optimizer attach to a running model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Leave = Callable[[Any], Any]
# Takes the arguments of an outermost forward, and returns the arguments to use and a function that
# converts the output.
Border = Callable[[Any], tuple[Any, Leave]]


class FiniteRecords(Protocol):
    """Records which inputs, outputs and gradients of units are finite (`NonFiniteDetector`)."""

    def record(self, what: str, unit: int, value: Any) -> None:
        """Record a value of a unit without waiting for it.

        Args:
            what: "input", "output" or "grad".
            unit: The number of the unit.
            value: The value, which may be nested.
        """
