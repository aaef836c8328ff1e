"""A unit: parameter groups that are gathered, released and reduced together.

The parameters of a transformer block are typically one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from torch import nn

from ..comm.pending import Pending
from ..planner.units import UnitPlan
from .param_group import ParamGroup
from .param_info import ParamInfo


class UnitState(Enum):
    """States of the weights of a unit: sharded, being gathered, or unsharded."""

    SHARDED = "at rest"  # parameters are `ShardedParameter`s
    UNSHARDING = "gathering"  # the buffer belongs to the transport
    UNSHARDED = "in use"  # parameters are views of the gathered buffer


MOVES = {
    (UnitState.SHARDED, UnitState.UNSHARDING),
    (UnitState.UNSHARDING, UnitState.UNSHARDED),
    (UnitState.UNSHARDED, UnitState.SHARDED),
}


class Unit:
    """Parameter groups that are gathered, released and reduced together.

    Attributes:
        name: The name of the module.
        module: The module whose forward needs the parameters.
        number: The index of the unit in the model; 0 for the root, which has the parameters that no
            other unit has.
        groups: All groups.
        sharded: The groups whose weight must be gathered.
        trained: The groups that have a gradient.
        group_of: The group of each trained parameter, by the parameter's id.
        arrived: The ids of parameters whose gradient arrived in the current backward.
        expected: The ids of parameters whose gradient is expected in a backward.
        reduced_in_backward: Whether the current backward has started the unit's reduction.
        is_pinned: Whether the unit stays unsharded until the step, for a pipeline.
        is_promoted: Whether the unit computes in fp32 although the run uses 16 bits.
        is_layer_tile: Whether the unit is a part of a large layer, which is cut to save memory.
        externals: Other units whose parameters the forward of the unit reads (external_params.py).
        watch: Called with the unit after its weights were gathered; may be None.
    """

    def __init__(
        self, planned: UnitPlan, module: nn.Module, groups: Sequence[ParamGroup], number: int
    ) -> None:
        self._planned = planned
        self.name = planned.name
        self.module = module
        self.number = number
        self._state = UnitState.SHARDED
        self._gathers: list[Pending] = []
        self._reduces: list[Pending] = []
        self.arrived: set[int] = set()
        self.set_groups(groups)
        self.reduced_in_backward = False
        self.is_pinned = False
        self.is_promoted = False
        self.is_layer_tile = planned.is_layer_tile
        self.externals: list[Unit] = []
        self.watch: Callable[[Unit], None] | None = None

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replace the unit's parameter groups, after parameters moved between groups."""
        self.groups = list(groups)
        self.sharded = [group for group in self.groups if group.is_sharded]
        self.trained = [group for group in self.groups if group.trainable]
        trained = [(member, group) for group in self.trained for member in group.members]
        self.group_of = {id(member.param): group for member, group in trained}
        self.expected: set[int] = {
            id(member.param) for member, _ in trained if not member.is_frozen
        }

    @property
    def has_frozen_shards(self) -> bool:
        """Whether a sharded group of the unit is frozen and therefore never reduced."""
        return any(group.is_idle or not group.trainable for group in self.sharded)

    @property
    def waits_for_states(self) -> bool:
        """Whether a pending update of a sharded weight needs offloaded states."""
        return any(
            group.guard.pending is not None and group.plan.is_offloaded for group in self.sharded
        )

    @property
    def state(self) -> UnitState:
        """Whether the weights are sharded, unsharded or being gathered."""
        return self._state

    def _enter(self, state: UnitState) -> None:
        if (self._state, state) not in MOVES:
            raise AssertionError(
                f"unit '{self.name}' cannot go from {self._state.value} to {state.value}"
            )
        self._state = state

    @property
    def planned(self) -> UnitPlan:
        """The current plan of the unit."""
        return replace(self._planned, groups=tuple(group.planned for group in self.groups))

    @property
    def is_copied(self) -> bool:
        """Whether a gather makes copies that a release frees."""
        return any(group.weight_gather.makes_copies for group in self.sharded)

    @property
    def is_gathered_from_ranks(self) -> bool:
        """Whether the unit has sharded weights outside of `GatheredParameters` blocks."""
        return any(not group.is_in_block for group in self.sharded)

    @property
    def numel(self) -> int:
        """The number of elements of all groups with padding."""
        return sum(group.layout.padded_numel for group in self.groups)

    def members(self) -> list[ParamInfo]:
        """Return the parameters of all groups."""
        return [member for group in self.groups for member in group.members]

    # -- weights

    def unshard(self) -> None:
        """Start the all-gathers of the groups unless they are in flight or done. Collective."""
        if self._state is UnitState.SHARDED and self.sharded:
            for group in self.sharded:
                group.refuse_offloaded_weight()
            self._enter(UnitState.UNSHARDING)
            self._gathers = [group.gather(self.name) for group in self.sharded]

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers, and make the parameters views of the weights."""
        if self._state is UnitState.UNSHARDING:
            for pending in self._gathers:
                pending.wait()
            self._gathers = []
            self._enter(UnitState.UNSHARDED)
            for group in self.sharded:
                group.point_to_unsharded()
            if self.watch is not None:
                self.watch(self)

    def reshard(self) -> None:
        """Shard the parameters again, and free the gathered weights.

        A gather in flight is awaited first, because the transport still writes to the buffer.
        """
        self.wait_for_unshard()
        if self._state is UnitState.UNSHARDED and not self.is_pinned:
            self._enter(UnitState.SHARDED)
            for group in self.sharded:
                group.reshard()

    def unpin(self) -> None:
        """Release a pinned unit before a step, because its weights are those before the step."""
        self.is_pinned = False
        self.reshard()

    # -- gradients

    @property
    def is_complete(self) -> bool:
        """Whether every gradient that this backward expects has arrived."""
        return bool(self.trained) and self.expected <= self.arrived

    def start_reduces(self, start: Callable[[ParamGroup], Pending]) -> None:
        """Start a reduction (`start`) of each trained group. Collective."""
        self._reduces += [start(group) for group in self.trained if not group.is_idle]

    def issue_reduces(self) -> None:
        """Send the messages of reductions that have not been sent yet. Collective."""
        for pending in self._reduces:
            pending.issue_all()

    def wait_for_reduce(self) -> None:
        """Wait for the reductions in flight."""
        for pending in self._reduces:
            pending.wait()
        self._reduces = []
