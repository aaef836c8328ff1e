"""Where a wrapped model is: in a forward, in a backward, and how far in its step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from torch import nn

from ..base.device import backward_id
from .unit import Unit, UnitState


class Phase(Enum):
    """The phases of a wrapped model."""

    IDLE = "idle"  # between forward and backward, and between steps
    FORWARD = "forward"  # inside the root module's forward
    BACKWARD = "backward"  # inside a backward that reached an output of the model


# A backward may begin inside a forward, of an output so far, or after an exception ended a forward.
PHASE_MOVES = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.FORWARD, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.IDLE),
}


class ForwardFrame:
    """A unit whose forward runs now.

    Attributes:
        was_unsharded: Its weights were unsharded before.
        is_first: It was not used before in this forward; only a tile can be used again.
        begin: The number of autograd's first node inside it; None if no gradient enters or leaves
            the engine around it.
        contexts: What to leave after it (saved-tensor hooks, autocast).
        has_returned: Its forward came to its end.
    """

    def __init__(self, unit: Unit, *, is_first: bool, begin: int | None) -> None:
        self.unit = unit
        self.was_unsharded = unit.state is not UnitState.SHARDED
        self.is_first = is_first
        self.begin = begin
        self.contexts: list[Any] = []
        self.has_returned = False


class FiniteRecords(Protocol):
    """Records which inputs, outputs and gradients of units are finite (optim/nonfinite.py)."""

    def record(self, what: str, unit: int, value: Any) -> None:
        """Record a value ("input", "output" or "grad") of a unit, without waiting for it."""

    def origin_in_forward(self, order: Sequence[int]) -> int | None:
        """Return the first unit that made a number that is not finite of finite ones."""

    def origin_in_backward(self, order: Sequence[int], sick_gradients: set[int]) -> int | None:
        """Return the first unit with such a gradient and a finite incoming one."""


class StepState:
    """The state of one step of a wrapped model.

    Attributes:
        active: The units whose forwards run now, outermost first.
        parts: Modules of the root that run outside any unit's forward, outermost first.
        forwards: The number of forwards with gradients since the last backward.
        backwards: The number of backwards since the last step.
        is_boundary: The next backward ends an accumulation: replicated gradients are reduced.
        has_gradients: A backward has brought a gradient since gradients were dropped.
        is_graphless: A loss without a graph was given since the last step.
        nonfinite: Records where numbers stop being finite; None if it is not looked for.
    """

    def __init__(self) -> None:
        self._phase = Phase.IDLE
        self.active: list[ForwardFrame] = []
        self.parts: list[nn.Module] = []
        self.forwards = 0
        self.backwards = 0
        self.is_boundary = True
        self.has_gradients = False
        self.is_graphless = False
        self.nonfinite: FiniteRecords | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to another phase; only forwards and backwards do."""
        if (self._phase, phase) not in PHASE_MOVES:
            raise AssertionError(
                f"a wrapped model cannot go from {self._phase.value} to {phase.value}"
            )
        self._phase = phase

    @property
    def is_in_backward(self) -> bool:
        """Return whether a backward of the model runs now; one that an exception ended does not."""
        return self._phase is Phase.BACKWARD and backward_id() != -1

    @property
    def is_between_steps(self) -> bool:
        """Return whether no backward, and no forward with gradients, came after the last step."""
        return self.backwards == 0 and self.forwards == 0
