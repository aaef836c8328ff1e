"""The communicator, memory and settings with which flat buffers are moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import OrderedIssueQueue, Pending
from ..comm.transports.base import Use
from ..planner.messages import inbox_sizes
from ..tiers.tier import CopyEngine, Tiers
from .message import Message
from .pool import Pool


@dataclass(frozen=True)
class CommContext:
    """The communicator, buffer pool and settings of the collectives on flat buffers.

    Attributes:
        comm: The communicator of the shard group: the ranks over which states are sharded.
        pool: The pool of scratch buffers.
        bucket_numel: The largest message, in elements.
        divisor: The number by which sums are divided.
        tiers: The memories for offloaded states.
        issue_queue: Issues gathers of slices on the host or a disk, in the order of the schedule.
        copy_engine: Copies between `tiers` and the device, on streams of its own.
        outer: The context of other ranks that hold the same slices, over which sums are added up
            as well; None if there are none.
        route: How collectives send their messages: directly between ranks, or within hosts first.
        gather_kind: The name under which the bytes of gathers are reported.
    """

    comm: Comm
    pool: Pool
    bucket_numel: int = 1 << 62
    divisor: float = 1.0
    tiers: Tiers = field(default_factory=Tiers)
    issue_queue: OrderedIssueQueue = field(default_factory=OrderedIssueQueue)
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    outer: CommContext | None = None
    route: Route = field(default_factory=lambda: Route())
    gather_kind: str = "all_gather"

    @property
    def world(self) -> Comm:
        """The communicator of all ranks, which allocates buffers for communication."""
        return self.pool.comm


class MessageBuffers:
    """Pooled buffers that receive the gradients of other ranks, one part at a time, to sum them."""

    def __init__(
        self,
        comm_ctx: CommContext,
        message: Message,
        arriving: Message,
        numel: int,
        slice_numel: int,
    ) -> None:
        """Take the buffers from the pool.

        Args:
            comm_ctx: The communicator and the pool.
            message: The encoding of the gradients that a rank sends.
            arriving: The encoding of what a rank receives last: gradients, or sums of hosts.
            numel: The largest number of elements that a rank sends to another one.
            slice_numel: The number of elements of a slice.
        """
        self.comm_ctx = comm_ctx
        self.message = message
        self.arriving = arriving
        self.slice_numel = slice_numel
        self.lent = [comm_ctx.pool.take(length, dtype) for dtype, length in self.sizes(numel)]

    def sizes(self, numel: int) -> Sequence[tuple[torch.dtype, int]]:
        """Return the dtype and the number of elements of each buffer."""
        comm = self.comm_ctx.comm
        return inbox_sizes(numel, self.message.wire, comm.size, in_place=comm.reads_in_place)

    def exchange(
        self, pieces: Sequence[Tensor], low: int, high: int, what: str, add_up: Use
    ) -> Pending:
        """Send ``pieces[r]`` to rank r, and pass the pieces for this rank to `add_up`.

        The buffers are free for the next part after ``wait()`` returns.

        Args:
            pieces: One piece for each rank.
            low: The first element of each slice that its piece covers.
            high: The end of these elements.
            what: The name of the unit, used in error messages.
            add_up: Called with the received pieces, to sum them.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        comm = self.comm_ctx.comm
        inbox = self.lent[0] if self.lent else None
        boxes = boxes_in(inbox, comm, pieces[0].numel())
        return comm.exchange(pieces, boxes, "reduce", what, add_up)

    def give_back(self) -> None:
        """Return the buffers to the pool."""
        for tensor in self.lent:
            self.comm_ctx.pool.give(tensor)


class Route:
    """How collectives of the shard group send their messages: directly by default.

    Extensions derive from this class. All ranks use the same class.

    Attributes:
        near: The number of ranks of a host whose gradients are summed first, so that only the sums
            are sent to other hosts. With 1, every gradient is sent to the owner of its slice.
        buffers: The class of the buffers that receive a part of a gradient.
    """

    near = 1
    buffers: type[MessageBuffers] = MessageBuffers

    def all_gather(self, full: Tensor, lane: str, comm_ctx: CommContext, what: str) -> Pending:
        """All-gather the slices of all ranks into `full`.

        Args:
            full: The output, with this rank's slice in place; complete after `wait()`.
            lane: The name of the ordered sequence of collectives to which this one belongs.
            comm_ctx: The communicator of the shard group, with buffer pool and settings.
            what: The name of the unit, used in error messages.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        return comm_ctx.comm.all_gather(full, lane, what, comm_ctx.gather_kind)


def boxes_in(inbox: Tensor | None, comm: Comm, length: int) -> list[Tensor | None]:
    """Split a receive buffer into one part of `length` elements for each other rank.

    Returns:
        The part for each rank; None for this rank and for messages that are read in place.
    """
    if inbox is None or comm.size == 1:
        return [None] * comm.size
    boxes: list[Tensor | None] = [*torch.split(inbox[: (comm.size - 1) * length], length)]
    boxes.insert(comm.rank, None)
    return boxes
