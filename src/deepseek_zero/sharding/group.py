"""The parameters of one unit that share a row of the plan, and the buffers of their states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..planner.layout import FlatLayout
from ..planner.spec import S, ShardPlan
from ..planner.units import GroupPlan
from .buffer import FlatBuffer, StateGuard
from .comm_context import CommContext
from .main_weight import MasterWeight
from .param_info import ParamInfo


class Group:
    """Parameters of one unit that share flat buffers and the specs of their states.

    The objects that gather the weight and reduce the gradient use only this base of `ParamGroup`.

    Attributes:
        members: The parameters, in the order of the layout.
        planned: The plan of the group: its layout, and the placement, dtype and memory of its
            states.
        comm_ctx: The communicator of the shard group, with buffer pool and settings.
        index: The index of each parameter, keyed by the `id()` of the parameter.
        weight: This rank's part of the weight.
        master: The main weight; None if no parameter is trained.
        guard: Callbacks before each access to the weight, main weight, moments and a kept gradient.
        not_updated: The indices of parameters that no optimizer updates; the gradient norm ignores
            them.
    """

    def __init__(
        self, members: Sequence[ParamInfo], planned: GroupPlan, comm_ctx: CommContext
    ) -> None:
        self.members = list(members)
        self.planned = planned
        self.comm_ctx = comm_ctx
        self.index = {id(member.param): number for number, member in enumerate(self.members)}
        self.weight: FlatBuffer
        self.master: MasterWeight | None = None
        self.guard = StateGuard()
        self.not_updated: frozenset[int] = frozenset()

    @property
    def plan(self) -> ShardPlan:
        """The placement, dtype and memory of weight, gradient, main weight and moments."""
        return self.planned.plan

    @property
    def layout(self) -> FlatLayout:
        """The positions of the group's parameters in the flat buffers."""
        return self.planned.layout

    @property
    def is_sharded(self) -> bool:
        """Return whether the weight must be gathered before use."""
        return self.plan.weight.placement is S

    @property
    def trainable(self) -> bool:
        """Return whether the plan has a gradient for the group."""
        return self.plan.grad is not None

    @property
    def own_weight(self) -> Tensor:
        """Return this rank's slice of the weight, flat."""
        return self.weight.slice_of(self.comm_ctx.comm.rank)

    def refuse_offloaded_weight(self) -> None:
        """Raise `UsageError` if `engine.offload_states` has moved the weight away."""
        if self.weight.guard.is_offloaded:
            self.weight.guard.before_read()
