"""Two-hop collectives, in which every byte crosses the link between hosts once.

Ranks that share slices are assigned to hosts in blocks of equal length: the rank at `place` on
`host` is number `host * intra_node.size + place`. A sum is formed within each host in rank order in
fp32, then over the hosts in their order. This order differs from the plain rank order, so the bits
differ, and the order is part of the plan (`PlanSettings.ranks_per_host`) whatever the real hosts
are. A slice is fetched from another host by the rank at its owner's place, and the other ranks of
the host get it from there.

The second hop of a collective may be issued when this rank's first hop is complete. Each group has
its own queue of hops per lane, in the order of the collectives. This order is the same on all
ranks, however long a first hop takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .collectives import Comm
from .context import Partition
from .pending import DONE, OrderedIssueQueue, Pending, all_of

NEAR = "near_"  # Prefix of the meter's kind for traffic within a host


@dataclass(eq=False)
class ByHost:
    """The two groups of ranks that this rank's two-hop collectives use.

    Attributes:
        intra_node: The ranks on this rank's host.
        inter_node: The ranks with this rank's index on their hosts.
    """

    intra_node: Comm
    inter_node: Comm
    # By group and lane
    _queues: dict[tuple[str, str], OrderedIssueQueue] = field(default_factory=dict)

    @classmethod
    def over(cls, comm: Comm, intra_node: Partition, inter_node: Partition) -> ByHost:
        """Create the group of this host and the group between hosts.

        Args:
            comm: The communicator of the world.
            intra_node: World ranks of each host.
            inter_node: World ranks with the same index on their hosts.

        Returns:
            The pair of groups that contain this rank.

        Note:
            Collective: every rank of the world must call it.
        """
        found = cls(comm.split(intra_node, "near"), comm.split(inter_node, "across"))
        comm.waits.add_hops(found)
        return found

    @property
    def is_open(self) -> bool:
        """Return whether the second hop of a collective is still to be issued."""
        return any(queue.is_open for queue in self._queues.values())

    def advance(self) -> None:
        """Issue the second hop of each collective whose first hop is complete, without waiting."""
        if self.is_open:
            self.intra_node.hear()
            for queue in list(self._queues.values()):
                queue.advance()

    def all_gather(self, full: Tensor, lane: str, what: str, kind: str) -> Pending:
        """Fill `full` with the slices of all ranks in two hops: between hosts, then within each.

        Args:
            full: Shape ``(size * slice,)``; this rank's slice must be in place.
            lane: Name of the sequence of collectives (lane) to issue the hops in.
            what: The name of the collective.
            kind: The meter's kind for bytes between hosts. Bytes within a host count as `NEAR` +
                `kind`.

        Returns:
            A handle; `full` may be read after its `wait()`.

        Note:
            Collective: all ranks of both groups must issue it in the same order within the lane.
        """
        places = self.intra_node.size
        hosts = self.inter_node.size
        slices = full.chunk(places * hosts)
        mine = [slices[host * places + self.intra_node.rank] for host in range(hosts)]

        def fetch() -> Pending:
            return self.inter_node.exchange(
                [mine[self.inter_node.rank]] * hosts, mine, lane, what, kind=kind
            )

        def spread() -> Pending:
            kinds = NEAR + kind
            return all_of(
                [
                    self.intra_node.all_gather(each, lane, what, kind=kinds)
                    for each in full.chunk(hosts)
                ]
            )

        fetched = self._queue("across", lane).add(DONE, fetch)
        return self._queue("near", lane).add(fetched, spread)

    def in_two_hops(
        self,
        intra_node: Callable[[], Sequence[Pending]],
        inter_node: Callable[[], Pending],
        lane: str,
    ) -> Pending:
        """Issue a reduction in two hops.

        Args:
            intra_node: Issues the first hop, among the ranks of this host.
            inter_node: Issues the second hop, after the first one is complete.
            lane: Name of the sequence of collectives (lane) to issue the hops in.

        Returns:
            A handle whose `wait()` returns after both hops.

        Note:
            Collective: all ranks of both groups must issue it in the same order within the lane.
        """
        inside = self._queue("near", lane).add(DONE, lambda: all_of(intra_node()))
        return self._queue("across", lane).add(inside, inter_node)

    def _queue(self, group: str, lane: str) -> OrderedIssueQueue:
        return self._queues.setdefault((group, lane), OrderedIssueQueue())
