"""NCCL collectives, and the NCCL groups that engines share.

A group costs memory on every GPU, and NCCL matches the collectives of a group by the order in which
they are issued. Two engines may interleave differently on different ranks, so each training engine
has its own pair of groups. A model construction (`zero.Init`) or a load waits for each of its
collectives before the engine begins, so it borrows the pair of the engine to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.mesh import PATIENCE
from ..ids import CollectiveId, lane_of
from .base import ConnectionLost, Inbox, Transport, Use, Wait, filled, first_line, once

BACKEND = "nccl"
# One group each: within one group, a gather would wait for an earlier reduction
LANES = ("gather", "reduce")
MOST = 63  # Number of pairs, one bit of an int64 row each


@dataclass
class LanePair:
    """One pair of NCCL groups, one group per lane.

    Attributes:
        groups: The groups by lane.
        engine: The name of the engine that trains with them, or "".
        users: That engine, constructions and loads.
    """

    groups: Mapping[str, dist.ProcessGroup]
    engine: str = ""
    users: set[str] = field(default_factory=set)


class NcclGroups:
    """The pairs for one partition of the world, numbered the same on all ranks.

    Args:
        partition: The ranks of each group. torch requires that every rank creates all groups in the
            same order.
    """

    def __init__(self, partition: Sequence[tuple[int, ...]]) -> None:
        self._partition = partition
        self._made: dict[int, LanePair] = {}

    def free(self) -> int:
        """Return a bit mask of the pairs that no engine of this rank trains with.

        Pairs that do not exist yet are included.
        """
        return sum(1 << n for n in range(MOST) if n not in self._made or not self._made[n].engine)

    def idle(self) -> int:
        """Return a bit mask of the existing pairs without a user on this rank."""
        return sum(1 << n for n, pair in self._made.items() if not pair.users)

    def take(
        self, user: str, *, trains: bool, free: int, idle: int
    ) -> Mapping[str, dist.ProcessGroup]:
        """Return the groups of a new user, by lane.

        Other pairs that are idle on every rank are destroyed here. Destroying a group is
        collective, and ranks drop their last user at different times, so it waits until all ranks
        call this method.

        Args:
            user: The name of the user.
            trains: Whether the user is an engine that trains.
            free: The pairs that are free on every rank.
            idle: The pairs that are idle on every rank.

        Returns:
            One process group per lane name.

        Note:
            Collective: every rank of the world must call it.
        """
        chosen = (free & -free).bit_length() - 1
        for number in sorted(self._made):
            if idle >> number & 1 and number != chosen:
                for group in self._made.pop(number).groups.values():
                    dist.destroy_process_group(group)
        if chosen not in self._made:
            self._made[chosen] = LanePair({lane: self._new_group() for lane in LANES})
        pair = self._made[chosen]
        pair.users.add(user)
        pair.engine = user if trains else pair.engine
        return pair.groups

    def _new_group(self) -> dist.ProcessGroup:
        here = dist.get_rank()
        found: dist.ProcessGroup | None = None
        for ranks in self._partition:
            made = dist.new_group(list(ranks), backend=BACKEND, timeout=PATIENCE)
            found = made if here in ranks else found
        assert found is not None
        return found

    def release(self, user: str) -> None:
        """Record that an engine no longer uses its pair of NCCL groups."""
        for pair in self._made.values():
            pair.users.discard(user)
            pair.engine = "" if pair.engine == user else pair.engine


@dataclass(eq=False)
class Nccl(Transport):
    """NCCL collectives; `wait` orders streams and does not block the host.

    A collective starts when the caller's stream reaches it, so a pooled buffer is never overwritten
    too early. Tensors in flight are not freed before their wait.

    Attributes:
        rank: This rank's index in the group.
        size: Number of ranks in the group.
        groups: One process group per lane. NCCL matches the collectives of a group by issue order,
            which is guaranteed only within a lane. Each group has one stream, in which a gather
            would wait for an earlier reduction.
        device: The CUDA device of the tensors.
    """

    description = "NCCL"
    reports_arrival = False

    rank: int
    size: int
    groups: Mapping[str, dist.ProcessGroup | None]
    device: torch.device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        group = self.groups[lane_of(cid.lane)]
        with _nccl_errors():
            work = dist.all_gather_into_tensor(
                full, full.chunk(self.size)[self.rank], group=group, async_op=True
            )
        return lambda: _nccl_wait(work)

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        outgoing = list(pieces)
        incoming = list(received)
        # A rank sends nothing to itself
        outgoing[self.rank] = incoming[self.rank] = pieces[self.rank][:0]
        with _nccl_errors():
            work = dist.all_to_all(
                incoming, outgoing, group=self.groups[lane_of(cid.lane)], async_op=True
            )
        return once(lambda: _nccl_wait(work), lambda: use(received))


def _nccl_wait(work: dist.Work | None) -> None:
    """Make the current stream wait for the collective."""
    if work is not None:
        with _nccl_errors():
            work.wait()


@contextmanager
def _nccl_errors() -> Iterator[None]:
    """Convert NCCL errors about a lost peer to `ConnectionLost`; keep other errors."""
    try:
        yield
    except dist.DistBackendError as caught:
        if any(word in str(caught) for word in NCCL_LOST):
            raise ConnectionLost(first_line(caught)) from None
        raise


NCCL_LOST = ("ncclRemoteError", "ncclSystemError")  # A peer exited, or its network failed
