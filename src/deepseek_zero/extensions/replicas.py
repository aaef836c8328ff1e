"""Sums of gradients over replicas, which are ranks that hold the same slices.

HSDP and parameters that ranks of tensor parallelism share have replicas. Each replica sums its own
gradients in every backward. Once per step, the sums of the replicas are added up, slice by slice.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..base.quantities import rounded_up
from ..comm.collectives import scatter
from ..comm.pending import DONE, Pending
from ..planner.layout import FlatLayout
from ..planner.spec import P, R, Spec
from ..sharding.buffer import FlatBuffer
from ..sharding.comm_context import CommContext
from ..sharding.grad_reduction import GradReduction
from ..sharding.grad_sum import GradState
from ..sharding.move import move
from ..sharding.param_group import ParamGroup


class SumOverReplicas(GradReduction):
    """A gradient reduction within each replica (as in HSDP), then over replicas.

    Every backward that reduces gradients sums them within the replica. The sums of the replicas are
    added up once per step.

    Args:
        group: The parameter group whose gradients are reduced. Its context must have an outer one.

    Attributes:
        outer: The context of the ranks that hold the same slices, one in each replica.
    """

    sums_all = False
    group: ParamGroup

    def __init__(self, group: ParamGroup) -> None:
        super().__init__(group)
        assert group.comm_ctx.outer is not None
        self.outer = group.comm_ctx.outer

    def complete(self, what: str) -> Pending:
        """Start to add up the sums of all replicas, in place.

        At stage 0, the results of all ranks of the replica are then all-gathered. The call has no
        effect if no gradient was reduced since the last step, or if the sum is complete already.

        Args:
            what: The name of the unit, used in error messages.

        Returns:
            A handle. The result may be read after its `wait()` has returned. `wait()` raises
            `PeerError` if another rank failed.

        Note:
            Collective: every rank that holds the same slices must call it. At stage 0, every rank
            of the replica must call it too.
        """
        total = self.group.gradient.sum
        if total.state is not GradState.INCOMPLETE:
            return DONE
        total.known_squares = None
        pending = self._add_replicas(total.ensure(), what)
        return self.group.gradient.track(pending, GradState.REDUCED)

    def _add_replicas(self, buffer: FlatBuffer, what: str) -> Pending:
        comm_ctx = self.group.comm_ctx
        outer = replace(self.outer, bucket_numel=comm_ctx.bucket_numel)
        pending = all_reduce(buffer.slice_of(comm_ctx.comm.rank), outer, what)
        if not self.group.plan.sums_to_all or comm_ctx.comm.size == 1:
            return pending
        route = comm_ctx.route
        return pending.then(
            lambda: route.all_gather(buffer.memory, "reduce", comm_ctx, what).wait()
        )

    def copy_from_first(self, values: Tensor, what: str) -> None:
        """Copy `values` from the first replica to all other replicas.

        Args:
            values: The elements to copy, flat, with the same length on every rank. They are
                overwritten on all replicas except the first.
            what: The name of the values, used in error messages.

        Raises:
            PeerError: Another rank failed.

        Note:
            Collective: every rank that holds the same slices must call it.
        """
        comm = self.outer.comm
        scatter(comm, [values] * comm.size, values, what)


def all_reduce(values: Tensor, comm_ctx: CommContext, what: str) -> Pending:
    """Replace flat values by their sum over the ranks.

    The sum is formed in fp32 in rank order and rounded once.

    Args:
        values: One-dimensional, of one length on every rank, on any device. It may be neither read
            nor written before `wait()`.
        comm_ctx: The context of the ranks whose values are summed.
        what: The name of the values, used in error messages.

    Returns:
        A handle; its `wait()` returns after the sum is complete.

    Note:
        Collective: every rank must call it.
    """
    comm = comm_ctx.comm
    pool = comm_ctx.pool
    if comm.size == 1 or not values.numel():
        return DONE
    numel = rounded_up(values.numel(), comm.size)
    lent = None
    if numel != values.numel() or values.device != pool.device:
        lent = pool.take(numel, values.dtype)
        lent[: values.numel()].copy_(values)
        lent[values.numel() :].zero_()
    layout = FlatLayout((), numel // comm.size, comm.size)
    travels = values if lent is None else lent
    partial = FlatBuffer(layout, Spec(P, values.dtype), travels)
    pending = move(partial, FlatBuffer(layout, Spec(R, values.dtype), travels), comm_ctx, what)

    def put_back() -> None:
        if lent is not None:
            values.copy_(lent[: values.numel()])
            pool.give(lent)

    return pending.then(put_back)
