"""Weights in memory that all ranks of a host map, so that a gather copies nothing."""

from __future__ import annotations

from ..comm.pending import Pending
from ..comm.transports.base import SymmetricMemory
from ..sharding.buffer import FlatBuffer
from ..sharding.group import Group
from ..sharding.weight_gather import WeightGather


class SharedWeight(WeightGather):
    """A weight gather that uses the weight in the shared memory of the host.

    Attributes:
        memory: This rank's slice, and the view of all slices.
    """

    makes_copies = False

    def __init__(self, group: Group, memory: SymmetricMemory) -> None:
        super().__init__(group)
        self.memory = memory

    def allocate(self, what: str) -> FlatBuffer:
        group = self.group
        weight = FlatBuffer(group.layout, group.plan.weight, self.memory.own)
        return weight.counted(group.comm_ctx, what)

    def lend(self) -> FlatBuffer:
        return self.group.weight.gathered_in(self.memory.whole)

    def give_back(self, whole: FlatBuffer) -> None:
        self.memory.release()

    def gather(self, whole: FlatBuffer, what: str) -> Pending:
        """Start to wait until the slices of all ranks can be read in place."""
        return self.group.comm_ctx.comm.in_place.gather(self.memory, what)

    def before_write(self, what: str) -> None:
        self.group.comm_ctx.comm.barrier(f"writing {what}")
