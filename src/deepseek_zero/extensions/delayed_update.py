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

from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.updater import Decision, Summed, Updater
from ..sharding.param_group import ParamGroup
from .speculative_update import refuse_joining_beside_log


def delayed_gradient(group: ParamGroup) -> Summed:
    """Return the gradient of the step before."""
    return group.gradient.delayed


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
            group.gradient.delayed.swap(keep=made is not None)
        self.deferred = made

    def discard(self) -> None:
        self.deferred = None
        for group in self.groups:
            group.gradient.delayed.discard()

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
            group.gradient.delayed.restore(is_full=self.deferred is not None)
