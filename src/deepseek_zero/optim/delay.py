"""Updates that come one step late (ZeRO-Offload's "delayed parameter update").

With w(t) the weights that step t computes with, g(t) its gradient and d(t) what step t decided about it (norm,
clipping, loss scale, hyper-parameters), from step K on

    w(t + 1) = update(w(t), d(t - 1), g(t - 1))        and        w(K + 1) = w(K)

so an update may run while the next step computes.  A step whose own gradient overflows carries out what is owed and
owes nothing.  Called by sharded.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..sharding.group import ParamGroup
from .update import Decision


class DelayedUpdate:
    """What one optimizer owes.  after: updates that come in time, at the start of a run."""

    def __init__(self, groups: Sequence[ParamGroup], after: int) -> None:
        self.groups, self.after = groups, after
        self.deferred: Decision | None = None

    def is_on(self, updates: int) -> bool:
        """Whether a step after so many updates leaves its own to the next."""
        return self.deferred is not None or updates >= self.after

    def swap(self, made: Decision | None) -> Decision | None:
        """Let a step owe its own update (None: it has none), and return what was owed."""
        for group in self.groups:
            group.gradient.delayed.swap(keep=made is not None)
        due, self.deferred = self.deferred, made
        return due

    def discard(self) -> None:
        """Owe nothing."""
        self.deferred = None
        for group in self.groups:
            group.gradient.delayed.discard()

    def state_dict(self) -> dict[str, Any] | None:
        """What is owed, as plain values; its gradient is saved by parameter (checkpoint/state.py)."""
        if self.deferred is None:
            return None
        return {"factor": self.deferred.factor, "number": self.deferred.number, "hypers": self.deferred.hypers}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """What `state_dict` returned; the gradient has been filled in."""
        self.deferred = Decision(state["factor"], state["number"], state["hypers"]) if state is not None else None
        for group in self.groups:
            group.gradient.delayed.is_full = self.deferred is not None
