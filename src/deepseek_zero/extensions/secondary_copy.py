"""A second copy of sharded weights on the ranks of one host (hpZ of ZeRO++).

The first gather after a change of the weights uses all ranks of the shard group, and each rank
keeps its slice of the second copy. Later gathers read the second copy. Results do not change,
because the copy has the bits that were gathered. Checkpoints do not contain it.
"""

from __future__ import annotations

from ..comm.pending import Pending
from ..planner.extras import second_copy_of
from ..sharding.buffer import FlatBuffer
from ..sharding.comm_context import CommContext
from ..sharding.group import Group
from ..sharding.move import move
from ..sharding.weight_gather import WeightGather


class SecondaryCopy(WeightGather):
    """All-gathers a weight from a second copy over fewer ranks (hpZ of ZeRO++).

    The second copy is sharded over fewer ranks than the weight, usually those of one host. The
    first gather, and the first one after each change of the weight, uses all ranks of the shard
    group and fills the second copy. Other gathers read the second copy.

    Attributes:
        comm_ctx: The context of the ranks over which the second copy is sharded, usually one host.
        first: The object that gathers the weight from all ranks of the shard group.
        buffer: This rank's slice of the second copy.
        is_current: Whether the second copy equals the weight. The flag has the same value on all
            ranks.
    """

    def __init__(self, group: Group, inner: CommContext, first: WeightGather) -> None:
        """Store the arguments. `allocate` allocates the second copy.

        Args:
            group: The parameter group whose weight is gathered.
            inner: The context of the ranks over which the copy is sharded.
            first: Gathers the weight from all ranks; used after the weight has changed.
        """
        super().__init__(group)
        self.comm_ctx = inner
        self.first = first
        self.buffer: FlatBuffer
        self.is_current = False

    def allocate(self, what: str) -> FlatBuffer:
        group = self.group
        weight = self.first.allocate(what)
        spec = second_copy_of(group.plan)
        assert spec is not None
        self.buffer = FlatBuffer.allocate(
            group.planned.secondary_layout,
            spec,
            group.comm_ctx,
            f"the second copy (zero_hpz_partition_size) of {what}",
        )
        return weight

    def gather(self, whole: FlatBuffer, what: str) -> Pending:
        """Start to gather the weight from the second copy.

        If the weight has changed since the last gather, or was not gathered before, it is gathered
        from all ranks of the shard group instead. The second copy is then filled with the result.

        Args:
            whole: The output, which receives all elements of the weight.
            what: The name of the unit, used in error messages.

        Returns:
            A handle. `whole` may be read after its `wait()` has returned. `wait()` raises
            `PeerError` if another rank failed.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        target = FlatBuffer(self.buffer.layout, self.buffer.spec.gathered(), whole.memory)
        if self.is_current:
            return move(self.buffer, target, self.comm_ctx, what)
        # Set early for later gathers, which start only after this one has ended
        self.is_current = True
        return self.first.gather(whole, what).then(lambda: self._keep(target))

    def _keep(self, whole: FlatBuffer) -> None:
        self.buffer.memory.copy_(whole.slice_of(self.comm_ctx.comm.rank))

    def changed(self) -> None:
        self.is_current = False

    def buffers(self) -> list[FlatBuffer]:
        return [self.buffer]
