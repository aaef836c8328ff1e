"""Interfaces of objects that a pipeline or the optimizer attaches to a running model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Driver(Protocol):
    """Interface of an object that runs forwards and backwards of parts of a model.

    The training loop of a pipeline implements it, because the loop calls the stages of the model
    separately.
    """

    def before_step(self) -> None:
        """Complete the gradients before a step, or raise an error.

        Note:
            Collective: every rank must call it.
        """

    def forget(self) -> None:
        """Reset the driver after gradients were discarded."""


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
