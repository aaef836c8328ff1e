"""State that all engines of one process share.

It holds gloo's connections, the flight recorder and the lanes. There is one instance per process
and world, so connections and their threads are created once. A rank that waits in one engine can
find the positions of the other ranks in every engine.
"""

from __future__ import annotations

import atexit
import itertools
import json
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch.distributed as dist

from ..base import world
from ..base.ending import drain_threads
from ..base.errors import PeerError, UsageError
from ..base.launch import dead_after
from ..base.mesh import PATIENCE
from ..base.network import lead_gloo
from . import net, transports
from .bootstrap import Hosts, all_gather_text
from .flight_recorder import FlightRecorder, Position
from .ids import engine_of
from .net.channel import Listener, end_with_the_host
from .net.key_value_store import listening_host, listening_ports, open_store
from .outside_calls import watch_outside_calls
from .transports.base import PointToPoint, Transport
from .transports.composed import Hierarchical
from .transports.gloo import Gloo, Tags, for_connections, open_files
from .transports.nccl import NcclGroups
from .transports.shared_memory import HostPages, SharedMemory, connect_local

Partition = tuple[tuple[int, ...], ...]  # The world divided into groups of ranks
# gloo's connections outlive a lost host by this time, so that the store, which can name the host,
# reports it first
AFTER_WORD_SECONDS = 3.0
LOG_LENGTH = 64  # Collectives kept per lane, for the flight recorder


@dataclass
class Lane:
    """A sequence of collectives in one agreed order.

    Collectives of different lanes may interleave differently on different ranks.

    Attributes:
        name: The full name ("engine 0/gather").
        number: The number of the lane, unique in this world.
        issued: Number of collectives issued so far.
        log: (sequence, name) of the last `LOG_LENGTH` collectives.
    """

    name: str
    number: int
    issued: int = 0
    log: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))


class WorldContext:
    """One rank's connections to the world, which all engines of the process share.

    `of_this_world` returns the instance of this process. The constructor does not communicate.

    Args:
        hosts: The hosts of all ranks.
        recorder: The flight recorder of this rank.
        group: A gloo group of all ranks.
        pages: Shared memory of the ranks of this host.
        no_sharing_reason: Why the ranks of this host have no shared memory; "" if they have, or if
            there is only one.
        secret: The secret of this job, which all its ranks hold.
        listener: The listener of this rank, if it already has one.
    """

    _current: ClassVar[WorldContext | None] = None

    def __init__(
        self,
        hosts: Hosts,
        recorder: FlightRecorder,
        group: dist.ProcessGroup | None = None,
        pages: HostPages | None = None,
        no_sharing_reason: str = "",
        secret: bytes = b"",
        listener: Listener | None = None,
    ) -> None:
        self.world = group if group is None else dist.group.WORLD
        self.rank = hosts.rank
        self.size = len(hosts.keys)
        self.hosts = hosts
        self.recorder = recorder
        self.no_sharing_reason = no_sharing_reason
        self.tags = Tags()
        self._gloo_group = group
        self._pages = pages
        self._secret = secret
        self._listener = listener
        self._gloo_files: dict[int, int] = {}
        self._links: net.Links | None = None  # Created when a transport needs them
        self._refusal = ""  # Why the links cannot be created
        self._nccl_groups: dict[Partition, NcclGroups] = {}
        self.ranks = tuple(range(self.size))
        # For agreements before an engine has a transport
        self.gloo = self.gloo_over(self.ranks)
        self.engines = itertools.count(1)  # Numbers of the engines to come
        self._lanes: dict[str, Lane] = {}

    @classmethod
    def of_this_world(cls) -> WorldContext:
        """Return the instance of torch.distributed's current world.

        Note:
            The first call in a world is collective; later calls return the same object.
        """
        found = _connected()
        if found is None:
            found = cls._current = cls._connect()
        return found

    @classmethod
    def of_this_world_if_any(cls) -> WorldContext | None:
        """Return the instance of the current world, or None if it has only one rank.

        Also return None if torch.distributed is not initialized.

        Note:
            The first call in a world is collective.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return cls.of_this_world()
        return None

    @classmethod
    def _connect(cls) -> WorldContext:
        """Connect this process to all others of torch.distributed's world.

        Note:
            Collective: every rank must call it.
        """
        atexit.register(drain_threads)  # Registered once per world; a second call costs nothing
        # Runs after the recorder's exit handler, which is registered later
        atexit.register(hang_up)
        rank = dist.get_rank()
        size = dist.get_world_size()
        before = open_files()
        lead_gloo(world.local_size() == size, world.meeting_address())
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        gloo_files = {
            number: file for number, file in open_files().items() if before.get(number) != file
        }
        hosts, sockets, no_sharing_reason = connect_local(rank, size, group)
        store, secret, listener = open_store(rank, size, hosts, group)
        if not hosts.is_one:
            # Otherwise gloo would notice a silent host only after a quarter of an hour, when its
            # kernel gives up retransmitting, and never while it only waits
            seconds = dead_after() + AFTER_WORD_SECONDS
            for_connections(gloo_files, lambda each: end_with_the_host(each, seconds))
        recorder = FlightRecorder(hosts, store, dead_after())
        watch_outside_calls(recorder)
        pages = HostPages(rank, sockets) if sockets is not None else None
        found = cls(hosts, recorder, group, pages, no_sharing_reason, secret, listener)
        found._gloo_files = gloo_files
        weakref.finalize(found, store.close).atexit = False
        return found

    @property
    def _near(self) -> Sequence[int]:
        """The other ranks that share memory with this one."""
        return () if self._pages is None else self._pages.peers

    def gloo_over(self, ranks: Sequence[int], inter_node_only: bool = False) -> Gloo:
        """Return a gloo transport between these ranks, over the world's connections.

        Args:
            ranks: World ranks, including this one.
            inter_node_only: Whether to send only to ranks that have no shared memory with this one.

        Returns:
            The transport. Creating it opens no new connections.
        """
        near = self._near if inter_node_only else ()
        peers = [
            index for index, rank in enumerate(ranks) if rank != self.rank and rank not in near
        ]
        limitation = ""
        if self.no_sharing_reason:
            limitation = f"ranks of this host cannot share memory: {self.no_sharing_reason}"
        return Gloo(ranks.index(self.rank), ranks, self._gloo_group, peers, self.tags, limitation)

    def connect_inter_node(self) -> None:
        """Open sockets to all ranks that have no shared memory with this one.

        Later calls return immediately.

        Raises:
            PeerError: On every rank, if one rank cannot connect to another.

        Note:
            Collective: every rank of the world must call it.
        """
        if self._links is not None:
            return
        if not self._refusal:
            self._refusal = self._connected_inter_node()
        if self._refusal:
            raise PeerError(
                f"{self._refusal}.",
                'The library\'s own sockets are configured or were chosen ("transport").',
                'open the ports of --ports between the hosts, or set "transport": "gloo".',
            )

    def _connected_inter_node(self) -> str:
        """Connect; return "" or the reason why one of the ranks failed.

        Note:
            Collective: every rank must call it.
        """
        refusal = ""
        try:
            if self._listener is None:
                host = listening_host(self.hosts)
                self._listener = Listener(host, self._secret, self.rank, listening_ports())
                weakref.finalize(self, self._listener.close).atexit = False
        except (UsageError, OSError) as error:
            refusal = f"rank {self.rank} cannot listen: {error}"
        listener = self._listener
        said = json.dumps([refusal, listener and listener.address])
        rows = all_gather_text(said, self.size, self._gloo_group)
        addresses = {}
        for rank, row in enumerate(rows):
            refusal, address = json.loads(row)
            if refusal:
                return str(refusal)
            if rank != self.rank and rank not in self._near:
                addresses[rank] = (address[0], address[1])
        assert listener is not None
        links = net.Links(self.rank, self._secret, listener, addresses, self.hosts.names)
        problems = all_gather_text(links.connect(), self.size, self._gloo_group)
        if any(problems):
            links.hang_up()
            return next(filter(None, problems))
        self._links = links
        weakref.finalize(self, links.close).atexit = False
        return ""

    def transport_over(self, name: str, ranks: Sequence[int]) -> Transport:
        """Return the transport of that name between these ranks.

        Args:
            name: "fastest", "gloo" or "tcp".
            ranks: World ranks, including this one.

        Returns:
            The transport, which uses the world's connections.
        """
        far: PointToPoint = self.gloo_over(ranks, inter_node_only=name != "gloo")
        if name == "tcp":
            assert self._links is not None
            peers = [index for index, rank in enumerate(ranks) if rank in self._links.links]
            far = transports.Tcp(ranks.index(self.rank), ranks, peers, self._links)
        if self._pages is None or len(far.peers) == len(ranks) - 1:
            return far
        if far.peers:
            return Hierarchical(ranks, self._pages, far)
        return SharedMemory(ranks, self._pages)

    def nccl_groups(self, partition: Partition) -> NcclGroups:
        """Return the NCCL groups of a partition, shared by all engines that use it."""
        if partition not in self._nccl_groups:
            self._nccl_groups[partition] = NcclGroups(partition)
        return self._nccl_groups[partition]

    def lane(self, name: str, number: int) -> Lane:
        """Return the lane of that name, created on first use.

        Args:
            name: The full name ("engine 0/gather").
            number: The number of the lane, used if it is created.

        Returns:
            The lane, which is the same object at each call with this name.
        """
        return self._lanes.setdefault(name, Lane(name, number))

    def end_engine(self, engine: str) -> None:
        """Release the resources of an engine that no longer exists.

        The positions of its lanes are kept for ranks that have not reached them yet.
        """
        # A copy: a backward thread may add a lane meanwhile
        for name, lane in list(self._lanes.items()):
            if engine_of(name) == engine:
                lane.log.clear()
        self.tags.release(engine)
        for groups in self._nccl_groups.values():
            groups.release(engine)

    def position(self, lane: str, sequence: int, ranks: Sequence[int]) -> Position:
        """Return this rank's position while it waits for a collective.

        Args:
            lane: The full name of the lane.
            sequence: The number of the collective in its lane.
            ranks: The world ranks of the collective.

        Returns:
            The position, which other ranks read from the flight recorder.
        """
        return Position(
            lane,
            sequence,
            list(ranks),
            {name: each.issued for name, each in self._lanes.items()},
            {
                name: {str(number): what for number, what in each.log}
                for name, each in self._lanes.items()
            },
        )


def _connected() -> WorldContext | None:
    """Return the connections of torch.distributed's current world, if there are any yet."""
    found = WorldContext._current
    if found is None or found.world is not dist.group.WORLD:
        return None
    return found


def ranks_of_this_host() -> int:
    """Return the number of ranks of the world on this host.

    It is counted after the first engine was created. Before that it is the launcher's value, or the
    world size.
    """
    connected = _connected()
    if connected is not None:
        return connected.hosts.local_size
    return world.local_size() or world.size()


def local_rank() -> int:
    """Return this rank's index among the ranks of its host.

    If the launcher of this process sets the index, its value is returned. Otherwise the index is
    computed from the host names of all ranks as soon as the first engine has been created. Before
    that, the rank itself is returned.
    """
    connected = _connected()
    if connected is None or world.stated_local_rank() is not None:
        return world.local_rank()
    return connected.hosts.local_ranks.index(connected.rank)


def hang_up() -> None:
    """Close this rank's connections at exit, after everything it sent has arrived.

    A thread that still waits for a gloo message would wake up when the peer closes the connection.
    If the interpreter is shutting down at that moment, the thread aborts the process. Shutting the
    connections down here ends its wait while the interpreter is still intact.
    """
    world = WorldContext._current
    if world is None:
        return
    if world.tags.is_any_under_way():
        for_connections(world._gloo_files, lambda each: each.shutdown(socket.SHUT_RDWR))
    if world._links is not None:
        world._links.close()
