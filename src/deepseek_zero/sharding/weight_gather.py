"""How slices become the whole weight of a group: an extension point of the core."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..comm.pending import Pending
from ..planner.spec import S
from .buffer import FlatBuffer
from .group import Group
from .move import move


class WeightGather:
    """All-gathers the sharded weight of one parameter group before its use.

    Extensions derive from this class. All ranks use the same class for a group.
    """

    #: A gather fills a lent buffer. If False, the weight is used in the memory that holds it.
    makes_copies = True
    #: `refresh` computes on the CPU, so only a few refreshes should run at the same time.
    computes = False

    def __init__(self, group: Group) -> None:
        self.group = group
        # The views of the parameters, if the gathered weight is always in the same memory.
        self.views: list[Tensor] = []

    def allocate(self, what: str) -> FlatBuffer:
        """Allocate this rank's part of the weight: a slice, or all elements if it is replicated.

        Args:
            what: The name of the weight, used in error messages.

        Note:
            Collective: every rank of the shard group must call it.
        """
        group = self.group
        spec = group.plan.weight
        if spec.placement is not S:
            return FlatBuffer.allocate_for_comm(group.layout, spec, group.comm_ctx, what)
        return FlatBuffer.allocate(group.layout, spec, group.comm_ctx, what)

    # -- sharded weights (stage 3)

    def lend(self) -> FlatBuffer:
        """Return the buffer that `gather` fills, which is in use until `give_back`."""
        group = self.group
        memory = group.comm_ctx.pool.take(group.layout.padded_numel, group.weight.spec.dtype)
        return group.weight.gathered_in(memory, group.plan.weight.wire)

    def give_back(self, whole: FlatBuffer) -> None:
        """Return the buffer from `lend` to the pool; no view of it may be read afterwards."""
        self.group.comm_ctx.pool.give(whole.memory)

    def gather(self, whole: FlatBuffer, what: str) -> Pending:
        """Start to all-gather the slices of all ranks into `whole`.

        Args:
            whole: The output, from `lend`, which may be read after `wait()`.
            what: The name of the unit, used in error messages.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        return move(self.group.weight, whole, self.group.comm_ctx, what)

    # -- replicated weights with sharded main weights (stages 1 and 2)

    def refresh(self, what: str, *, is_update: bool) -> Pending:
        """Start to all-gather the changed slices of a replicated weight.

        Args:
            what: The name of the unit, used in error messages.
            is_update: Whether an optimizer step has changed the slices; False if a program wrote
                them.

        Note:
            Collective: every rank of the shard group must call it.
        """
        group = self.group
        weight = group.weight
        own = FlatBuffer(group.layout, replace(weight.spec, placement=S), group.own_weight)
        return move(own, weight, group.comm_ctx, what)

    # -- writes

    def before_write(self, what: str) -> None:
        """Wait until no other rank reads this rank's part of the weight.

        Args:
            what: The name of the unit, used in error messages.

        Note:
            Collective: every rank of the shard group must call it.
        """

    def changed(self) -> None:
        """Record that the weight has changed, so that the next gather does not use an older copy.

        Note:
            Every rank must call it between the same two gathers; it does not communicate.
        """

    def buffers(self) -> list[FlatBuffer]:
        """Return the buffers that this object keeps in addition to the weight."""
        return []
