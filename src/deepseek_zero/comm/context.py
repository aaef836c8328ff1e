"""State that the ranks of one world share among all engines: gloo's connections, the flight
recorder, the lanes.

One per process and world, so that connections and their threads are made once, and a rank that
waits in one engine knows where the others stand in every engine.
"""

from __future__ import annotations

import atexit
import itertools
import json
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
from .net.channel import Listener
from .net.key_value_store import listening_host, listening_ports, open_store
from .outside_calls import watch_outside_calls
from .transports.base import Transport
from .transports.composed import Hierarchical
from .transports.gloo import Gloo, Tags, end_with_their_hosts, open_files, shut_down
from .transports.nccl import NcclGroups
from .transports.shared_memory import HostPages, SharedMemory, connect_local

Partition = tuple[tuple[int, ...], ...]  # the world cut into groups of ranks
AFTER_WORD_SECONDS = (
    3.0  # gloo's connections outlive a lost host so long: the store's word of it has its name
)
LOG_LENGTH = 64  # collectives remembered per lane, for the flight recorder


@dataclass
class Lane:
    """A sequence of collectives in one agreed order; different lanes may interleave differently on
    different ranks.
    """

    name: str
    number: int
    issued: int = 0
    # (sequence, name)
    log: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))


class WorldContext:
    """One rank's connections to the world, and the state that its engines share.

    `of_this_world` returns the one of this process: its first call is collective, later ones return
    the same object. Making one from given parts is local.

    group: gloo's, of all ranks. pages: the memory that ranks of this host share. no_sharing_reason:
    why they share none; "" if they do, or if there is only one. secret: of this job, which all its
    ranks hold. listener: where this rank listens, once it does.
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
        self._links: net.Links | None = None  # once a transport needs them
        self._refusal = ""  # why there will be none
        self._nccl_groups: dict[Partition, NcclGroups] = {}
        self.ranks = tuple(range(self.size))
        # For what is agreed before an engine has a transport
        self.gloo = self.gloo_over(self.ranks)
        self.engines = itertools.count(1)  # numbers for those that will use it
        self._lanes: dict[str, Lane] = {}

    @classmethod
    def of_this_world(cls) -> WorldContext:
        if cls._current is None or cls._current.world is not dist.group.WORLD:
            cls._current = cls._connect()
        return cls._current

    @classmethod
    def of_this_world_if_any(cls) -> WorldContext | None:
        """Return None where torch.distributed has no world, or one of a single rank.  Collective in
        that world.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return cls.of_this_world()
        return None

    @classmethod
    def _connect(cls) -> WorldContext:
        """Connect this process to all others of torch.distributed's world.  Collective."""
        atexit.register(drain_threads)  # once for each world; a second look costs nothing
        atexit.register(hang_up)  # after the recorder's goodbye, which is registered later
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
            end_with_their_hosts(gloo_files, dead_after() + AFTER_WORD_SECONDS)
        recorder = FlightRecorder(hosts, store, dead_after())
        watch_outside_calls(recorder)
        pages = HostPages(rank, sockets) if sockets is not None else None
        found = cls(hosts, recorder, group, pages, no_sharing_reason, secret, listener)
        found._gloo_files = gloo_files
        weakref.finalize(found, store.close).atexit = False
        return found

    def gloo_over(self, ranks: Sequence[int], inter_node_only: bool = False) -> Gloo:
        """Return gloo between these ranks, this one among them, over the connections of the world.
        Local.

        far_only: to the ranks that share no memory with this one.
        """
        near = self._pages.peers if self._pages is not None and inter_node_only else ()
        peers = [
            index for index, rank in enumerate(ranks) if rank != self.rank and rank not in near
        ]
        limitation = ""
        if self.no_sharing_reason:
            limitation = f"ranks of this host cannot share memory: {self.no_sharing_reason}"
        return Gloo(ranks.index(self.rank), ranks, self._gloo_group, peers, self.tags, limitation)

    def connect_inter_node(self) -> None:
        """Connect to all ranks that share no memory with this one by sockets of our own, once.
        Collective in the world.

        Raises `PeerError` on every rank if one of them finds another one not.
        """
        if self._links is not None:
            return
        if not self._refusal:
            self._refusal = self._connected_inter_node()
        if self._refusal:
            raise PeerError(
                f"{self._refusal}.",
                'The ranks were to exchange over sockets of their own ("transport").',
                'open the ports that --ports names between the hosts, or write "transport": '
                '"gloo".',
            )

    def _connected_inter_node(self) -> str:
        """Make the connections; return why that failed on one of the ranks, or "".  Collective in
        the world.
        """
        near = () if self._pages is None else self._pages.peers
        listener = self._listener
        refusal = ""
        try:
            if listener is None:
                listener = self._listener = Listener(
                    listening_host(self.hosts), self._secret, self.rank, listening_ports()
                )
                weakref.finalize(self, listener.close).atexit = False
        except (UsageError, OSError) as error:
            refusal = f"rank {self.rank} cannot listen: {error}"
        rows = all_gather_text(
            json.dumps([refusal, listener and listener.address]), self.size, self._gloo_group
        )
        everyone = [json.loads(row) for row in rows]
        if said := next((said for said, _ in everyone if said), ""):
            return said
        assert listener is not None
        far = {
            rank: (place[0], place[1])
            for rank, (_, place) in enumerate(everyone)
            if rank not in near
        }
        far.pop(self.rank)
        links = net.Links(self.rank, self._secret, listener, far, self.hosts.names)
        if said := next(
            filter(None, all_gather_text(links.connect(), self.size, self._gloo_group)), ""
        ):
            links.hang_up()
            return said
        self._links = links
        weakref.finalize(self, links.close).atexit = False
        return ""

    def tcp_over(self, ranks: Sequence[int]) -> Transport:
        """Return shared memory to those of these ranks that are on this host, our own sockets to
        the others. Local.
        """
        assert self._links is not None
        peers = [index for index, rank in enumerate(ranks) if rank in self._links.links]
        return self._with_intra_node(
            ranks, transports.Tcp(ranks.index(self.rank), ranks, peers, self._links), len(peers)
        )

    def fastest_over(self, ranks: Sequence[int]) -> Transport:
        """Return shared memory to those of these ranks that are on this host, gloo to the others.
        Local.
        """
        far = self.gloo_over(ranks, inter_node_only=True)
        return self._with_intra_node(ranks, far, len(far.peers))

    def transport_over(self, name: str, ranks: Sequence[int]) -> Transport:
        """Return the transport of that name ("fastest", "gloo" or "tcp") between these ranks.
        Local.
        """
        found = {"gloo": self.gloo_over, "tcp": self.tcp_over, "fastest": self.fastest_over}
        return found[name](ranks)

    def _with_intra_node(self, ranks: Sequence[int], far: Transport, count: int) -> Transport:
        """Return a transport to `count` far ranks, with shared memory to those of these ranks that
        are near.
        """
        if self._pages is None or count == len(ranks) - 1:
            return far
        near = SharedMemory(ranks, self._pages)
        return Hierarchical(near, far, near.rank) if count else near

    def nccl_groups(self, partition: Partition) -> NcclGroups:
        """Return the NCCL groups of one way to cut the world, shared by all engines that cut it so.
        Local.
        """
        if partition not in self._nccl_groups:
            groups = None if partition == (self.ranks,) else partition
            self._nccl_groups[partition] = NcclGroups(groups)
        return self._nccl_groups[partition]

    def lane(self, name: str, number: int) -> Lane:
        """Return the lane of that name ("engine 0/gather"), made at its first use."""
        return self._lanes.setdefault(name, Lane(name, number))

    def end_engine(self, engine: str) -> None:
        """End the waiting threads of an engine that is gone. Its positions stay, for ranks that are
        still behind.
        """
        for name, lane in list(self._lanes.items()):  # a backward thread may add one meanwhile
            if engine_of(name) == engine:
                lane.log.clear()
        self.tags.release(engine)
        for groups in self._nccl_groups.values():
            groups.release(engine)

    def position(self, lane: str, sequence: int, ranks: Sequence[int]) -> Position:
        """Return this rank's position as it waits for one collective of one lane. ranks: those of
        the collective.
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


def ranks_of_this_host() -> int:
    """Return the number of ranks of the world on this host: counted once an engine was made, before
    that the launcher's word.

    Local.
    """
    links = WorldContext._current
    if links is not None and links.world is dist.group.WORLD:
        return links.hosts.local_size
    return world.local_size() or world.size()


def local_rank() -> int:
    """Return this rank's number on its host: as its launcher says, else by counting, else its rank.
    Local.
    """
    links = WorldContext._current
    said = world.stated_local_rank()
    if said is not None or links is None or links.world is not dist.group.WORLD:
        return world.local_rank()
    return links.hosts.local_ranks.index(links.rank)


def hang_up() -> None:
    """End the connections of this rank as the program ends, after the others have what it sent
    last.

    A thread that still waits for a message of gloo's would wake when the other end closes the
    connection. If Python is ending at that moment, the thread aborts the process. So its wait ends
    here, while Python is whole.
    """
    world = WorldContext._current
    if world is None:
        return
    if world.tags.is_any_under_way():
        shut_down(world._gloo_files)
    if world._links is not None:
        world._links.close()
