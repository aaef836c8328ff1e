"""The fields that parts of the engine add to the step message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..optim.sharded import ShardedOptimizer
from ..optim.step_message import StepMessage
from .stragglers import Stragglers

if TYPE_CHECKING:  # most runs use none of these parts
    from .integrity import Integrity
    from .preemption import Preemption


@dataclass
class StepFields:
    """The features of an engine that add fields to the step message.

    Attributes:
        preemption: Sends the signals that a rank received; None if signals are not handled.
        stragglers: Sends the times of each rank; None if they cannot be compared.
        integrity: Sends checksums of states; None if states are not checked.
    """

    preemption: Preemption | None = None
    stragglers: Stragglers | None = None
    integrity: Integrity | None = None

    def update(self, optimizer: ShardedOptimizer, update: Callable[..., None], step: int) -> None:
        """Update the weights and exchange the fields of the step message.

        The fields are sent with the norm of the gradients, in the same all-gather.

        Args:
            optimizer: The sharded optimizer, to whose step message the fields are added.
            update: A method of `optimizer` that updates the weights.
            step: The number of the step.

        Note:
            Collective: every rank must call it.
        """
        message = StepMessage()
        if self.preemption is not None:
            self.preemption.add_to(message)
        if self.stragglers is not None:
            self.stragglers.add_to(message, step)

        def completed() -> StepMessage:
            if self.integrity is not None:  # the checks read the reduced gradients
                self.integrity.add_to(message, step)
            return message

        update(message=completed, number=step)
        if optimizer.last is None:
            return
        fields = optimizer.last.verdict.fields
        if self.stragglers is not None:
            self.stragglers.compare(step, fields)
        if self.integrity is not None:
            self.integrity.compare(step, fields)
