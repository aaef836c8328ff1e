"""Moves flat tensors between the ranks of one group: all-gather, reduce-scatter, all-reduce, small
rows.

Each call returns a `Pending`; its data may be used after `wait()`. Sums have one order, ranks
ascending with partials in fp32 (`ordered_sum`), whatever the transport, so that every stage and
every transport gives the same bits. A message is known by its lane and its place there, and carries
a check of its name (comm/ids.py): a rank that strays finds no partner, and the flight recorder
(comm/flight_recorder.py) turns the silence into a named error.
"""

from __future__ import annotations

import functools
import operator
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..base.capabilities import Capability
from ..base.errors import ModelMismatchError, PeerError, UsageError
from ..base.launch import TLS, uses_tls
from ..base.mesh import REDUCE_AXES, SHARD_AXES, Mesh, shares_gpu
from ..base.meter import Event, Meter
from ..kernels.compiler import threads_for
from ..kernels.sums import add_rows, scale_and_store
from .bootstrap import Hosts
from .context import Lane, Partition, WorldContext, ranks_of_this_host
from .flight_recorder import KILLED_FIX, KILLED_WHY, LOST, Position, raised_in
from .ids import WORLD_LANE, CollectiveId, lane_number
from .outside_calls import outside_call
from .transports import base
from .transports.base import (
    ConnectionLost,
    SingleRank,
    SymmetricMemory,
    Transport,
    Use,
    Wait,
    first_line,
    no_wait,
)
from .transports.composed import HostStaged
from .transports.nccl import Nccl, NcclGroups

TRANSPORTS = ("fastest", "gloo", "tcp")
Finish = Callable[[], None]
T = TypeVar("T")
LIFE_SECONDS = 0.25  # between looks for signs of life of other hosts, while a rank waits
HOP_SECONDS = 1e-3  # how long a wait lasts while a second hop may have to be issued


@dataclass(frozen=True)
class IssuedCollective:
    """The place of one collective in its lane.  kind: the lane's last name ("gather", "reduce" or
    "rows").
    """

    lane: Lane
    kind: str
    sequence: int
    what: str
    issued: float
    arrived: list[float] = field(default_factory=list)


@dataclass
class Pending:
    """A collective under way.  `wait()` returns when its data may be used, or raises `PeerError`.

    is_here: whether its data has come; None: its wait is no wait for other ranks.  _issue: issues
    what of it has not been; None: all has.
    """

    _wait: Wait
    _finish: Finish | None = None
    is_here: Callable[[], bool] | None = None
    _issue: Callable[[], None] | None = None
    _done: bool = False
    _error: Exception | None = None  # it ended so: there is no data, however often `wait` is called

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._done:
            self._done = True
            # Each is dropped as it runs: they hold views of lent buffers, and the pool takes no
            # viewed buffer back.
            wait = self._wait
            self._wait = no_wait
            self._issue = None
            try:
                wait()
                del wait
                finish = self._finish
                self._finish = None
                if finish is not None:
                    finish()
            except Exception as error:
                self._error = error
                raise

    def then(self, finish: Finish) -> Pending:
        """Return this collective followed by local work, which `wait()` does."""
        return Pending(self.wait, finish, self.is_done, self._issue)

    def issue_all(self) -> None:
        """Issue all of it, waiting for its first messages where there is no room for more.
        Collective within its lane.
        """
        if self._issue is not None:
            self._issue()

    def is_done(self) -> bool:
        """Return whether `wait` would return without other ranks' doing.  Local."""
        return self._done or self.is_here is None or self.is_here()


DONE = Pending(no_wait)


def all_of(pendings: Sequence[Pending]) -> Pending:
    """Return several collectives as one."""

    def wait() -> None:
        for pending in pendings:
            pending.wait()

    return Pending(wait, is_here=lambda: all(pending.is_done() for pending in pendings))


class Precondition(Protocol):
    """What a collective waits for: a transfer between memories, or another collective."""

    def wait(self) -> None: ...

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class OrderedIssueQueue:
    """Collectives that wait for a transfer first, issued in the order they were added, which is the
    same on all ranks.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedCollective] = deque()
        self._is_issuing = False

    @property
    def is_open(self) -> bool:
        """Return whether a collective still waits to be issued."""
        return bool(self._waiting)

    def add(self, transfer: Precondition, start: Callable[[], Pending]) -> Pending:
        """Add a collective, which `start` issues when the transfer is over, at the latest when it
        is waited for.
        """
        queued = QueuedCollective(transfer, start)
        self._waiting.append(queued)
        self.advance()
        return Pending(lambda: self._finish(queued), is_here=queued.is_done)

    def advance(self) -> None:
        """Issue the first collectives whose transfers are over.  Returns at once where one is being
        issued: whoever waits for its transfer comes here.
        """
        while not self._is_issuing and self._waiting and self._waiting[0].transfer.is_done():
            self._issue_first()

    def issue_all(self) -> None:
        """Issue every collective, however long its transfer takes."""
        while self._waiting:
            self._issue_first()

    def _issue_first(self) -> None:
        self._is_issuing = True
        try:
            self._waiting[0].issue()
        finally:
            self._is_issuing = False
            self._waiting.popleft()

    def _finish(self, queued: QueuedCollective) -> None:
        while queued.pending is None:
            self._issue_first()
        queued.pending.wait()


@dataclass(eq=False)
class QueuedCollective:
    """One collective in the queue."""

    transfer: Precondition
    start: Callable[[], Pending]
    pending: Pending | None = None

    def issue(self) -> None:
        self.transfer.wait()
        self.pending = self.start()

    def is_done(self) -> bool:
        """Return whether it has been issued and its data is here."""
        return self.pending is not None and self.pending.is_done()


class Hops(Protocol):
    """Movements of two hops, of which the second is issued by whoever waits for anything
    meanwhile.
    """

    @property
    def is_open(self) -> bool:
        """Return whether a second hop is still to be issued."""
        ...

    def advance(self) -> None:
        """Issue what can be issued, without waiting."""
        ...


@dataclass
class _Engine:
    """State that all communicators of one engine share. name: the topic of its errors. gave_up: a
    wait ended in an error of other ranks' making. has_raised: an error of this rank's own was
    posted. inter_node_rate: as `Comm.inter_node_rate`.
    """

    trains: bool
    transport: str
    world: WorldContext | None = None
    name: str = "engine"
    gave_up: bool = False
    has_raised: bool = False
    inter_node_rate: float | None = None
    lone_call: str = ""  # the call under way that programs may make on some ranks only
    # A WeakSet's length costs more than all its use here
    hops: list[weakref.ref[Hops]] = field(default_factory=list)

    def poll_interval(self) -> float:
        """Return how long a wait may last before second hops are asked for, or a sign of life of
        other hosts.
        """
        if any((hops := each()) is not None and hops.is_open for each in self.hops):
            return HOP_SECONDS
        return min(base.POLL_SECONDS, LIFE_SECONDS) if self.spans_hosts else base.POLL_SECONDS

    def advance(self) -> None:
        """Issue second hops whose turn has come, without waiting."""
        for each in list(self.hops):
            if (hops := each()) is not None:
                hops.advance()

    @functools.cached_property
    def spans_hosts(self) -> bool:
        """Whether its ranks are on several hosts; asked by every wait."""
        return self.world is not None and not self.world.hosts.is_one


class Comm:
    """The collectives of one group of ranks: a view of the world's transport over these ranks.

    Making one is collective in the world, and gives the world's; `split` gives groups of it.
    `rank` and `size` are the group's; `ranks` are its members as the world counts them.  Its name
    keeps two engines' messages apart.

    transport: "fastest" and "tcp" take shared memory between CPU ranks of one host, "gloo" never
    does; between hosts "tcp" takes our own sockets, the others gloo.  trains: False for what only
    builds or loads a model, and waits for
    each of its collectives.  world: None: that of torch.distributed, and without one a world of one
    rank.
    """

    def _begin(
        self,
        device: torch.device,
        meter: Meter,
        engine: _Engine,
        ranks: tuple[int, ...],
        rank: int,
    ) -> None:
        """Become the communicator of these ranks, with no group of its own and nothing under way.

        rank: this one's place among them.
        """
        self.name = "engine"
        self.meter = meter
        self.device = device
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._engine = engine
        self._world: WorldContext | None = None
        self._number = 0
        self._whole: Comm | None = None  # the groups of a mesh
        self._shard: Comm | None = None
        self.outer: Comm | None = (
            None  # the ranks that hold the same slices as this one, where others do
        )
        self.along: dict[str, Comm] = {}  # by axis ("tp", "sp", "pp"), where it has several ranks
        self._owners: Partition | None = None
        # Of each piece of the model the first rank of the world that has it
        self.pieces: tuple[int, ...] = (0,)
        self._barrier: Pending | None = None  # while a walk is under way, the barrier at its start
        self._last: IssuedCollective | None = None  # the collective issued last
        self._lanes: dict[str, Lane] = {}  # by their last name: "gather", "reduce" or "rows"
        self._transport: Transport = SingleRank(device)
        self._host_transport: Transport = self._transport
        self._inter_node: frozenset[int] = frozenset()  # members on other hosts

    def __init__(
        self,
        device: torch.device,
        *,
        transport: str = "fastest",
        trains: bool = True,
        world: WorldContext | None = None,
    ) -> None:
        self._begin(device, Meter(), _Engine(trains, transport), (0,), 0)
        world = world or WorldContext.of_this_world_if_any()
        if world is not None:
            self._world = self._engine.world = world
            self._engine.transport = _encrypting_transport(transport, world, device)
            self.rank = world.rank
            self.size = world.size
            self.ranks = world.ranks
            # an engine's name and slot are agreed on in the world's own lane
            self.name = WORLD_LANE
            self._host_transport = world.gloo
            self._join(world, (world.ranks,), self, "")

    def _over(self, ranks: tuple[int, ...]) -> Comm:
        """Return a communicator of the same engine over some of this one's ranks, by the transport
        of this one.
        """
        found = object.__new__(Comm)
        rank = ranks.index(self.ranks[self.rank])
        found._begin(self.device, self.meter, self._engine, ranks, rank)
        found.name = self.name
        found.pieces = self.pieces
        found._world = self._world
        found._number = self._number
        found._transport = self._transport
        found._host_transport = self._host_transport
        found._inter_node = self._inter_node
        return found

    @property
    def whole(self) -> Comm:
        """Return the communicator of the world: this one, unless it is the group of one piece of
        the model.
        """
        return self if self._whole is None else self._whole

    @property
    def shard(self) -> Comm:
        """Return the communicator of the ranks among which states are cut: this one, unless a mesh
        says less.
        """
        return self if self._shard is None else self._shard

    @property
    def spans_hosts(self) -> bool:
        """Return whether the world's ranks are on several hosts, or may be. Local."""
        return self._engine.spans_hosts

    @property
    def host_names(self) -> list[str]:
        """Return the names of the world's hosts, in the order of their ranks. Local."""
        return list(dict.fromkeys(self._world.hosts.names)) if self._world is not None else []

    @property
    def inter_node_size(self) -> int:
        """Return how many members of this group are on other hosts than this rank. Local."""
        return len(self._inter_node) if self.size > 1 else 0

    @property
    def inter_node_rate(self) -> float | None:
        """Return the bytes a second that a rank sent to other hosts while all did, if that was
        measured (measure.py). Local.
        """
        return self._engine.inter_node_rate

    @inter_node_rate.setter
    def inter_node_rate(self, rate: float | None) -> None:
        self._engine.inter_node_rate = rate

    @property
    def hosts(self) -> Hosts | None:
        """Return which ranks of the world share a host; None in a world of one. Local."""
        world = self.whole._world
        return None if world is None else world.hosts

    @functools.cached_property
    def threads(self) -> int:
        """How many threads this rank may compute with on the CPU, beside the others of its host."""
        return threads_for(ranks_of_this_host())

    @property
    def owners(self) -> Partition:
        """Return, for each slice of a state, the ranks of this group that hold it, ascending; one
        each without replicas.
        """
        return tuple((rank,) for rank in range(self.size)) if self._owners is None else self._owners

    def lay_out(self, mesh: Mesh) -> Comm:
        """Make the groups of a mesh over this world, and return that of the ranks with this one's
        piece of the model.

        Collective in the world.  Without the axes pp and tp there is one piece, and the group is
        this communicator.
        """
        if self._world is not None:
            self._world.recorder.meshes[self._engine.name] = mesh
        pieces = mesh.groups_along(*REDUCE_AXES)
        piece = self.split(pieces, "data")
        if piece is not self:
            piece._whole = self
            piece.pieces = tuple(ranks[0] for ranks in pieces)
        if mesh.dp_replicate > 1:
            groups = mesh.groups_along("dp_replicate")
            here = [ranks for ranks in groups if set(ranks) <= set(piece.ranks)]
            piece._owners = tuple(tuple(map(piece.ranks.index, ranks)) for ranks in here)
            piece._shard = self._other(mesh.groups_along(*SHARD_AXES), "dp_shard", piece)
            piece.outer = self._other(groups, "dp_replicate", piece)
        for axis in ("tp", "sp", "pp"):
            if getattr(mesh, axis) > 1:
                piece.along[axis] = self._other(mesh.groups_along(axis), axis, piece)
        return piece

    def _other(self, groups: Partition, axis: str, holder: Comm) -> Comm:
        """Return `split`'s communicator for `holder` to hold, which is another object, or it would
        never be freed.
        """
        found = self.split(groups, axis)
        if found is not holder and found is not self:
            return found
        twin = found._over(found.ranks)
        twin._lanes = found._lanes  # of one group: what both issue is in one order
        twin._last = found._last
        return twin

    def split(self, groups: Partition, axis: str, *, is_new: bool = False) -> Comm:
        """Return the communicator of the one of these groups that this rank is in. Collective in
        the world.

        groups: of ranks of the world, disjoint; every rank is in one. axis: the mesh axis they lie
        along, which is in
        the names of their lanes. is_new: lanes of its own even where the group is this one. The new
        one counts in this one's meter. An error that a rank raises in any group of an engine
        reaches the ranks that wait in its other groups. A rank never enters calls of a group it is
        not in.
        """
        ranks = next(ranks for ranks in groups if self.ranks[self.rank] in ranks)
        if ranks == self.ranks and not is_new:
            return self
        found = self._over(ranks)
        if self._world is not None and any(len(others) > 1 for others in groups):
            # With those that are alone: all agree on names and slots
            found._join(self._world, groups, self, axis)
        if len(ranks) == 1:
            found._world = None
            found._transport = SingleRank(self.device)
        return found

    def _join(self, world: WorldContext, groups: Partition, whole: Comm, axis: str) -> None:
        """Take a name, a slot for gloo's tags and transports of its own. Collective in `whole`, the
        world's.
        """
        device = self.device
        engine = self._engine
        nccl = world.nccl_groups(groups)
        slots, free, idle = _agreed(whole, world, nccl, engine.transport)
        if engine.transport == "tcp":
            world.connect_inter_node()
        self._number = next(world.engines)  # made in the same order on every rank of this world
        engine.name = engine.name if axis else f"engine {self._number - 1}"
        self.name = f"{engine.name} {axis}".strip()
        self._lanes = {}
        world.tags.take(self.name, slots)
        self._host_transport = self._transport_between(world, self.ranks)
        self._transport = self._host_transport
        near = world.hosts.local_ranks
        self._inter_node = frozenset(
            member for member, rank in enumerate(self.ranks) if rank not in near
        )
        if device.type != "cpu":
            self._transport = HostStaged(world.gloo_over(self.ranks), self.rank, self.size, device)
        if device.type == "cuda" and not shares_gpu(world.hosts.local_size):
            pair = nccl.take(self.name, trains=engine.trains, free=free, idle=idle)
            self._transport = Nccl(self.rank, self.size, pair, device)
        weakref.finalize(
            self, _end, world, self.name, self._host_transport, self._transport
        ).atexit = False

    def _transport_between(self, world: WorldContext, ranks: Sequence[int]) -> Transport:
        """Return the transport between these ranks of the world that the engine was told to use.
        Local.
        """
        transports = {"gloo": world.gloo_over, "tcp": world.tcp_over, "fastest": world.fastest_over}
        return transports[self._engine.transport](ranks)

    def capabilities(self) -> list[Capability]:
        """Describe how tensors travel from this rank to the others, and why not faster. Local."""
        name = "between ranks"
        transport = self._transport
        if self._world is None:
            return []
        if self._engine.transport == "gloo" and self.device.type == "cpu":
            return [Capability(name, f"{transport.description}, as the configuration says")]
        return [Capability(name, transport.description, transport.limitation)]

    # -- buffers

    @property
    def reads_in_place(self) -> bool:
        """Return whether `exchange` needs no inbox."""
        return self._transport.reads_in_place

    def would_read_in_place(self, ranks: Sequence[int]) -> bool:
        """Return whether `reads_in_place` of a group of these ranks of the world, this one among
        them. Local.
        """
        world = self.whole._world
        if world is None or self.device.type != "cpu":
            return False
        return self._transport_between(world, ranks).reads_in_place

    @property
    def ranks_per_host(self) -> int:
        """Return how many ranks each of several hosts has, in runs of the world's; 1 where that is
        not so. Local.
        """
        return 1 if self.whole._world is None else self.whole._world.hosts.per_host

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat buffer in the memory that other ranks reach best; its contents are
        arbitrary. Local.
        """
        return self._transport.empty(numel, dtype)

    def symmetric_memory(self, numel: int, dtype: torch.dtype, what: str) -> SymmetricMemory | None:
        """Return memory for `numel` elements, a slice for each rank, of which every rank sees all;
        None if there is none.

        Collective within "gather".
        """
        pages = self._transport.page_sharing
        if self.size == 1:
            own = self.empty(numel, dtype).zero_()
            return SymmetricMemory(own, own)
        if pages is None or not numel:
            return None
        found: list[SymmetricMemory] = []

        def start(cid: CollectiveId) -> Wait:
            wait = pages.symmetric_memory(numel, dtype, cid)
            return lambda: found.append(wait())

        self._issue("gather", f"pages of {what}", start).wait()
        return found[0]

    def barrier_begin(self, what: str) -> None:
        """Announce that this rank has written its slices of symmetric memory.

        Until `barrier_end`, `gather_in_place` waits only until every rank has announced it.
        Collective within "gather"; does not wait.
        """
        pages = self._transport.page_sharing
        if pages is not None:
            self._barrier = self._issue("gather", f"begin {what}", pages.barrier)

    def barrier_end(self) -> None:
        """Allow slices to be written again: each `gather_in_place` is a collective of its own from
        now on.
        """
        self._barrier = None

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer, as far as this one has heard.
        Local.
        """
        return self._world is not None and self._transport.is_read(tensor)

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer any more, so that it may be written."""
        if self._world is not None and self._last is not None and self._transport.is_read(tensor):
            issued = replace(self._last, arrived=[])
            self._wait(self._world, lambda: self._transport.wait_until_read(tensor), issued)

    def progress(self) -> None:
        """Take in messages that other ranks have sent, without waiting, and issue second hops;
        called often, so only while something is expected.
        """
        self.hear()
        if self._engine.hops:
            self._engine.advance()

    def hear(self) -> None:
        """Take in messages that other ranks of this group have sent, without waiting. Local."""
        if self._transport.expects:
            self._transport.progress()

    def add_hops(self, hops: Hops) -> None:
        """Have second hops issued by this engine's waits, in whatever group, for as long as they
        live. Local.
        """
        self._engine.hops.append(weakref.ref(hops, self._engine.hops.remove))

    # -- movements

    def gather_in_place(self, memory: SymmetricMemory, what: str) -> Pending:
        """Gather what lies in symmetric memory, which moves nothing: the wait is for the ranks that
        write their slices.

        Counts the bytes that another transport would send. Collective within "gather".
        """
        if self.size == 1:
            return DONE
        full = memory.whole
        pages = self._transport.page_sharing
        self.meter.count(
            "all_gather", full.numel() // self.size * (self.size - 1) * full.element_size()
        )
        if self._barrier is not None:
            return self._barrier
        assert pages is not None
        return self._issue("gather", f"gather {what}", pages.barrier)

    def all_gather(self, full: Tensor, lane: str, what: str, kind: str = "all_gather") -> Pending:
        """Fill `full` (size * slice,) from every rank's slice; this rank's own slice must be in
        place already.

        Any dtype, the same on every rank. kind: as what the meter counts it. Collective within its
        lane. The buffer belongs to the transport until `wait()`, which raises `PeerError` if
        another rank failed or strayed.
        """
        nbytes = full.numel() // self.size * full.element_size()
        self.meter.count(kind, nbytes * (self.size - 1), nbytes * len(self._inter_node))

        def start(cid: CollectiveId) -> Wait:
            return self._until_buffers_are_read(self._transport.all_gather(full, cid), [full])

        return self._issue(lane, f"gather {what}", start)

    def exchange(
        self,
        pieces: Sequence[Tensor],
        inbox: Sequence[Tensor | None],
        lane: str,
        what: str,
        use: Use | None = None,
        kind: str = "reduce_scatter",
    ) -> Pending:
        """Send pieces[s] to rank s and receive rank s's piece into inbox[s]; own entries are
        ignored.

        The first half of a reduce-scatter: pieces and inbox are flat, of one dtype on all ranks.
        use(received) is the
        second: it is called once, at the latest by `wait()`, and with `reads_in_place`, entries of
        the inbox that are None are views of the owners' memory there. The pieces may be written
        again after `wait_until_read`; without `use`, after `wait()`, which raises `PeerError` if
        another rank failed or strayed. kind: as what the meter counts it. Collective within its
        lane.
        """
        sent = sum(
            piece.numel() * piece.element_size()
            for rank, piece in enumerate(pieces)
            if rank != self.rank
        )
        far = sum(pieces[rank].numel() * pieces[rank].element_size() for rank in self._inter_node)
        self.meter.count(kind, sent, far)

        def timed(received: Sequence[Tensor]) -> None:
            began = time.perf_counter()
            assert use is not None
            use(received)
            self.meter.sum_seconds += time.perf_counter() - began

        def start(cid: CollectiveId) -> Wait:
            if use is not None:
                return self._transport.exchange(pieces, inbox, cid, timed)
            return self._until_buffers_are_read(
                self._transport.exchange(pieces, inbox, cid, _do_nothing), pieces
            )

        return self._issue(lane, f"reduce {what}", start)

    def pass_on(self, piece: Tensor | None, box: Tensor | None, lane: str, what: str) -> Pending:
        """Send a piece to the other rank of a pair, and fill `box` with what that one sends; one of
        them may be None.

        Flat, of one dtype on both ranks. After `wait()` the box is filled; the piece may be written
        again after that and `wait_until_read`. Collective within its lane, in this group of two.
        """
        like = box if piece is None else piece
        assert like is not None and self.size == 2
        nothing = like[:0]
        there = 1 - self.rank
        pieces = [nothing, nothing]
        inbox = [nothing, nothing]
        if piece is not None:
            pieces[there] = piece
            self.meter.count("send", piece.nbytes, piece.nbytes * len(self._inter_node))
        if box is not None:
            inbox[there] = box
        return self._issue(
            lane, what, lambda cid: self._transport.exchange(pieces, inbox, cid, _do_nothing)
        )

    def _until_buffers_are_read(self, wait: Wait, buffers: Sequence[Tensor]) -> Wait:
        """Wait until the data is here and the buffers are the caller's again."""

        def both() -> None:
            wait()
            for buffer in buffers:
                self._transport.wait_until_read(buffer)

        return both

    def all_gather_rows(self, row: Tensor, what: str) -> Tensor:
        """Return every rank's row, stacked: (size, len(row)). row: one-dimensional, on the host,
        same length on every rank.

        Collective in the lane "rows"; waits.
        """
        table = torch.zeros(self.size, row.numel(), dtype=row.dtype)
        table[self.rank] = row
        self.meter.count("rows", row.nbytes * (self.size - 1), row.nbytes * len(self._inter_node))
        full = table.view(-1)
        self._issue(
            "rows", f"agree on {what}", lambda cid: self._host_transport.all_gather(full, cid)
        ).wait()
        return table

    def barrier(self, what: str) -> None:
        """Wait until every rank has come here. Collective."""
        self.all_gather_rows(torch.zeros(1, dtype=torch.uint8), what)

    def all_gather_text(self, text: str, what: str) -> list[str]:
        """Return every rank's text, by rank. Collective."""
        payload = text.encode()
        lengths = self.all_gather_rows(torch.tensor([len(payload)]), what)[:, 0]
        padded = torch.zeros(int(lengths.max()) or 1, dtype=torch.uint8)
        padded[: len(payload)] = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else padded[:0]
        )
        table = self.all_gather_rows(padded, what)
        return [
            bytes(table[rank, : int(lengths[rank])].tolist()).decode() for rank in range(self.size)
        ]

    def post_error(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one why it will not come; an error that follows from
        another rank's is not posted.
        """
        engine = self._engine
        if engine.world is not None and not engine.gave_up:
            first_line = (str(error).splitlines() or [""])[0]
            engine.has_raised = True
            engine.world.recorder.post(
                raised_in(engine.name), f"{type(error).__name__}: {first_line}"[:300]
            )

    def withdraw_error(self) -> None:
        """Withdraw a posted error: this rank goes on after all."""
        engine = self._engine
        engine.gave_up = False
        if engine.has_raised and engine.world is not None:
            engine.has_raised = False
            engine.world.recorder.withdraw(raised_in(engine.name))

    def _issue(self, lane_name: str, what: str, start: Callable[[CollectiveId], Wait]) -> Pending:
        world = self._world
        if world is None:  # a world of one: every slice is already here
            return DONE
        # A wait that ended in an error left its line for the others to read
        if world.recorder.is_waiting:
            world.recorder.withdraw("waiting")
        lane = self._lanes.get(lane_name) or self._first_use(world, lane_name)
        issued = self._last = IssuedCollective(
            lane, lane_name, lane.issued, what, time.perf_counter()
        )
        lane.log.append((lane.issued, what))
        lane.issued += 1
        poll_interval = (
            self._engine.poll_interval if self._engine.hops or self._engine.spans_hosts else None
        )
        cid = CollectiveId(
            lane.name,
            lane.number,
            issued.sequence,
            zlib.crc32(what.encode()),
            issued.arrived,
            poll_interval,
        )
        wait = self._wait_or_raise(world, issued, lambda: start(cid))
        is_here = None
        if self._transport.reports_arrival:
            is_here = functools.partial(bool, issued.arrived)
        return Pending(lambda: self._wait(world, wait, issued), is_here=is_here)

    def _first_use(self, world: WorldContext, lane_name: str) -> Lane:
        lane = self._lanes[lane_name] = world.lane(
            f"{self.name}/{lane_name}", lane_number(self._number, lane_name)
        )
        return lane

    def _wait(self, world: WorldContext, wait: Wait, issued: IssuedCollective) -> None:
        began = time.perf_counter()
        summed = self.meter.sum_seconds
        self._wait_or_raise(world, issued, wait)
        ended = time.perf_counter()
        self.meter.waited(issued.kind, ended - began - (self.meter.sum_seconds - summed))
        if self.meter.events is not None and issued.arrived:
            self.meter.events.append(
                Event(issued.kind, issued.what, issued.issued, issued.arrived[0], (began, ended))
            )
        if world.recorder.is_waiting:
            world.recorder.withdraw("waiting")
        if world.recorder.told:  # nobody may wait long enough to look, now that it is heard again
            world.recorder.tell_silences()

    def _wait_or_raise(
        self, world: WorldContext, issued: IssuedCollective, action: Callable[[], T]
    ) -> T:
        """Call what may have to wait for other ranks, until there is evidence that it waits in
        vain.

        Raises `PeerError` if a rank is gone or in another collective. Any other error is this
        rank's own (no memory, a shape, a dtype): it keeps its type, and is posted to the ranks that
        wait for this one.
        """
        began = looked = time.perf_counter()
        engine = self._engine
        while True:
            try:
                return action()
            except TimeoutError:
                engine.advance()
                now = time.perf_counter()
                error: PeerError | UsageError | None
                if (engine.hops or engine.spans_hosts) and now - looked < base.POLL_SECONDS:
                    asks = now - began > base.POLL_SECONDS
                    error = world.recorder.find_lost_host(asks=asks) if engine.spans_hosts else None
                    if error is None:
                        continue
                else:
                    looked = now
                    here = self._position(world, issued)
                    error = world.recorder.find_desync(here, engine.name)
                    if error is None:
                        world.recorder.tell_absent(here, engine.name, now - began)
                        error = self._find_lone_call(world)
                if error is not None:
                    engine.gave_up = True
                    raise error from None
                # A rank that waits for a far one is still to hear its near ones
                self._transport.progress()
            except ConnectionLost as caught:
                raise self._connection_lost(world, issued.what, caught) from None
            except Exception as error:
                self.post_error(error)
                raise

    @contextmanager
    def lone_call(self, what: str) -> Iterator[None]:
        """Open a block of collectives that programs may begin on some ranks only, as a mistake.

        A wait in it ends with `UsageError` if another member waits for this rank in a call of
        torch.distributed's own. The other ranks of the engine raise at their next collective.
        """
        before = self._engine.lone_call
        self._engine.lone_call = what
        try:
            yield
        finally:
            self._engine.lone_call = before

    def _find_lone_call(self, world: WorldContext) -> UsageError | None:
        """Return the error for a call that this rank has made and another one has not; None if it
        may still make it.
        """
        engine = self._engine
        if not engine.lone_call:
            return None
        calls = [
            (rank, outside_call(world.recorder, rank)) for rank in self.ranks if rank != world.rank
        ]
        rank, call = next(((rank, call) for rank, call in calls if call), (-1, ""))
        if not call:
            return None
        error = UsageError(
            f"{engine.lone_call} was called on rank {world.rank}, and rank {rank} waits for it in "
            f"torch.distributed's {call}().",
            f"{engine.lone_call} gathers what is sharded, so every rank must call it.",
            f"call {engine.lone_call} on all ranks, and use the result on one.",
        )
        # No later forward of this rank withdraws it: its collectives are one ahead of the others'
        # from now on.
        world.recorder.post(raised_in(engine.name), f"{type(error).__name__}: {error.what}"[:300])
        return error

    def _position(self, world: WorldContext, issued: IssuedCollective) -> Position:
        return world.position(issued.lane.name, issued.sequence, self.ranks)

    def _connection_lost(self, world: WorldContext, what: str, caught: ConnectionLost) -> PeerError:
        """Return the error for a broken connection; the flight recorder may know more than the
        socket does.

        Ranks that share no group with the one that is gone are told whom this one lost: they wait
        for this one.
        """
        engine = self._engine
        recorder = world.recorder
        engine.gave_up = True
        # Seen here, whatever others have made of it since
        if caught.is_silence and caught.rank is not None:
            return recorder.find_lost_host(asks=True) or recorder.host_lost([caught.rank])
        if error := recorder.find_failure(f"rank {world.rank} was in '{what}'", engine.name):
            return error
        me = recorder.name(world.rank, engine.name)
        other = "another rank" if caught.rank is None else recorder.name(caught.rank, engine.name)
        found = f"{me} lost its connection to {other} in '{what}': {first_line(caught)}"
        recorder.post(LOST, found)
        return PeerError(found, KILLED_WHY, KILLED_FIX)


@contextmanager
def propagate_errors(comm: Comm) -> Iterator[None]:
    """Open a block whose error is told to the ranks that wait for this one."""
    try:
        yield
    except Exception as error:
        comm.post_error(error)
        raise


def scatter(comm: Comm, pieces: Sequence[Tensor], into: Tensor, what: str, source: int = 0) -> None:
    """Copy pieces[r] of the rank `source` into rank r's `into`; the source's own stays. Collective
    within "gather".

    into: one-dimensional, as long as the piece; pieces of other ranks than the source are ignored.
    """
    nothing = into[:0]
    outgoing = pieces if comm.rank == source else [nothing] * comm.size
    incoming = [into if peer == source != comm.rank else nothing for peer in range(comm.size)]
    comm.exchange(outgoing, incoming, "gather", what).wait()


def _encrypting_transport(transport: str, world: WorldContext, device: torch.device) -> str:
    """Return the transport, and where what leaves a host is to be encrypted, the one that does.
    Raises `UsageError` for another one that was named.
    """
    if not uses_tls() or world.hosts.is_one:
        return transport
    if transport == "gloo" or device.type != "cpu":
        raise UsageError(
            f"{'gloo' if device.type == 'cpu' else 'NCCL'} encrypts nothing, and {TLS} is set.",
            "Tensors would travel between hosts for everybody to read.",
            'leave "transport" out, train on CPUs, or give the job a network of its own and '
            "leave --tls out.",
        )
    return "tcp"


def _agreed(
    comm: Comm, world: WorldContext, nccl: NcclGroups, transport: str
) -> tuple[int, int, int]:
    """Agree on the slots that are free on every rank (`Tags`), and the pairs of NCCL groups that
    are free or idle (`NcclGroups`).

    Collective. Raises `ModelMismatchError` if ranks were told to use different transports.
    """
    mine = [TRANSPORTS.index(transport), world.tags.free_slots(), nccl.free(), nccl.idle()]
    table = comm.all_gather_rows(torch.tensor(mine), "a new engine's transport")
    if len(set(table[:, 0].tolist())) > 1:
        told = " and ".join(sorted({TRANSPORTS[int(each)] for each in table[:, 0]}))
        raise ModelMismatchError(
            f"ranks differ in their transport: they are told to use {told}.",
            "Two ranks that talk in different ways never meet.",
            "pass the same configuration on every rank.",
        )
    slots, free, idle = (
        functools.reduce(operator.and_, table[:, column].tolist()) for column in (1, 2, 3)
    )
    return slots, free, idle


def _end(world: WorldContext, engine: str, *transports: Transport) -> None:
    """Release the transports of one communicator."""
    world.end_engine(engine)
    for transport in transports:
        transport.end_engine(engine)


def _do_nothing(received: Sequence[Tensor]) -> None:
    """Leave the received pieces in place."""


# Write elements [start, stop) of a piece into an fp32 tensor
Decode = Callable[[Tensor, int, int, Tensor], None]


def ordered_sum(
    pieces: Sequence[Tensor],
    out: Tensor,
    scratch: Tensor,
    *,
    divisor: float = 1.0,
    add: bool = False,
    decode: Decode | None = None,
) -> None:
    """out = (pieces[0] + pieces[1] + ...) / divisor, summed in that order in fp32, rounded once;
    `add`: out += that.

    pieces: one per rank, one-dimensional, all of out's length, any float dtype; with `decode`, what
    it makes these of.
    scratch: fp32; its size is the tile's, and with `decode` twice that. This is the sum order of
    the truth contract; a native reduce-scatter keeps neither the order nor fp32 partials.
    """
    if decode is None:
        threads = threads_for(ranks_of_this_host())
        add_rows(pieces, out, scratch, divisor=divisor, add=add, threads=threads)
        return
    tile = scratch.numel() // 2
    for start in range(0, out.numel(), tile):
        stop = min(start + tile, out.numel())
        total = scratch[: stop - start]
        summand = scratch[tile : tile + stop - start]
        decode(pieces[0], start, stop, total)
        for piece in pieces[1:]:
            decode(piece, start, stop, summand)
            total.add_(summand)
        scale_and_store(total, out[start:stop], divisor, add=add)
