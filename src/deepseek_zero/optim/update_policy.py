"""When and from what a step updates units: an extension point of the core."""

from __future__ import annotations

from collections.abc import Collection

from ..sharding.unit import Unit
from .inner_step import Decision
from .policy_state import PolicyState
from .verdict import StepResult, Verdict


class UpdatePolicy(PolicyState):
    """Base class of features that change when units are updated, or from which gradients.

    By default, each step updates all units from its own gradients. An optimizer has a sequence of
    policies, the same on every rank, and calls each hook of all of them in order. A hook must not
    communicate unless its docstring says that it is collective.

    These are the hooks of one step, in this order. `PolicyState` has the hooks between steps, for
    example for checkpoints, and `ReduceLane.after_reduce` calls functions during backward.

    Attributes:
        watches_overflows: Search for the unit with non-finite numbers even if a dynamic loss scale
            makes overflows usual.
        undoes: Some updates run during backward and may have to be undone from a log.
    """

    watches_overflows = False
    undoes = False

    def before_step(self) -> None:
        """Complete the updates that must have ended before the next step begins."""

    def before_update(self, verdict: Verdict) -> None:
        """Examine the reduced gradients before the update. Collective: every rank must call it."""

    def due(self, made: Decision | None) -> Decision | None:
        """Return the decision by which this step updates the weights; None updates nothing.

        Args:
            made: The decision from this step's own gradients; None after an overflow.
        """
        return made

    def conclude(self, due: Decision | None) -> frozenset[int]:
        """Undo the updates that ran in backward by other decisions than `due`.

        Returns:
            The numbers of the units whose early updates are valid.
        """
        return frozenset()

    def keep(self, made: Decision | None) -> None:
        """Store the gradients and the decision of this step, if a later one applies them."""

    def postpone(self, due: Decision, done: Collection[int]) -> None:
        """Prepare later updates by `due` of the units in `Tiles.later` that are not in `done`."""

    def after_update(self, result: StepResult, origin: Unit | None) -> bool:
        """React to the result of a step, for example change the precision of a unit.

        Args:
            result: The result of the step.
            origin: The unit in which the first non-finite value occurred; None if it is unknown.

        Returns:
            Whether the policy has removed the cause of an overflow, so that the loss scale need not
            shrink.

        Note:
            Collective: every rank must call it.
        """
        return False

    def after_step(self, result: StepResult, rescale: float) -> None:
        """Update the policy's own state at the end of a step.

        Args:
            result: The result of the step.
            rescale: The new loss scale divided by the old one.

        Note:
            Every rank must call it, with the same arguments.
        """
