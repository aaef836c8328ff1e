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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.capabilities import Capability
from ..base.errors import ModelMismatchError, UsageError
from ..base.launch import TLS, uses_tls
from ..base.mesh import REDUCE_AXES, SHARD_AXES, Mesh, shares_gpu
from ..base.meter import Meter
from ..kernels.compiler import threads_for
from ..kernels.sums import add_rows, scale_and_store
from .bootstrap import Hosts
from .context import Partition, WorldContext, ranks_of_this_host
from .ids import WORLD_LANE, CollectiveId
from .in_place import InPlaceGathers
from .lanes import Lanes
from .pending import Pending
from .transports.base import SingleRank, Transport, Use, Wait
from .transports.composed import HostStaged
from .transports.nccl import Nccl, NcclGroups
from .waits import Waits

TRANSPORTS = ("fastest", "gloo", "tcp")


class Comm:
    """The collectives of one group of ranks: a view of the world's transport over these ranks.

    Making one is collective in the world, and gives the world's; `split` gives groups of it.
    `rank` and `size` are the group's; `ranks` are its members as the world counts them.  The
    name of its lanes keeps two engines' messages apart.

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
        waits: Waits,
        ranks: tuple[int, ...],
        rank: int,
    ) -> None:
        """Become the communicator of these ranks, with no connection and nothing under way.

        rank: this one's place among them.
        """
        self.meter = meter
        self.device = device
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.waits = waits
        self.hosts = Hosts(0, ("this host",))
        self._whole: Comm | None = None  # the groups of a mesh
        self._shard: Comm | None = None
        # The ranks that hold the same slices as this one, if there are any
        self.outer: Comm | None = None
        self.along: dict[str, Comm] = {}  # by axis ("tp", "sp", "pp"), if it has several ranks
        self._owners: Partition | None = None
        # Of each piece of the model the first rank of the world that has it
        self.pieces: tuple[int, ...] = (0,)
        self.inter_node: frozenset[int] = frozenset()  # members on other hosts
        self._use(Lanes(None, SingleRank(device), ranks, waits, meter))

    def __init__(
        self,
        device: torch.device,
        *,
        transport: str = "fastest",
        trains: bool = True,
        world: WorldContext | None = None,
    ) -> None:
        self.trains = trains
        self._begin(device, Meter(), Waits(), (0,), 0)
        self.transport_name = transport
        world = world or WorldContext.of_this_world_if_any()
        if world is not None:
            self.waits.world = world
            self.transport_name = _encrypting_transport(transport, world, device)
            self.hosts = world.hosts
            self.rank = world.rank
            self.size = world.size
            self.ranks = world.ranks
            # an engine's name and slot are agreed on in the world's own lane
            self._use(Lanes(world, world.gloo, self.ranks, self.waits, self.meter, WORLD_LANE))
            self._join(world, (world.ranks,), self, "")
        self.threads = threads_for(ranks_of_this_host())

    def _use(self, lanes: Lanes, host_transport: Transport | None = None) -> None:
        """Send through these lanes from now on.

        host_transport: carries rows, which are on the host; None for that of the lanes.
        """
        self.lanes = lanes
        self.host_transport = host_transport or lanes.transport
        self.in_place = InPlaceGathers(lanes)

    def _over(self, ranks: tuple[int, ...]) -> Comm:
        """Return a communicator of the same engine over some of this one's ranks, with no
        connection.
        """
        found = object.__new__(Comm)
        rank = ranks.index(self.ranks[self.rank])
        found._begin(self.device, self.meter, self.waits, ranks, rank)
        found.trains = self.trains
        found.threads = self.threads
        found.transport_name = self.transport_name
        found.hosts = self.hosts
        found.pieces = self.pieces
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
        if self.lanes.world is not None:
            self.lanes.world.recorder.meshes[self.waits.name] = mesh
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
        twin.inter_node = found.inter_node
        twin._use(found.lanes, found.host_transport)  # what both issue is in one order
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
        world = self.lanes.world
        if world is not None and any(len(others) > 1 for others in groups):
            # With those that are alone: all agree on names and slots
            found._join(world, groups, self, axis)
        if len(ranks) == 1:
            found.lanes.world = None
            found.lanes.transport = SingleRank(self.device)
        return found

    def _join(self, world: WorldContext, groups: Partition, whole: Comm, axis: str) -> None:
        """Take a name, a slot for gloo's tags and transports of its own. Collective in `whole`, the
        world's.
        """
        device = self.device
        waits = self.waits
        nccl = world.nccl_groups(groups)
        slots, free, idle = _agreed(whole, world, nccl, self.transport_name)
        if self.transport_name == "tcp":
            world.connect_inter_node()
        number = next(world.engines)  # made in the same order on every rank of this world
        if not axis:
            waits.name = f"engine {number - 1}"
        name = f"{waits.name} {axis}".strip()
        world.tags.take(name, slots)
        host_transport = world.transport_over(self.transport_name, self.ranks)
        transport = host_transport
        near = world.hosts.local_ranks
        self.inter_node = frozenset(
            member for member, rank in enumerate(self.ranks) if rank not in near
        )
        if device.type != "cpu":
            transport = HostStaged(world.gloo_over(self.ranks), self.rank, self.size, device)
        if device.type == "cuda" and not shares_gpu(world.hosts.local_size):
            pair = nccl.take(name, trains=self.trains, free=free, idle=idle)
            transport = Nccl(self.rank, self.size, pair, device)
        lanes = Lanes(world, transport, self.ranks, waits, self.meter, name, number)
        self._use(lanes, host_transport)
        weakref.finalize(lanes, _end, world, name, host_transport, transport).atexit = False

    def capabilities(self) -> list[Capability]:
        """Describe how tensors travel from this rank to the others, and why not faster. Local."""
        name = "between ranks"
        transport = self.lanes.transport
        if self.lanes.world is None:
            return []
        if self.transport_name == "gloo" and self.device.type == "cpu":
            return [Capability(name, f"{transport.description}, as the configuration says")]
        return [Capability(name, transport.description, transport.limitation)]

    # -- buffers

    @property
    def reads_in_place(self) -> bool:
        """Return whether `exchange` needs no inbox."""
        return self.lanes.transport.reads_in_place

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat buffer in the memory that other ranks reach best; its contents are
        arbitrary. Local.
        """
        return self.lanes.transport.empty(numel, dtype)

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer, as far as this one has heard.
        Local.
        """
        return self.lanes.world is not None and self.lanes.transport.is_read(tensor)

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer any more, so that it may be written."""
        if self.is_read(tensor):
            self.lanes.wait_again(lambda: self.lanes.transport.wait_until_read(tensor))

    def progress(self) -> None:
        """Take in messages that other ranks have sent, without waiting, and issue second hops;
        called often, so only while something is expected.
        """
        self.hear()
        self.waits.advance()

    def hear(self) -> None:
        """Take in messages that other ranks of this group have sent, without waiting. Local."""
        if self.lanes.transport.expects:
            self.lanes.transport.progress()

    # -- movements

    def all_gather(self, full: Tensor, lane: str, what: str, kind: str = "all_gather") -> Pending:
        """Fill `full` (size * slice,) from every rank's slice; this rank's own slice must be in
        place already.

        Any dtype, the same on every rank. kind: as what the meter counts it. Collective within its
        lane. The buffer belongs to the transport until `wait()`, which raises `PeerError` if
        another rank failed or strayed.
        """
        nbytes = full.numel() // self.size * full.element_size()
        self.meter.count(kind, nbytes * (self.size - 1), nbytes * len(self.inter_node))

        transport = self.lanes.transport

        def start(cid: CollectiveId) -> Wait:
            return _until_read(transport, transport.all_gather(full, cid), [full])

        return self.lanes.issue(lane, f"gather {what}", start)

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
        far = sum(pieces[rank].numel() * pieces[rank].element_size() for rank in self.inter_node)
        self.meter.count(kind, sent, far)

        def timed(received: Sequence[Tensor]) -> None:
            began = time.perf_counter()
            assert use is not None
            use(received)
            self.meter.sum_seconds += time.perf_counter() - began

        transport = self.lanes.transport

        def start(cid: CollectiveId) -> Wait:
            if use is not None:
                return transport.exchange(pieces, inbox, cid, timed)
            wait = transport.exchange(pieces, inbox, cid, _do_nothing)
            return _until_read(transport, wait, pieces)

        return self.lanes.issue(lane, f"reduce {what}", start)

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
            self.meter.count("send", piece.nbytes, piece.nbytes * len(self.inter_node))
        if box is not None:
            inbox[there] = box
        transport = self.lanes.transport
        return self.lanes.issue(
            lane, what, lambda cid: transport.exchange(pieces, inbox, cid, _do_nothing)
        )

    def all_gather_rows(self, row: Tensor, what: str) -> Tensor:
        """Return every rank's row, stacked: (size, len(row)). row: one-dimensional, on the host,
        same length on every rank.

        Collective in the lane "rows"; waits.
        """
        table = torch.zeros(self.size, row.numel(), dtype=row.dtype)
        table[self.rank] = row
        self.meter.count("rows", row.nbytes * (self.size - 1), row.nbytes * len(self.inter_node))
        full = table.view(-1)
        transport = self.host_transport
        pending = self.lanes.issue(
            "rows", f"agree on {what}", lambda cid: transport.all_gather(full, cid)
        )
        pending.wait()
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


@contextmanager
def propagate_errors(comm: Comm) -> Iterator[None]:
    """Open a block whose error is told to the ranks that wait for this one."""
    try:
        yield
    except Exception as error:
        comm.waits.post_error(error)
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


def would_read_in_place(comm: Comm, ranks: Sequence[int]) -> bool:
    """Return whether `reads_in_place` of a group of these ranks of the world. Local.

    ranks: this rank is one of them.
    """
    world = comm.whole.lanes.world
    if world is None or comm.device.type != "cpu":
        return False
    return world.transport_over(comm.transport_name, ranks).reads_in_place


def _until_read(transport: Transport, wait: Wait, buffers: Sequence[Tensor]) -> Wait:
    """Wait until the data is here and the buffers are the caller's again."""

    def both() -> None:
        wait()
        for buffer in buffers:
            transport.wait_until_read(buffer)

    return both


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
