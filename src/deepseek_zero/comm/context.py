"""State that the ranks of one world share among all engines: gloo's connections, the flight recorder, the lanes.

One per process and world, so that connections and their threads are made once, and a rank that waits in one engine
knows where the others stand in every engine.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from ..base import world
from ..base.mesh import PATIENCE
from .bootstrap import Hosts
from .flight_recorder import FlightRecorder, Position, open_store
from .ids import engine_of
from .transports.base import Transport
from .transports.composed import Hierarchical
from .transports.gloo import Gloo, Tags
from .transports.nccl import NcclGroups
from .transports.shared_memory import HostPages, SharedMemory, connect_local

Partition = tuple[tuple[int, ...], ...]  # the world cut into groups of ranks
LOG_LENGTH = 64  # collectives remembered per lane, for the flight recorder
MOST_EXIT_SECONDS, LOOK_SECONDS, QUIET_LOOKS = 1.0, 1e-3, 3  # for threads that let go of their last message


@dataclass
class Lane:
    """A sequence of collectives in one agreed order; different lanes may interleave differently on different ranks."""

    name: str
    number: int
    issued: int = 0
    log: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))  # (sequence, name)


class WorldContext:
    """One rank's connections to the world, and the state that its engines share.

    `of_this_world` returns the one of this process: its first call is collective, later ones return the same object.
    Making one from given parts is local.

    group: gloo's, of all ranks. pages: the memory that ranks of this host share. no_sharing_reason: why they share
    none; "" if they do, or if there is only one.
    """

    _current: ClassVar[WorldContext | None] = None

    def __init__(
        self,
        hosts: Hosts,
        recorder: FlightRecorder,
        group: dist.ProcessGroup | None = None,
        pages: HostPages | None = None,
        no_sharing_reason: str = "",
    ) -> None:
        self.world = group if group is None else dist.group.WORLD
        self.rank, self.size = hosts.rank, len(hosts.keys)
        self.hosts, self.recorder, self.no_sharing_reason = hosts, recorder, no_sharing_reason
        self.tags, self._gloo_group, self._pages = Tags(), group, pages
        self._nccl_groups: dict[Partition, NcclGroups] = {}
        self.ranks = tuple(range(self.size))
        self.gloo = self.gloo_over(self.ranks)  # for what is agreed before an engine has a transport
        self.engines = itertools.count(1)  # numbers for those that will use it
        self._lanes: dict[str, Lane] = {}

    @classmethod
    def of_this_world(cls) -> WorldContext:
        if cls._current is None or cls._current.world is not dist.group.WORLD:
            cls._current = cls._connect()
        return cls._current

    @classmethod
    def _connect(cls) -> WorldContext:
        """Connect this process to all others of torch.distributed's world.  Collective."""
        atexit.register(drain_threads)  # once for each world; a second look costs nothing
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        hosts, sockets, no_sharing_reason = connect_local(rank, size, group)
        recorder = FlightRecorder(rank, size, open_store(rank, size, hosts, group))
        pages = HostPages(rank, sockets) if sockets is not None else None
        return cls(hosts, recorder, group, pages, no_sharing_reason)

    def gloo_over(self, ranks: Sequence[int], far_only: bool = False) -> Gloo:
        """Return gloo between these ranks, this one among them, over the connections of the world. Local.

        far_only: to the ranks that share no memory with this one.
        """
        near = self._pages.peers if self._pages is not None and far_only else ()
        peers = [index for index, rank in enumerate(ranks) if rank != self.rank and rank not in near]
        return Gloo(ranks.index(self.rank), ranks, self._gloo_group, peers, self.tags)

    def fastest_over(self, ranks: Sequence[int]) -> Transport:
        """Return shared memory to those of these ranks that are on this host, gloo to the others. Local."""
        far = self.gloo_over(ranks, far_only=True)
        if self._pages is None or len(far.peers) == len(ranks) - 1:
            return far
        near = SharedMemory(ranks, self._pages)
        return Hierarchical(near, far, near.rank) if far.peers else near

    def nccl_groups(self, partition: Partition) -> NcclGroups:
        """Return the NCCL groups of one way to cut the world, shared by all engines that cut it so. Local."""
        if partition not in self._nccl_groups:
            self._nccl_groups[partition] = NcclGroups(None if partition == (self.ranks,) else partition)
        return self._nccl_groups[partition]

    def lane(self, name: str, number: int) -> Lane:
        """Return the lane of that name ("engine 0/gather"), made at its first use."""
        return self._lanes.setdefault(name, Lane(name, number))

    def end_engine(self, engine: str) -> None:
        """End the waiting threads of an engine that is gone. Its positions stay, for ranks that are still behind."""
        for name, lane in list(self._lanes.items()):  # a backward thread may add one meanwhile
            if engine_of(name) == engine:
                lane.log.clear()
        self.tags.release(engine)
        for groups in self._nccl_groups.values():
            groups.release(engine)

    def position(self, lane: str, sequence: int, ranks: Sequence[int]) -> Position:
        """Return this rank's position as it waits for one collective of one lane. ranks: those of the collective."""
        return Position(
            lane,
            sequence,
            list(ranks),
            {name: each.issued for name, each in self._lanes.items()},
            {name: {str(number): what for number, what in each.log} for name, each in self._lanes.items()},
        )


def ranks_of_this_host() -> int:
    """Return the number of ranks of the world on this host: counted once an engine was made, before that the launcher's
    word.

    Local.
    """
    links = WorldContext._current
    if links is not None and links.world is dist.group.WORLD:
        return links.hosts.local_size
    return world.local_size() or world.size()


def local_rank() -> int:
    """Return this rank's number on its host: as its launcher says, else by counting, else its rank. Local."""
    links, said = WorldContext._current, world.stated_local_rank()
    if said is not None or links is None or links.world is not dist.group.WORLD:
        return world.local_rank()
    return links.hosts.near.index(links.rank)


def drain_threads() -> None:
    """Wait, as the program ends, until no other thread of this process wants to run; a second at most.

    gloo's threads drop the tensors of a message a moment after its last receiver has gone on.  Where that moment falls
    behind the end of Python, torch asks for a lock of an interpreter that is gone, and a program that did all its work
    dies by SIGABRT ("terminate called without an active exception", pytorch#179291).
    """
    until, quiet = time.monotonic() + MOST_EXIT_SECONDS, 0
    while quiet < QUIET_LOOKS and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)  # without the interpreter's lock, for which they may wait
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Return whether another thread of this process runs or could run; False if the system does not tell."""
    me = str(threading.get_native_id())
    try:
        return any(_wants_to_run(thread) for thread in os.listdir("/proc/self/task") if thread != me)
    except OSError:  # no /proc
        return False


def _wants_to_run(thread: str) -> bool:
    try:
        stat = Path("/proc/self/task", thread, "stat").read_bytes()
    except OSError:  # it has ended meanwhile
        return False
    return stat.rpartition(b") ")[2][:1] == b"R"  # the state comes after the name, which may hold anything
