"""NCCL's groups: a pair for each engine that trains at a time, shared with what builds and loads its model.

A group costs memory on every GPU, and NCCL matches the collectives of a group by the order they are issued in.  Two
engines may interleave differently on different ranks, so each has a pair.  What builds or loads a model waits for each
of its collectives before the engine begins, and borrows the pair of the engine to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from ..base.mesh import PATIENCE

BACKEND = "nccl"
LANES = ("gather", "reduce")  # a group each: in one, a gather would stand behind a reduction
MOST = 63  # bits of a row


@dataclass
class LanePair:
    """One pair.  engine: who trains over it.  users: it, and those who build and load."""

    groups: Mapping[str, dist.ProcessGroup]
    engine: str = ""
    users: set[str] = field(default_factory=set)


class NcclGroups:
    """The pairs of one world, under numbers that all ranks share."""

    def __init__(self) -> None:
        self._made: dict[int, Channel] = {}

    def free(self) -> int:
        """As bits: the pairs, made or not, over which no engine of this rank trains."""
        return sum(1 << n for n in range(MOST) if n not in self._made or not self._made[n].engine)

    def idle(self) -> int:
        """As bits: the pairs that nobody uses on this rank any more."""
        return sum(1 << n for n, channel in self._made.items() if not channel.users)

    def take(self, user: str, *, trains: bool, free: int, idle: int) -> Mapping[str, dist.ProcessGroup]:
        """The groups of a new user, by lane.  free, idle: what is so on every rank.  Collective.

        Pairs that are idle on every rank and not taken are destroyed: to destroy one is collective too, and ranks drop
        their last user at different moments, so it waits for the next time they meet.
        """
        chosen = (free & -free).bit_length() - 1
        for number in sorted(self._made):
            if idle >> number & 1 and number != chosen:
                for group in self._made.pop(number).groups.values():
                    dist.destroy_process_group(group)
        if chosen not in self._made:
            self._made[chosen] = LanePair({lane: dist.new_group(backend=BACKEND, timeout=PATIENCE) for lane in LANES})
        channel = self._made[chosen]
        channel.users.add(user)
        channel.engine = user if trains else channel.engine
        return channel.groups

    def release(self, user: str) -> None:
        """A user is gone."""
        for channel in self._made.values():
            channel.users.discard(user)
            channel.engine = "" if channel.engine == user else channel.engine
