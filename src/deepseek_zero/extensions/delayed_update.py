"""Delayed updates (ZeRO-Offload): an update runs while the next step computes.

From step K on, each gradient is applied one step late. With w(t) the weights that step t computes
with, g(t) its gradient and d(t) its decision (norm, clipping, loss scale, hyper-parameters):

    w(t + 1) = update(w(t), d(t - 1), g(t - 1))        and        w(K + 1) = w(K)

A step whose own gradient overflows still carries out the previous decision, and leaves none for the
next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import UsageError
from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.updater import Decision
from ..planner.extras import late_gradient_of
from ..planner.spec import S, Spec
from ..sharding.grad_sum import GradState, GradSum
from ..sharding.gradient import Gradient
from ..sharding.param_group import ParamGroup

_TILE_NUMEL = 1 << 20  # Elements that are swapped at a time if the buffers cannot be exchanged


class DelayedGradient(GradSum):
    """This rank's slice of one group's gradient of the previous step.

    Attributes:
        gradient: The gradient of the current step.
    """

    name = "delayed"
    saved_as = "owed"

    def __init__(self, gradient: Gradient) -> None:
        super().__init__(gradient.group)
        self.gradient = gradient
        self.guard = gradient.sum.guard  # Both share a guard, because they exchange their memories

    @property
    def spec(self) -> Spec:
        spec = late_gradient_of(self.group.plan)
        assert spec is not None
        return spec

    def swap(self, *, keep: bool) -> None:
        """Exchange the buffers of the delayed gradient and of the gradient reduced in this step.

        Args:
            keep: Keep the gradient reduced in this step for the next one. If false, it is
                discarded.
        """
        other = self.gradient.sum
        comes = self.is_full
        if not (keep or comes):
            return
        self.group.guard.before_write()
        theirs = other.ensure()
        mine = self.ensure()
        if theirs.spec.placement is S:
            self.buffer = theirs
            other.buffer = mine
        else:
            left = theirs.shard(self.group.comm_ctx.comm.rank).split(_TILE_NUMEL)
            for one, another in zip(left, mine.load().split(_TILE_NUMEL), strict=True):
                held = one.clone()
                one.copy_(another)
                another.copy_(held)
        absent = self.absent
        self.absent = other.absent
        other.absent = absent
        other.known_squares = None
        other.become(GradState.REDUCED if comes else GradState.EMPTY)
        self.restore(is_full=keep)
        if not keep:
            self.discard()

    def restore(self, *, is_full: bool) -> None:
        """Set whether `buffer` holds a gradient, as after loading a checkpoint."""
        self.become(GradState.HELD if is_full else GradState.EMPTY)

    def discard(self) -> None:
        """Discard the gradient, so that no update uses it."""
        self.group.guard.before_write()
        self.restore(is_full=False)
        self.absent = None
        if self.buffer is not None:
            self.buffer.storage.discard(0, self.buffer.memory.numel())


def refuse_joining_with_undo_log(what: str, fix: str) -> None:
    """Raise `UsageError` because parameters cannot join an optimizer with an undo log.

    Args:
        what: The event that adds parameters to the optimizer, for the error message.
        fix: The last sentence of the error message: what the user can do.
    """
    raise UsageError(
        f"{what}, under super_offload or delayed_update_after.",
        "Updates made in backward are undone from a log that was laid out for the others.",
        fix,
    )


def delayed_gradient(group: ParamGroup) -> DelayedGradient:
    """Return a group's gradient of the previous step."""
    found = group.gradient.kept[DelayedGradient.name]
    assert isinstance(found, DelayedGradient)
    return found


@dataclass(eq=False)
class DelayedUpdate(UpdatePolicy):
    """A policy that applies the gradient and the decision of each step in the next step.

    Attributes:
        groups: The trained groups.
        after: The number of updates at the start of a run that are not delayed.
        deferred: The decision (clipping, loss scale) that the next step carries out; None if there
            is none.
    """

    keeps_decisions = True
    checkpoint_key = "owed"
    needs_moments = True

    groups: Sequence[ParamGroup]
    after: int
    deferred: Decision | None = None

    def attach(self, optimizer: Stepping) -> None:
        self._updater = optimizer.updater

    def refuse_joining(self, what: str, fix: str) -> None:
        """Raise `UsageError`, because delayed updates do not support new parameters."""
        refuse_joining_with_undo_log(what, fix)

    @property
    def is_on(self) -> bool:
        """Whether the next step delays its own update."""
        return self.owes_update or self._updater.updates >= self.after

    @property
    def owes_update(self) -> bool:
        return self.deferred is not None

    def expected(self) -> Decision | None:
        """Return, during backward, the decision that the current step will carry out."""
        if self.deferred is None:
            return None
        return replace(self.deferred, source=delayed_gradient)

    def due(self, made: Decision | None) -> Decision | None:
        return self.deferred if self.is_on else made

    def keep(self, made: Decision | None) -> None:
        """Store this step's decision and gradients for the next step."""
        if not self.is_on:
            return
        for group in self.groups:
            delayed_gradient(group).swap(keep=made is not None)
        self.deferred = made

    def discard(self) -> None:
        self.deferred = None
        for group in self.groups:
            delayed_gradient(group).discard()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the deferred decision as plain values.

        `checkpoint/state.py` saves its gradient.
        """
        if self.deferred is None:
            return None
        return {
            "factor": self.deferred.factor,
            "number": self.deferred.number,
            "hypers": self.deferred.hypers,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a saved decision. Its gradient must be loaded before.

        Args:
            state: The saved decision; None if there is none.
        """
        self.deferred = None
        if state is not None:
            self.deferred = Decision(state["factor"], state["number"], state["hypers"])
        for group in self.groups:
            delayed_gradient(group).restore(is_full=self.deferred is not None)
