"""NCCL, and its groups: a pair for each engine that trains at a time, shared with `zero.Init` and
loads of its model.

A group costs memory on every GPU, and NCCL matches the collectives of a group by the order they are
issued in. Two engines may interleave differently on different ranks, so each has a pair. A
construction or a load waits for each of its collectives before the engine begins, and borrows the
pair of the engine to come.
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
from .base import ConnectionLost, CopyingTransport, Use, Wait, filled, first_line, once

BACKEND = "nccl"
LANES = ("gather", "reduce")  # a group each: in one, a gather would stand behind a reduction
MOST = 63  # bits of a row


@dataclass
class LanePair:
    """One pair. engine: the one that trains over it. users: that engine, constructions and
    loads.
    """

    groups: Mapping[str, dist.ProcessGroup]
    engine: str = ""
    users: set[str] = field(default_factory=set)


class NcclGroups:
    """The pairs for one way to cut the world into groups, under numbers that all ranks share.

    partition: the ranks of each group; every rank makes the groups of all of them, in this order,
    as torch asks.  None: one group, of the whole world.
    """

    def __init__(self, partition: Sequence[tuple[int, ...]] | None = None) -> None:
        self._partition = partition
        self._made: dict[int, LanePair] = {}

    def free(self) -> int:
        """Return as bits the pairs, made or not, over which no engine of this rank trains."""
        return sum(1 << n for n in range(MOST) if n not in self._made or not self._made[n].engine)

    def idle(self) -> int:
        """Return as bits the pairs without a user on this rank."""
        return sum(1 << n for n, pair in self._made.items() if not pair.users)

    def take(
        self, user: str, *, trains: bool, free: int, idle: int
    ) -> Mapping[str, dist.ProcessGroup]:
        """The groups of a new user, by lane.  free, idle: what is so on every rank.  Collective.

        Pairs that are idle on every rank and not taken are destroyed: to destroy one is collective
        too, and ranks drop their last user at different moments, so it waits for the next time they
        meet.
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
        if self._partition is None:
            whole: dist.ProcessGroup = dist.new_group(backend=BACKEND, timeout=PATIENCE)
            return whole
        here = dist.get_rank()
        found: dist.ProcessGroup | None = None
        for ranks in self._partition:
            made = dist.new_group(list(ranks), backend=BACKEND, timeout=PATIENCE)
            found = made if here in ranks else found
        assert found is not None
        return found

    def release(self, user: str) -> None:
        """Remove a user."""
        for pair in self._made.values():
            pair.users.discard(user)
            pair.engine = "" if pair.engine == user else pair.engine


class Nccl(CopyingTransport):
    """Native collectives between CUDA ranks; `wait` orders streams and does not block the host.

    groups: one for each lane.  NCCL matches the collectives of a group by the order they are issued
    in, which is promised within a lane only; and a group has one stream, in which a gather would
    stand behind a reduction. What is issued starts when the caller's stream has come there, so a
    lent buffer is never written too early; nothing that travels is freed before its wait.
    """

    description = "NCCL"
    reports_arrival = False

    def __init__(
        self,
        rank: int,
        size: int,
        groups: Mapping[str, dist.ProcessGroup | None],
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.size = size
        self.groups = groups
        self.device = device

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        group = self.groups[lane_of(cid.lane)]
        with _nccl_errors():
            work = dist.all_gather_into_tensor(
                full, full.chunk(self.size)[self.rank], group=group, async_op=True
            )
        return lambda: _nccl_wait(work)

    def exchange(
        self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use
    ) -> Wait:
        received = filled(inbox, pieces[self.rank], self.rank)
        outgoing = list(pieces)
        incoming = list(received)
        # Nothing travels to ourselves
        outgoing[self.rank] = incoming[self.rank] = pieces[self.rank][:0]
        with _nccl_errors():
            work = dist.all_to_all(
                incoming, outgoing, group=self.groups[lane_of(cid.lane)], async_op=True
            )
        return once(lambda: _nccl_wait(work), lambda: use(received))


def _nccl_wait(work: dist.Work | None) -> None:
    """Let the stream wait."""
    if work is not None:
        with _nccl_errors():
            work.wait()


@contextmanager
def _nccl_errors() -> Iterator[None]:
    """Open a block in which NCCL's errors about a peer that is gone become `ConnectionLost`; any
    other error stays as it is.
    """
    try:
        yield
    except dist.DistBackendError as caught:
        if any(word in str(caught) for word in NCCL_LOST):
            raise ConnectionLost(first_line(caught)) from None
        raise


NCCL_LOST = ("ncclRemoteError", "ncclSystemError")  # a peer ended, or its network
