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
from ..optim.inner_step import Decision
from ..optim.param_groups import Hypers
from ..optim.policy_state import Stepping
from ..optim.update_policy import UpdatePolicy
from ..planner.extras import late_gradient_of
from ..planner.spec import S, Spec
from ..sharding.grad_sum import GradState, GradSum
from ..sharding.gradient import Gradient
from ..sharding.param_group import ParamGroup
from .deferred_update import hypers_of

_TILE_NUMEL = 1 << 20  # Elements that are swapped at a time if the buffers cannot be exchanged


class DelayedGradient(GradSum):
    """Stores this rank's slice of a group's gradient from the previous step.

    Attributes:
        gradient: The gradient of the current step of the same parameter group.
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
        """Exchange the stored gradient of the previous step with the current gradient.

        After this, the current step applies the gradient of the previous one. If that gradient is
        not stored, the current step has no gradient to apply.

        Args:
            keep: Whether to keep the gradient of the current step, so that the next step applies
                it. If false, it is discarded, unless no previous gradient is stored. In that case
                the call has no effect.

        Raises:
            UsageError: `engine.offload_states` has moved a state of the parameter group.
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
            left = theirs.slice_of(self.group.comm_ctx.comm.rank).split(_TILE_NUMEL)
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
        """Record whether `buffer` holds the gradient of the previous step.

        The values in `buffer` are not changed. A checkpoint load calls the method after it has
        written them.

        Args:
            is_full: Whether the buffer holds the gradient of the previous step.
        """
        self.become(GradState.HELD if is_full else GradState.EMPTY)

    def discard(self) -> None:
        """Discard the gradient of the previous step, so that no update uses it.

        The buffer stays allocated, and its values become undefined.

        Raises:
            UsageError: `engine.offload_states` has moved a state of the parameter group.
        """
        self.group.guard.before_write()
        self.restore(is_full=False)
        self.absent = None
        if self.buffer is not None:
            self.buffer.storage.discard(0, self.buffer.memory.numel())


def refuse_joining_with_undo_log(what: str, fix: str) -> None:
    """Raise `UsageError` because no parameters can be added to an optimizer that undoes updates.

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
    """Return the buffer of a parameter group's gradient of the previous step.

    Args:
        group: A group of a model that was planned with delayed updates.
    """
    found = group.gradient.kept[DelayedGradient.name]
    assert isinstance(found, DelayedGradient)
    return found


@dataclass(eq=False)
class DelayedUpdate(UpdatePolicy):
    """An update policy that applies each gradient one step late.

    The first `after` updates of a run are not delayed. After them, a step stores its gradients, the
    factor by which they are multiplied (clipping and loss scale), and the hyper-parameters. The
    next step updates the weights with these stored values.

    Attributes:
        groups: The parameter groups that are trained.
        after: The number of updates at the start of a run that are not delayed.
        deferred: The factor and the hyper-parameters with which the next step applies the stored
            gradients; None if no gradients are stored.
    """

    checkpoint_key = "owed"
    needs_moments = True

    groups: Sequence[ParamGroup]
    after: int
    deferred: Decision | None = None
    _hypers: Hypers | None = None  # of this step, before its update

    def attach(self, optimizer: Stepping) -> None:
        self._updater = optimizer.updater

    def refuse_joining(self, what: str, fix: str) -> None:
        """Raise `UsageError`, because delayed updates do not support new parameters.

        Args:
            what: The event that adds parameters to the optimizer, for the error message.
            fix: The last sentence of the error message: what the user can do.

        Raises:
            UsageError: Always.
        """
        refuse_joining_with_undo_log(what, fix)

    @property
    def is_on(self) -> bool:
        """Whether steps now store their own gradients instead of applying them."""
        return self.owes_update or self._updater.updates >= self.after

    @property
    def owes_update(self) -> bool:
        return self.deferred is not None

    def expected(self) -> Decision | None:
        """Return how the current step applies the stored gradients of the previous step.

        Returns:
            A `Decision` with the factor and the hyper-parameters of the update, and with the
            function that returns the stored gradient of a parameter group. None if no gradients are
            stored.
        """
        if self.deferred is None:
            return None
        return replace(self.deferred, source=delayed_gradient)

    def due(self, made: Decision | None) -> Decision | None:
        if not self.is_on:
            return made
        self._hypers = hypers_of(self._updater.inner)
        return self.deferred

    def keep(self, made: Decision | None) -> None:
        """Exchange this step's gradients with the stored ones, and store the factor.

        This step then applies the gradients that were stored before. The next step applies those
        that are stored now, with the hyper-parameters that `due` copied in this step. The call has
        no effect during the first `after` updates of a run, which are not delayed.

        Args:
            made: The factor and the number of this step's update. None discards the gradients of
                this step, for example after an overflow.

        Raises:
            UsageError: `engine.offload_states` has moved a state of a parameter group.
        """
        if not self.is_on:
            return
        for group in self.groups:
            delayed_gradient(group).swap(keep=made is not None)
        self.deferred = None if made is None else replace(made, hypers=self._hypers)

    def discard(self) -> None:
        self.deferred = None
        for group in self.groups:
            delayed_gradient(group).discard()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the decision by which the stored gradients are applied.

        The gradients themselves are saved by `checkpoint/state.py`.

        Returns:
            A dict, or None if no gradients are stored. Its key "factor" is the factor of the
            gradients, "number" is the number of the update, and "hypers" is a list with the
            hyper-parameters of each parameter group. The list is not copied.
        """
        if self.deferred is None:
            return None
        return {
            "factor": self.deferred.factor,
            "number": self.deferred.number,
            "hypers": self.deferred.hypers,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the decision by which the stored gradients are applied.

        The call also marks the buffers of the stored gradients as full or empty. It does not load
        gradients, which must have been loaded before.

        Args:
            state: The result of `state_dict`; None if no gradients were stored.
        """
        self.deferred = None
        if state is not None:
            self.deferred = Decision(state["factor"], state["number"], state["hypers"])
        for group in self.groups:
            delayed_gradient(group).restore(is_full=self.deferred is not None)
