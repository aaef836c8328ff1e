"""How the slices of one group become the whole weight: an extension point of the core."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..comm.pending import Pending
from ..planner.spec import S
from .buffer import FlatBuffer, move
from .group import Group


class WeightGather:
    """Gathers a weight by one all-gather into a buffer of the pool: the default.

    Extensions derive from this class. All ranks use the same class for a group.
    """

    #: A gather fills a buffer that is lent; if not, the weight is used in the memory it lies in.
    makes_copies = True
    #: `refresh` needs the core, so that few refreshes run at the same time.
    computes = False

    def __init__(self, group: Group) -> None:
        self.group = group
        # Of the parameters, if the gathered weight is always in the same memory
        self.views: list[Tensor] = []

    def allocate(self, what: str) -> FlatBuffer:
        """Allocate this rank's part of the weight. Collective."""
        group = self.group
        spec = group.plan.weight
        if spec.placement is not S:
            return FlatBuffer.allocate_for_comm(group.layout, spec, group.comm_ctx, what)
        return FlatBuffer.allocate(group.layout, spec, group.comm_ctx, what)

    # -- sharded weights (stage 3)

    def lend(self) -> FlatBuffer:
        """Return the buffer that `gather` fills, until `give_back`."""
        group = self.group
        memory = group.comm_ctx.pool.take(group.layout.padded_numel, group.weight.spec.dtype)
        return group.weight.gathered_in(memory, group.plan.weight.wire)

    def give_back(self, whole: FlatBuffer) -> None:
        """End the use of the gathered weight; no view of it may be read afterwards."""
        self.group.comm_ctx.pool.give(whole.memory)

    def gather(self, whole: FlatBuffer, what: str) -> Pending:
        """Start to bring all slices to `whole`. Collective within the gather lane."""
        return move(self.group.weight, whole, self.group.comm_ctx, what)

    # -- weights that every rank has whole, and whose main weights are sharded (stages 1 and 2)

    def refresh(self, what: str, *, is_update: bool) -> Pending:
        """Start to bring the changed slices to every rank. Collective.

        Args:
            what: The name of the unit, for messages.
            is_update: A step has changed them; otherwise they were written.
        """
        group = self.group
        weight = group.weight
        own = FlatBuffer(group.layout, replace(weight.spec, placement=S), group.own_weight)
        return move(own, weight, group.comm_ctx, what)

    # -- what happens to a weight

    def before_write(self, what: str) -> None:
        """Wait until no other rank reads this rank's part of the weight. Collective."""

    def changed(self) -> None:
        """Make the next gather use the current weight. Local.

        Every rank must call it, between the same two gathers.
        """

    def buffers(self) -> list[FlatBuffer]:
        """Return the buffers that this object holds beside the weight."""
        return []
