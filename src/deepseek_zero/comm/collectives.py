"""Collectives on flat tensors: all-gather, exchange, sums and small rows.

Each call returns a `Pending`, and its data may be used after `wait()`. A sum adds the ranks in
ascending order with fp32 partials (`ordered_sum`), so every stage and every transport gives the
same bits. A message is identified by its lane, its place in the lane and a check of its name
(`comm/ids.py`). A rank that calls a different collective finds no partner, and the flight recorder
(`comm/flight_recorder.py`) turns the hang into an error that names it.
"""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor

from ..base.capabilities import Capability
from ..base.errors import ModelMismatchError, UsageError
from ..base.launch import TLS, uses_tls
from ..base.mesh import REDUCE_AXES, SHARD_AXES, Mesh, shares_gpu
from ..base.meter import Meter
from ..kernels.sums import add_rows, scale_and_store
from ..kernels.threads import threads_for
from .bootstrap import Hosts, padded
from .context import Partition, WorldContext, ranks_of_this_host
from .ids import WORLD_LANE, CollectiveId
from .in_place import InPlaceGathers
from .lanes import Lanes
from .pending import Pending
from .transports.base import Inbox, SingleRank, Transport, Use, Wait, leave_in_place
from .transports.composed import HostStaged
from .transports.nccl import Nccl, NcclGroups
from .waits import Waits

TRANSPORTS = ("fastest", "gloo", "tcp")


class Comm:
    """The collectives of one group of ranks.

    A communicator is a view of the world's transport over these ranks. The constructor returns the
    communicator of the world; `split` returns those of groups. `rank` and `size` refer to the
    group, and `ranks` are its members as world ranks. The messages of two engines are kept apart by
    the names of their lanes.

    Args:
        device: Device of the tensors to send.
        transport: "fastest" and "tcp" use shared memory between CPU ranks of one host, "gloo" does
            not. Between hosts, "tcp" uses this library's sockets, and the others use gloo.
        trains: False for a communicator that only builds or loads a model, and waits for each of
            its collectives.
        world: The connections to use. None: those of torch.distributed's world, or a world of one
            rank if torch.distributed is not initialized.

    Raises:
        UsageError: TLS is required, and the transport cannot encrypt.
        ModelMismatchError: Ranks use different transports.
        PeerError: With "tcp", a rank cannot connect to another one.

    Note:
        Collective: every rank of the world must create it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        transport: str = "fastest",
        trains: bool = True,
        world: WorldContext | None = None,
    ) -> None:
        self.device = device
        self.meter = Meter()
        self.waits = Waits()
        self.trains = trains
        self.hosts = Hosts(0, ("this host",))
        # For each piece of the model, the first world rank that holds it
        self.pieces: tuple[int, ...] = (0,)
        self._set_ranks((0,), 0)
        self.transport_name = transport
        world = world or WorldContext.of_this_world_if_any()
        if world is not None:
            self.waits.world = world
            self.transport_name = _encrypting_transport(transport, world, device)
            self.hosts = world.hosts
            self._set_ranks(world.ranks, world.rank)
            # The engine's name and slot are agreed on in the lane of the world
            self._use(Lanes(world, world.gloo, self.ranks, self.waits, self.meter, WORLD_LANE))
            self._join(world, (world.ranks,), self, "")
        # Threads for sums and updates; counted once, because it reads files of the system
        self.threads = threads_for(ranks_of_this_host())

    def _set_ranks(self, ranks: tuple[int, ...], rank: int) -> None:
        """Make this a communicator of these ranks without connections.

        `rank` is the index of this rank in `ranks`.
        """
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._whole: Comm | None = None  # Set by `lay_out`
        self._shard: Comm | None = None
        # The ranks that hold the same slices as this rank, if there are any
        self.outer: Comm | None = None
        self.along: dict[str, Comm] = {}  # By axis ("tp", "sp", "pp"), for axes with several ranks
        self._owners: Partition | None = None
        self.inter_node: frozenset[int] = frozenset()  # Group ranks on other hosts
        self._use(Lanes(None, SingleRank(self.device), ranks, self.waits, self.meter))

    def _use(self, lanes: Lanes, host_transport: Transport | None = None) -> None:
        """Send through these lanes from now on.

        `host_transport` sends rows, which are CPU tensors. None: the transport of the lanes.
        """
        self.lanes = lanes
        self.host_transport = host_transport or lanes.transport
        self.in_place = InPlaceGathers(lanes)

    def _over(self, ranks: tuple[int, ...]) -> Comm:
        """Return a communicator of the same engine over some ranks, without connections."""
        found = copy(self)
        found._set_ranks(ranks, ranks.index(self.ranks[self.rank]))
        return found

    @property
    def whole(self) -> Comm:
        """Return the communicator of all ranks of the world."""
        return self if self._whole is None else self._whole

    @property
    def shard(self) -> Comm:
        """Return the communicator of the ranks over which states are sharded.

        This is `self` unless the mesh has a replicate axis.
        """
        return self if self._shard is None else self._shard

    @property
    def owners(self) -> Partition:
        """Return, for each slice of a state, the group ranks that hold it, ascending.

        Without replicas, each slice has one owner.
        """
        return tuple((rank,) for rank in range(self.size)) if self._owners is None else self._owners

    def lay_out(self, mesh: Mesh) -> Comm:
        """Create the groups of a mesh over this world.

        Without the axes pp and tp the model has one piece, and the result is this communicator.

        Args:
            mesh: The mesh of the whole world.

        Returns:
            The communicator of the ranks that hold the same piece of the model as this rank.

        Note:
            Collective: every rank of the world must call it.
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
        """Return `split`'s communicator, or a copy of it if `holder` would hold itself.

        A communicator that refers to itself, or to `self`, would never be freed.
        """
        found = self.split(groups, axis)
        if found is not holder and found is not self:
            return found
        twin = found._over(found.ranks)
        twin.inter_node = found.inter_node
        # Shared lanes: both issue their collectives in one order
        twin._use(found.lanes, found.host_transport)
        return twin

    def split(self, groups: Partition, axis: str, *, is_new: bool = False) -> Comm:
        """Return the communicator of the group in `groups` that contains this rank.

        Its bytes and times are counted in the meter of this communicator. An error that a rank
        raises in any group of an engine reaches the ranks that wait in its other groups.

        Args:
            groups: Disjoint groups of world ranks; every rank is in one.
            axis: The mesh axis of the groups, part of the names of their lanes.
            is_new: Whether to create separate lanes even if the group equals this one.

        Returns:
            A communicator whose ranks are numbered from 0 in the order of the group.

        Note:
            Collective: every rank of the world must call it.
        """
        ranks = next(ranks for ranks in groups if self.ranks[self.rank] in ranks)
        if ranks == self.ranks and not is_new:
            return self
        found = self._over(ranks)
        world = self.lanes.world
        if world is not None and any(len(others) > 1 for others in groups):
            # Groups of one rank join too: all ranks agree on names and slots
            found._join(world, groups, self, axis)
        if len(ranks) == 1:
            found.lanes.world = None
            found.lanes.transport = SingleRank(self.device)
        return found

    def _join(self, world: WorldContext, groups: Partition, whole: Comm, axis: str) -> None:
        """Take a name, a slot for gloo's tags, and transports.

        Collective over `whole`, the communicator of the world.
        """
        device = self.device
        waits = self.waits
        nccl = world.nccl_groups(groups)
        slots, free, idle = _agreed(whole, world, nccl, self.transport_name)
        if self.transport_name == "tcp":
            world.connect_inter_node()
        # Engines are created in the same order on every rank of the world
        number = next(world.engines)
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
        """Return a description of the transport, and why no faster one is used."""
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
        """Return whether `exchange` reads other ranks' memory and needs no inbox."""
        return self.lanes.transport.reads_in_place

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat buffer in the memory that the transport prefers.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.

        Returns:
            A 1-D tensor on the communicator's device.
        """
        return self.lanes.transport.empty(numel, dtype)

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer.

        The answer uses the messages that this rank has received so far.
        """
        return self.lanes.world is not None and self.lanes.transport.is_read(tensor)

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer, so that it may be written."""
        if self.is_read(tensor):
            self.lanes.wait_again(lambda: self.lanes.transport.wait_until_read(tensor))

    def progress(self) -> None:
        """Receive messages and issue the second hops of collectives by host, without waiting.

        It is called often, so it does work only while a message is expected.
        """
        self.hear()
        self.waits.advance()

    def hear(self) -> None:
        """Receive the messages that other ranks of this group have sent, without waiting."""
        if self.lanes.transport.expects:
            self.lanes.transport.progress()

    # -- movements

    def all_gather(self, full: Tensor, lane: str, what: str, kind: str = "all_gather") -> Pending:
        """Fill `full` with the slices of all ranks (all-gather).

        The transport owns the buffer until `wait()` returns. `wait()` raises `PeerError` if another
        rank failed or called a different collective.

        Args:
            full: Shape ``(size * slice,)``, any dtype, the same on every rank. This rank's slice
                must be in place.
            lane: Name of the sequence of collectives to issue it in; within it, all ranks issue the
                same collectives in the same order.
            what: The name of the collective, the same on all ranks.
            kind: The kind under which the meter counts the bytes.

        Returns:
            A handle; `full` may be read after its `wait()`.

        Note:
            Collective: all ranks of the group must issue it in the same order within the lane.
        """
        nbytes = full.nbytes // self.size
        self.meter.count(kind, nbytes * (self.size - 1), nbytes * len(self.inter_node))

        transport = self.lanes.transport

        def start(cid: CollectiveId) -> Wait:
            return _until_read(transport, transport.all_gather(full, cid), [full])

        return self.lanes.issue(lane, f"gather {what}", start)

    def exchange(
        self,
        pieces: Sequence[Tensor],
        inbox: Inbox,
        lane: str,
        what: str,
        use: Use | None = None,
        kind: str = "reduce_scatter",
    ) -> Pending:
        """Send `pieces[r]` to rank r, and receive the piece of rank r into `inbox[r]`.

        This is the first half of a reduce-scatter, and `use` is the second half. The pieces may be
        written again after `wait_until_read`, or without `use` after `wait()`. `wait()` raises
        `PeerError` if another rank failed or called a different collective.

        Args:
            pieces: One flat tensor per rank, of one dtype on all ranks; this rank's own is not
                sent.
            inbox: One flat tensor per rank; this rank's own is ignored. With `reads_in_place` a
                tensor may be None, and `use` gets a view of the owner's memory instead.
            lane: Name of the sequence of collectives (lane) to issue it in.
            what: The name of the collective, the same on all ranks.
            use: Called once with the received pieces, at the latest by `wait()`.
            kind: The kind under which the meter counts the bytes.

        Returns:
            A handle; `wait()` returns after `use` was called.

        Note:
            Collective: all ranks of the group must issue it in the same order within the lane.
        """
        sent = sum(piece.nbytes for rank, piece in enumerate(pieces) if rank != self.rank)
        self.meter.count(kind, sent, sum(pieces[rank].nbytes for rank in self.inter_node))

        def timed(received: Sequence[Tensor]) -> None:
            began = time.perf_counter()
            assert use is not None
            use(received)
            self.meter.sum_seconds += time.perf_counter() - began

        transport = self.lanes.transport

        def start(cid: CollectiveId) -> Wait:
            if use is not None:
                return transport.exchange(pieces, inbox, cid, timed)
            wait = transport.exchange(pieces, inbox, cid, leave_in_place)
            return _until_read(transport, wait, pieces)

        return self.lanes.issue(lane, f"reduce {what}", start)

    def pass_on(self, piece: Tensor | None, box: Tensor | None, lane: str, what: str) -> Pending:
        """Exchange tensors with the other rank of a pair.

        After `wait()` the box is filled. The piece may be written again after `wait()` and
        `wait_until_read`.

        Args:
            piece: Flat tensor to send, or None. Both ranks use the same dtype.
            box: Flat tensor to fill, or None.
            lane: Name of the sequence of collectives (lane) to issue it in.
            what: The name of the collective, the same on both ranks.

        Returns:
            A handle; the box may be read after its `wait()`.

        Note:
            Collective: both ranks of the group must issue it in the same order within the lane.
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
            lane, what, lambda cid: transport.exchange(pieces, inbox, cid, leave_in_place)
        )

    def all_gather_rows(self, row: Tensor, what: str) -> Tensor:
        """Gather one row per rank, and wait for the result.

        Args:
            row: One-dimensional CPU tensor, of the same length on every rank.
            what: The name of the collective, the same on all ranks.

        Returns:
            A tensor of shape ``(size, len(row))``.

        Note:
            Collective: every rank of the group must call it.
        """
        table = torch.zeros(self.size, row.numel(), dtype=row.dtype, device="cpu")
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
        """Wait until every rank of the group has called it.

        Note:
            Collective: every rank of the group must call it.
        """
        self.all_gather_rows(torch.zeros(1, dtype=torch.uint8, device="cpu"), what)

    def all_gather_text(self, text: str, what: str) -> list[str]:
        """Return the texts of all ranks, by rank.

        Args:
            text: Text of this rank; the length may differ between ranks.
            what: The name of the collective, the same on all ranks.

        Returns:
            One text per rank, in rank order.

        Note:
            Collective: every rank of the group must call it.
        """
        payload = text.encode()
        lengths = self.all_gather_rows(torch.tensor([len(payload)], device="cpu"), what)[:, 0]
        table = self.all_gather_rows(padded(payload, int(lengths.max())), what)
        return [
            row[:length].numpy().tobytes().decode()
            for row, length in zip(table, lengths.tolist(), strict=True)
        ]


@contextmanager
def propagate_errors(comm: Comm) -> Iterator[None]:
    """Send an error of the block to the ranks that wait for this rank, and raise it."""
    try:
        yield
    except Exception as error:
        comm.waits.post_error(error)
        raise


def scatter(comm: Comm, pieces: Sequence[Tensor], into: Tensor, what: str, source: int = 0) -> None:
    """Copy `pieces[r]` of the source rank into `into` of rank r.

    The source's own piece is not copied.

    Args:
        comm: The communicator of the ranks that take part.
        pieces: One tensor per rank, on any device; read on the source only.
        into: One-dimensional output, as long as the piece.
        what: The name of the collective, the same on all ranks.
        source: The rank that sends.

    Note:
        Collective: every rank of the group must call it.
    """
    # NCCL sends nothing from the host, where the values of a model may be
    nothing = into[:0].to(comm.device)
    there = into
    outgoing = [nothing] * comm.size
    if comm.rank == source:
        moved = {id(piece): piece.to(comm.device) for piece in pieces}
        outgoing = [moved[id(piece)] for piece in pieces]
    else:
        there = into.to(comm.device)
    incoming = [there if peer == source != comm.rank else nothing for peer in range(comm.size)]
    comm.exchange(outgoing, incoming, "gather", what).wait()
    if there is not into:
        into.copy_(there)


def _encrypting_transport(transport: str, world: WorldContext, device: torch.device) -> str:
    """Return a transport that encrypts between hosts if TLS is on, else the given one.

    Raises `UsageError` if TLS is on and the given transport or device cannot encrypt.
    """
    if not uses_tls() or world.hosts.is_one:
        return transport
    if transport == "gloo" or device.type != "cpu":
        name = "gloo" if device.type == "cpu" else "NCCL"
        raise UsageError(
            f"{name} does not encrypt, but {TLS} is set.",
            "Tensors would be sent between hosts unencrypted.",
            'remove "transport", train on CPUs, or use a private network and remove --tls.',
        )
    return "tcp"


def _agreed(
    comm: Comm, world: WorldContext, nccl: NcclGroups, transport: str
) -> tuple[int, int, int]:
    """Return the slots, free NCCL pairs and idle NCCL pairs common to all ranks.

    See `Tags` and `NcclGroups` for the three bit masks. Collective. Raises `ModelMismatchError` if
    ranks use different transports.
    """
    mine = [TRANSPORTS.index(transport), world.tags.free_slots(), nccl.free(), nccl.idle()]
    table = comm.all_gather_rows(torch.tensor(mine, device="cpu"), "a new engine's transport")
    if len(set(table[:, 0].tolist())) > 1:
        told = " and ".join(sorted({TRANSPORTS[int(each)] for each in table[:, 0]}))
        raise ModelMismatchError(
            f"ranks differ in their transport: they are configured to use {told}.",
            "Ranks with different transports cannot communicate.",
            "pass the same configuration on every rank.",
        )
    slots, free, idle = (
        functools.reduce(operator.and_, table[:, column].tolist()) for column in (1, 2, 3)
    )
    return slots, free, idle


def _end(world: WorldContext, engine: str, *transports: Transport) -> None:
    world.end_engine(engine)
    for transport in transports:
        transport.end_engine(engine)


def would_read_in_place(comm: Comm, ranks: Sequence[int]) -> bool:
    """Return whether a group of these ranks would have `reads_in_place`.

    Args:
        comm: A communicator of the engine.
        ranks: World ranks, including this one.

    Returns:
        True if all of these ranks can map each other's memory.
    """
    world = comm.whole.lanes.world
    if world is None or comm.device.type != "cpu":
        return False
    return world.transport_over(comm.transport_name, ranks).reads_in_place


def _until_read(transport: Transport, wait: Wait, buffers: Sequence[Tensor]) -> Wait:
    """Return a wait that returns when the data is here and no rank reads the buffers."""

    def both() -> None:
        wait()
        for buffer in buffers:
            transport.wait_until_read(buffer)

    return both


# Writes elements [start, stop) of a piece into an fp32 tensor
Decode = Callable[[Tensor, int, int, Tensor], None]


def ordered_sum(
    pieces: Sequence[Tensor],
    out: Tensor,
    scratch: Tensor,
    *,
    divisor: float = 1.0,
    add: bool = False,
    decode: Decode | None = None,
    threads: int = 1,
) -> None:
    """Sum the pieces in order in fp32, divide, and round once.

    Computes ``out = (pieces[0] + pieces[1] + ...) / divisor``. This order is part of the numerical
    contract. A native reduce-scatter keeps neither the order nor fp32 partials.

    Args:
        pieces: One one-dimensional tensor per rank, all of the length of `out`, of any float dtype.
            With `decode`, encoded pieces.
        out: Output, one-dimensional.
        scratch: fp32 scratch for one tile, or for two tiles with `decode`.
        divisor: Divides the sum.
        add: Whether to add the result to `out` instead of overwriting it.
        decode: Decodes a range of a piece into an fp32 tensor.
        threads: The largest number of threads (`Comm.threads`). It has no effect with `decode`.
    """
    if decode is None:
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
