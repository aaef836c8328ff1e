"""Two-hop collectives, in which every byte crosses the link between hosts once.

Gradients are summed within each host first, then over the hosts. One rank of each host gathers a
slice and passes it to the other ranks of the host. `comm/by_host.py` has the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..comm.by_host import NEAR, ByHost
from ..comm.pending import Pending
from ..comm.transports.base import Use
from ..planner.by_host import hop_buffer_sizes
from ..precision.codecs import Blocks
from ..sharding.comm_context import CommContext, MessageBuffers, Route, boxes_in


class TwoHopBuffers(MessageBuffers):
    """Buffers for a reduction that sums gradients within each host, then between hosts."""

    @property
    def hosts(self) -> ByHost:
        """The communicators within this host and across hosts."""
        route = self.comm_ctx.route
        assert isinstance(route, TwoHops)
        return route.hosts

    def sizes(self, numel: int) -> Sequence[tuple[torch.dtype, int]]:
        return hop_buffer_sizes(
            numel,
            (self.message.wire, self.arriving.wire),
            self.comm_ctx.comm.size,
            self.hosts.intra_node.size,
            near_in_place=self.hosts.intra_node.reads_in_place,
            far_in_place=self.hosts.inter_node.reads_in_place,
        )

    def exchange(
        self, pieces: Sequence[Tensor], low: int, high: int, what: str, add_up: Use
    ) -> Pending:
        """Start to sum gradients within each host, then over the hosts.

        Args:
            pieces: This rank's contribution to the sum of each rank, in rank order.
            low: The first element of each rank's slice to which the pieces belong.
            high: The end of that range.
            what: The name of the unit, used in error messages.
            add_up: Called with the sums of all hosts for this rank, in the order of hosts. It adds
                them.

        Returns:
            A handle. `add_up` has run, and the buffers are free, after its `wait()` has returned.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        near = self.hosts.intra_node
        across = self.hosts.inter_node
        length = pieces[0].numel()
        numel = high - low
        sums, *inboxes = self.lent
        wire = self.arriving.wire
        sent = inboxes.pop(0) if isinstance(wire, Blocks) else sums
        near_inbox = None if near.reads_in_place else inboxes.pop(0)
        near_boxes = [boxes_in(None, near, length)] * across.size
        if near_inbox is not None:
            numel_of_host = (near.size - 1) * length
            inboxes_of_hosts = torch.split(near_inbox[: across.size * numel_of_host], numel_of_host)
            near_boxes = [boxes_in(each, near, length) for each in inboxes_of_hosts]
        far_length = wire.length(numel)
        far_inbox = inboxes[0] if inboxes else None
        far_boxes = boxes_in(far_inbox, across, far_length)
        # Ranks that read in place may still read the previous range
        across.wait_until_read(sent)
        of_hosts = torch.split(sums[: across.size * numel], numel)
        outgoing = torch.split(sent[: across.size * far_length], far_length)

        def inside() -> list[Pending]:
            found = []
            for host, (own, boxes) in enumerate(zip(of_hosts, near_boxes, strict=True)):
                here = pieces[host * near.size : (host + 1) * near.size]
                use = partial(self.message.sum, into=own, divisor=1.0, add=False)
                found.append(
                    near.exchange(here, boxes, "reduce", what, use, NEAR + "reduce_scatter")
                )
            return found

        def between() -> Pending:
            if sent is not sums:
                for host, (own, piece) in enumerate(zip(of_hosts, outgoing, strict=True)):
                    self.arriving.write(own, piece, host * self.slice_numel + low)
            return across.exchange(outgoing, far_boxes, "reduce", what, add_up)

        return self.hosts.in_two_hops(inside, between, "reduce")


class TwoHops(Route):
    """Runs reductions and all-gathers in two hops: within and between hosts.

    A reduction sums gradients within each host before it sums them over the hosts. An all-gather
    runs the two hops in the opposite order. Between hosts, only ranks with the same local rank
    exchange messages. A host therefore sends each slice, or its sum for each slice, to another host
    only once.

    Args:
        hosts: The communicators of this rank: within its host, and across hosts.

    Attributes:
        hosts: The communicators of this rank: within its host, and across hosts.
        near: The number of ranks per host.
    """

    buffers = TwoHopBuffers

    def __init__(self, hosts: ByHost) -> None:
        self.hosts = hosts
        self.near = hosts.intra_node.size

    def all_gather(self, full: Tensor, lane: str, comm_ctx: CommContext, what: str) -> Pending:
        """Start to all-gather slices, first between hosts and then within each host.

        Args:
            full: The output, flat, with one slice per rank of the shard group in rank order. It
                must already contain this rank's slice at its position.
            lane: The name of the ordered sequence of collectives to which this all-gather belongs.
            comm_ctx: The `CommContext` of the shard group.
            what: The name of the unit, used in error messages.

        Returns:
            A handle. `full` may be read after its `wait()` has returned. `wait()` raises
            `PeerError` if another rank failed.

        Note:
            Collective: every rank of the shard group must call it in the same order.
        """
        return self.hosts.all_gather(full, lane, what, comm_ctx.gather_kind)
