"""Delayed updates (ZeRO-Offload): from step K on, each gradient is applied one step late, so that
an update can run while the next step computes.

With w(t) the weights that step t computes with, g(t) its gradient and d(t) its decision (norm,
clipping, loss scale, hyper-parameters), from step K on

    w(t + 1) = update(w(t), d(t - 1), g(t - 1))        and        w(K + 1) = w(K)

A step whose own gradient overflows carries out the kept decision and keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.updater import Decision, Updater
from ..planner.extras import late_gradient_of
from ..planner.spec import S, Spec
from ..sharding.grad_sum import GradState, GradSum
from ..sharding.gradient import Gradient
from ..sharding.param_group import ParamGroup
from .speculative_update import refuse_joining_beside_log

_TILE_NUMEL = 1 << 20  # elements that change places at once where buffers cannot


class DelayedGradient(GradSum):
    """The gradient of the step before of one group: this rank's slice, until its update is over.

    Attributes:
        gradient: The gradient of the step under way.
    """

    name = "delayed"
    saved_as = "owed"

    def __init__(self, gradient: Gradient) -> None:
        super().__init__(gradient.group)
        self.gradient = gradient
        self.guard = gradient.sum.guard  # the two exchange their memories

    @property
    def spec(self) -> Spec:
        spec = late_gradient_of(self.group.plan)
        assert spec is not None
        return spec

    def swap(self, *, keep: bool) -> None:
        """Exchange the delayed and the reduced gradient; `keep`: False drops the reduced one."""
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
            _change_places(theirs.shard(self.group.comm_ctx.comm.rank), mine.load())
        absent = self.absent
        self.absent = other.absent
        other.absent = absent
        other.known_squares = None
        other.become(GradState.REDUCED if comes else GradState.EMPTY)
        self.restore(is_full=keep)
        if not keep:
            self.discard()

    def restore(self, *, is_full: bool) -> None:
        """Note whether `buffer` has a gradient, which a checkpoint may have filled."""
        self.become(GradState.HELD if is_full else GradState.EMPTY)

    def discard(self) -> None:
        """Drop it: no update will use it."""
        self.group.guard.before_write()
        self.restore(is_full=False)
        self.absent = None
        if self.buffer is not None:
            self.buffer.storage.discard(0, self.buffer.memory.numel())


def _change_places(left: Tensor, right: Tensor) -> None:
    for mine, yours in zip(left.split(_TILE_NUMEL), right.split(_TILE_NUMEL), strict=True):
        held = mine.clone()
        mine.copy_(yours)
        yours.copy_(held)


def delayed_gradient(group: ParamGroup) -> DelayedGradient:
    """Return the gradient of the step before."""
    found = group.gradient.kept[DelayedGradient.name]
    assert isinstance(found, DelayedGradient)
    return found


class DelayedUpdate(UpdatePolicy):
    """Keeps the decision of each step for the next one.

    Attributes:
        groups: The trained groups.
        after: The updates that are in time, at the start of a run.
        deferred: The decision that is kept.
    """

    keeps_decisions = True
    checkpoint_key = "owed"

    def __init__(self, groups: Sequence[ParamGroup], after: int) -> None:
        self.groups = groups
        self.after = after
        self.deferred: Decision | None = None
        self._updater: Updater

    def attach(self, optimizer: Stepping) -> None:
        self._updater = optimizer.updater

    def refuse_joining(self, what: str, fix: str) -> None:
        refuse_joining_beside_log(what, fix)

    @property
    def is_on(self) -> bool:
        """Return whether the next step delays its own update."""
        return self.owes_update or self._updater.updates >= self.after

    @property
    def owes_update(self) -> bool:
        return self.deferred is not None

    def expected(self) -> Decision | None:
        """Return the decision that the step under way will carry out, during its backward."""
        if self.deferred is None:
            return None
        return replace(self.deferred, source=delayed_gradient)

    def due(self, made: Decision | None) -> Decision | None:
        return self.deferred if self.is_on else made

    def keep(self, made: Decision | None) -> None:
        """Exchange the gradients of this step and of the step before, with their decisions."""
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
        """Return the kept decision as plain values. checkpoint/state.py saves its gradient."""
        if self.deferred is None:
            return None
        return {
            "factor": self.deferred.factor,
            "number": self.deferred.number,
            "hypers": self.deferred.hypers,
        }

    def load_state_dict(self, state: dict[str, Any] | None, *, has_moments: bool) -> None:
        """Restore a saved decision. The gradient has been loaded already."""
        if not has_moments:
            return
        self.deferred = None
        if state is not None:
            self.deferred = Decision(state["factor"], state["number"], state["hypers"])
        for group in self.groups:
            delayed_gradient(group).restore(is_full=self.deferred is not None)
