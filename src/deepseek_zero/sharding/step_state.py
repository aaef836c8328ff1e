"""The phase of a wrapped model, and the progress of the current step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..base.device import backward_id
from .attached import FiniteRecords, Leave
from .unit import Unit


class Phase(Enum):
    """The phases of a wrapped model: idle, forward and backward."""

    IDLE = "idle"  # between forward and backward, and between steps
    FORWARD = "forward"  # inside the root module's forward
    BACKWARD = "backward"  # inside a backward that reached an output of the model


# A backward of an intermediate output may begin inside a forward. It may also begin after an
# exception ended a forward.
PHASE_MOVES = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.FORWARD, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.IDLE),
}


class UnitUses:
    """Tells the first use of a unit in a forward from later ones. Here each use is a first one."""

    def is_first(self, unit: Unit, phase: Phase) -> bool:
        """Return whether this is the unit's first use, whose backward is the last of its uses."""
        return True

    def unshard_again(self, unit: Unit) -> None:
        """Unshard a unit in the backward of a later use. Collective."""

    def end_again(self) -> None:
        """Release the unit that `unshard_again` has gathered."""


@dataclass(eq=False)
class ForwardFrame:
    """The state of one running forward of a unit.

    Attributes:
        unit: The unit whose forward is running.
        releases: Whether backward recomputes it, and gathered the unit only for this.
        is_first: Whether this is its first use in this forward. Only layer tiles have later ones.
        leaves: Functions that convert the output.
        contexts: The context managers to exit after the forward (saved-tensor hooks, autocast).
        has_returned: Whether the forward returned without an exception.
    """

    unit: Unit
    releases: bool
    is_first: bool
    leaves: list[Leave] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    has_returned: bool = False


class StepState:
    """The phase of a wrapped model and the progress of its current step.

    Attributes:
        active: The units whose forwards are running, outermost first.
        root_calls: The modules of the root that run outside the forward of the model, the
            outermost first.
        forwards: The number of forwards with gradients since the last backward.
        backwards: The number of backwards since the last step.
        updates: The number of updates of the weights.
        is_boundary: Whether the next backward is the last one of gradient accumulation.
        has_gradients: Whether a gradient has arrived since gradients were dropped.
        is_graphless: Whether a loss since the last step required no gradient.
        uses: The uses of units in a forward.
        nonfinite: Records of non-finite values; None if they are not tracked.
    """

    def __init__(self) -> None:
        self._phase = Phase.IDLE
        self.active: list[ForwardFrame] = []
        self.root_calls: list[nn.Module] = []
        self.forwards = 0
        self.backwards = 0
        self.updates = 0
        self.is_boundary = True
        self.has_gradients = False
        self.is_graphless = False
        self.uses = UnitUses()
        self.nonfinite: FiniteRecords | None = None

    @property
    def phase(self) -> Phase:
        """The phase of the model; `enter` changes it."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Change the phase at the beginning or end of a forward or backward."""
        if (self._phase, phase) not in PHASE_MOVES:
            raise AssertionError(
                f"a wrapped model cannot go from {self._phase.value} to {phase.value}"
            )
        self._phase = phase

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is running; one that an exception ended is not."""
        is_running = backward_id() != -1  # autograd's id of the backward on this thread
        return self._phase is Phase.BACKWARD and is_running

    @property
    def is_between_steps(self) -> bool:
        """Whether no backward and no training forward ran since the last step."""
        return self.backwards == 0 and self.forwards == 0

    @property
    def is_outermost(self) -> bool:
        """Whether a forward that begins now is an outermost one that autograd records.

        It is then neither inside another forward nor a recomputation.
        """
        is_inside = self.active or self.root_calls or self.is_in_backward
        return torch.is_grad_enabled() and not is_inside
