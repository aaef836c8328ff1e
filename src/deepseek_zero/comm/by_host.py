"""Movements among ranks of several hosts in two hops, so that a byte crosses the link between hosts
once.

Ranks that share slices are dealt to hosts in runs of one length: rank `host * intra_node.size +
place` of them.  A sum is formed within a host in the order of ranks, in fp32, then over the hosts
in their order: another order than that of the ranks, so other bits, and therefore part of the plan
(`PlanSettings.ranks_per_host`), whatever hosts there really are. A gathered slice is fetched by the
rank that has its owner's place, from whom the others of the host take it.

The second hop of a movement can be issued when this rank's part of the first is over.  Each group
has its own sequence of hops in each lane, in the order of the movements: the same on all ranks,
however long a first hop takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .collectives import Comm
from .context import Partition
from .pending import DONE, OrderedIssueQueue, Pending, all_of

NEAR = "near_"  # before the kind of what stays inside a host, for the meter


@dataclass(eq=False)
class ByHost:
    """The two groups of one rank.  intra_node: the ranks of its host.  inter_node: the ranks with
    its place on their hosts.
    """

    intra_node: Comm
    inter_node: Comm
    # By group and lane
    _queues: dict[tuple[str, str], OrderedIssueQueue] = field(default_factory=dict)

    @classmethod
    def over(cls, comm: Comm, intra_node: Partition, inter_node: Partition) -> ByHost:
        """Make the groups.  Collective in the world, whose communicator is given."""
        found = cls(comm.split(intra_node, "near"), comm.split(inter_node, "across"))
        comm.waits.add_hops(found)
        return found

    @property
    def is_open(self) -> bool:
        """Return whether a hop is still to be issued."""
        return any(queue.is_open for queue in self._queues.values())

    def advance(self) -> None:
        """Issue the hops whose turn has come, without waiting."""
        if self.is_open:
            self.intra_node.hear()
            for queue in list(self._queues.values()):
                queue.advance()

    def all_gather(self, full: Tensor, lane: str, what: str, kind: str) -> Pending:
        """Fill `full` as `Comm.all_gather` does; the meter counts what stays inside under a kind of
        its own.

        Collective within the lane, of both groups.
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
        """Return a sum: first what `intra_node` issues among the ranks of the host, then what
        `inter_node` issues behind it.

        Collective within the lane, of both groups.
        """
        inside = self._queue("near", lane).add(DONE, lambda: all_of(intra_node()))
        return self._queue("across", lane).add(inside, inter_node)

    def _queue(self, group: str, lane: str) -> OrderedIssueQueue:
        return self._queues.setdefault((group, lane), OrderedIssueQueue())
