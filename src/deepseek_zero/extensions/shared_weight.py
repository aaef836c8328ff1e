"""Weights in memory that all ranks of a host map, so that a gather copies nothing."""

from __future__ import annotations

from ..comm.pending import Pending
from ..comm.transports.base import SymmetricMemory
from ..sharding.buffer import FlatBuffer
from ..sharding.group import Group
from ..sharding.weight_gather import WeightGather
from ..tiers.host import HostMemory
from ..tiers.tier import Tier


class SharedWeight(WeightGather):
    """Gathers a weight without copies, from memory that its ranks share.

    All these ranks are on one host.

    Args:
        group: The parameter group whose weight is in shared memory.
        memory: The shared memory, with this rank's slice and a view of all slices.

    Attributes:
        memory: The shared memory, with this rank's slice and a view of all slices.
    """

    makes_copies = False

    def __init__(self, group: Group, memory: SymmetricMemory) -> None:
        super().__init__(group)
        self.memory = memory

    def allocate(self, what: str) -> FlatBuffer:
        group = self.group
        spec = group.plan.weight
        own = self.memory.own
        if spec.tier is Tier.DEVICE:
            return FlatBuffer(group.layout, spec, own).counted(group.comm_ctx, what)
        host = group.comm_ctx.tiers.memories[Tier.HOST]
        assert isinstance(host, HostMemory)
        return FlatBuffer(group.layout, spec, own, host.add(own))

    def lend(self) -> FlatBuffer:
        return self.group.weight.gathered_in(self.memory.whole)

    def give_back(self, whole: FlatBuffer) -> None:
        self.memory.release()

    def gather(self, whole: FlatBuffer, what: str) -> Pending:
        """Return a handle that waits until every rank has written its slice.

        The call issues a barrier. It issues none with one rank, or if a barrier for several gathers
        was issued before (`InPlaceGathers.begin`).

        Args:
            whole: A view of all slices in the shared memory. Nothing is copied to it.
            what: The name of the unit, used in error messages.

        Returns:
            A handle. `whole` may be read after its `wait()` has returned. `wait()` raises
            `PeerError` if another rank failed.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        return self.group.comm_ctx.comm.in_place.gather(self.memory, what)

    def before_write(self, what: str) -> None:
        self.group.comm_ctx.comm.barrier(f"writing {what}")
