"""Sums of gradients over replicas, which are ranks that hold the same slices.

HSDP and parameters that ranks of tensor parallelism share have replicas. Each replica sums its own
gradients in every backward. Once per step, the sums of the replicas are added up, slice by slice.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..comm.collectives import scatter
from ..comm.pending import Pending
from ..sharding.buffer import FlatBuffer, all_gather, all_reduce, move
from ..sharding.grad_reduction import GradReduction, own_slice
from ..sharding.group import Group


class SumOverReplicas(GradReduction):
    """A reduction in two steps: within each replica, then over the replicas.

    Attributes:
        outer: The ranks that hold the same slices.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        assert group.comm_ctx.outer is not None
        self.outer = group.comm_ctx.outer

    @property
    def sums_all(self) -> bool:
        return False

    @property
    def is_local(self) -> bool:
        return False

    def reduce_in_place(self, partial: FlatBuffer, what: str, *, has_earlier_sum: bool) -> Pending:
        """Reduce this rank's slice; at stage 0, `complete` gathers the other slices."""
        comm_ctx = self.group.comm_ctx
        return move(partial, own_slice(partial, comm_ctx.comm.rank), comm_ctx, what)

    def complete(self, buffer: FlatBuffer, what: str) -> Pending:
        comm_ctx = self.group.comm_ctx
        outer = replace(self.outer, bucket_numel=comm_ctx.bucket_numel)
        pending = all_reduce(buffer.shard(comm_ctx.comm.rank), outer, what)
        if not self.group.plan.sums_to_all or comm_ctx.comm.size == 1:
            return pending
        return pending.then(lambda: all_gather(buffer.memory, "reduce", comm_ctx, what).wait())

    def copy_from_first(self, values: Tensor, what: str) -> None:
        comm = self.outer.comm
        scatter(comm, [values] * comm.size, values, what)
