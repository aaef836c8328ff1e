"""The second copy of one group's weights, cut among fewer ranks than the first (hpZ of ZeRO++).

The first gather behind a change of the weights goes over all ranks that share slices, and each rank
keeps its slice of the copy out of what it has gathered; later gathers stay among the few.  The copy
is made of gathered bits, so that nothing differs but the way they come; it is in no checkpoint.
"""

from __future__ import annotations

from ..comm.collectives import Pending
from ..planner.units import GroupPlan
from .buffer import CommContext, FlatBuffer, move


class SecondaryWeight:
    """The copy of one group.  buffer: this rank's slice of it.

    is_current: the next gather takes it; the same on every rank, since gathers and changes come in
    one order on all.
    """

    def __init__(self, planned: GroupPlan, comm_ctx: CommContext, what: str) -> None:
        assert planned.plan.secondary is not None and comm_ctx.inner is not None
        self.comm_ctx = comm_ctx.inner
        self.buffer = FlatBuffer.allocate(
            planned.secondary_layout, planned.plan.secondary, comm_ctx, what
        )
        self.is_current = False

    def gather(
        self, first: FlatBuffer, whole: FlatBuffer, comm_ctx: CommContext, what: str
    ) -> Pending:
        """Bring the weights to `whole`: out of the copy, or where it is none out of the `first`
        one, and make the copy.

        comm_ctx: of the ranks with the slices of the first.  Collective within the gather lane of
        those, or of the few.
        """
        target = FlatBuffer(self.buffer.layout, self.buffer.spec.gathered(), whole.memory)
        if self.is_current:
            return move(self.buffer, target, self.comm_ctx, what)
        self.is_current = (
            True  # for gathers behind this one, which come when it has been waited for
        )
        return move(first, whole, comm_ctx, what).then(lambda: self._keep(target))

    def _keep(self, whole: FlatBuffer) -> None:
        self.buffer.memory.copy_(whole.shard(self.comm_ctx.comm.rank))
