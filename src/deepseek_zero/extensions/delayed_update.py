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
from typing import Any, ClassVar

from torch import Tensor

from ..optim.update_policy import Stepping, UpdatePolicy
from ..optim.updater import Decision, Updater
from ..planner.extras import late_gradient_of
from ..planner.layout import Slot
from ..planner.spec import S
from ..sharding.buffer import FlatBuffer
from ..sharding.gradient import Gradient, staged_gradient
from ..sharding.param_group import ParamGroup
from ..tiers.tier import StagedTile
from .speculative_update import refuse_joining_beside_log

_TILE_NUMEL = 1 << 20  # elements that change places at once where buffers cannot


class DelayedGradient:
    """The gradient of the step before of one group.

    Attributes:
        gradient: The gradient of the step under way.
        buffer: This rank's slice of it, allocated on first use.
        absent: The indices of members without a gradient.
    """

    name: ClassVar[str] = "delayed"
    saved_as: ClassVar[str] = "owed"

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.buffer: FlatBuffer | None = None
        self.absent: set[int] | None = None
        self._is_full = False
        self._staged: StagedTile | None = None

    @property
    def is_full(self) -> bool:
        """Return whether `buffer` has a gradient."""
        return self._is_full

    def swap(self, *, keep: bool) -> None:
        """Exchange the delayed and the reduced gradient; `keep`: False drops the reduced one."""
        gradient = self.gradient
        comes = self._is_full
        if not (keep or comes):
            return
        gradient.group.guard.before_write()
        theirs = gradient.ensure_buffer()
        mine = self._ensure_buffer()
        is_cut = theirs.spec.placement is S
        if is_cut:
            self.buffer = theirs
        else:
            _change_places(theirs.shard(gradient.group.comm_ctx.comm.rank), mine.load())
        absent = self.absent
        self.absent = gradient.absent
        gradient.replace_sum(mine if is_cut else None, absent, is_full=comes)
        self._is_full = keep
        if not keep:
            self.discard()

    def read(self, low: int, high: int) -> Tensor | None:
        """Return elements [low, high) of it, to be read only; None if there is none."""
        if not self._is_full or self.buffer is None:
            return None
        came = self._staged.view(low, high) if self._staged is not None else None
        return self.buffer.read(low, high) if came is None else came

    def staged_tile(self) -> StagedTile | None:
        """Return what brings it from the training device to the host that updates; None if nothing
        must.
        """
        self._staged = staged_gradient(self.gradient.group, self.buffer, self._staged)
        return self._staged

    def owned(self, slot: Slot) -> Tensor:
        """Return this rank's part of a member's gradient: a flat view, which a checkpoint fills."""
        self.gradient.group.guard.before_write()
        return self._ensure_buffer().owned_view(slot, self.gradient.group.comm_ctx.comm.rank)

    def restore(self, *, is_full: bool) -> None:
        """Take from a checkpoint whether there is one, after its values."""
        self._is_full = is_full

    def discard(self) -> None:
        """Drop it: no update will use it."""
        self.gradient.group.guard.before_write()
        self._is_full = False
        self.absent = None
        if self.buffer is not None:
            self.buffer.storage.discard(0, self.buffer.memory.numel())

    def _ensure_buffer(self) -> FlatBuffer:
        if self.buffer is None:
            spec = late_gradient_of(self.gradient.group.plan)
            assert spec is not None
            self.buffer = self.gradient.new_slice(spec)
        return self.buffer


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
