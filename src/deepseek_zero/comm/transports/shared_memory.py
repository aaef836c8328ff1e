"""Exchange between ranks of one host through shared memory.

A rank reads a piece in its owner's memory. Buffers to send come from `empty`. An offer is a message
with the position of a piece in its owner's segment, and the reader answers when it has read the
piece. Sharded weights are in `SymmetricMemory` that every rank maps whole, so gathering them copies
nothing. Other ranks' pages are mapped copy-on-write, so no in-place edit leaves its process.

`LocalSockets` carries the messages, which provide ordering, file descriptors and notice of a dead
process. A message passes through the kernel, which orders memory on every machine: bytes written to
shared pages before a send are visible after the receive. The kernel closes the sockets of a process
however it ends, so its end is known and not guessed.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import UsageError
from ...base.memory import Segment
from ..bootstrap import Hosts, all_gather_text
from ..ids import CollectiveId, engine_of, tag_of
from . import base
from .base import (
    ConnectionLost,
    Inbox,
    SymmetricMemory,
    Transport,
    Use,
    Wait,
    leave_in_place,
    poll_interval_of,
)

NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
# A wait spins this long before it sleeps, because waking up costs about as much
SPIN_SECONDS = 50e-6
CONNECT_SECONDS = 30.0
RETRY_SECONDS = 0.001  # Between attempts to send to a rank whose queue is full
INLINE_BYTES = 1 << 14  # Pieces up to this size are sent in the message itself
_HEADER = struct.Struct("<BxxxIQQQQ")
_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


@dataclass
class InFlightReceive:
    """The pieces that this rank receives in one collective.

    Attributes:
        boxes: By rank, the tensor to copy to; None if the piece is read in its owner's memory.
        like: A tensor with the dtype of the pieces.
        use: Called with the received pieces by rank.
        awaiting: The ranks whose pieces are not here yet.
        cid: The identity of the collective.
    """

    boxes: Mapping[int, Tensor | None]
    like: Tensor
    use: Callable[[Mapping[int, Tensor]], None]
    awaiting: set[int]
    cid: CollectiveId


@dataclass(eq=False)
class ExportedSegment:
    """A segment of this rank that others may read.

    Attributes:
        number: The number by which messages refer to it.
        address: The address at which this rank maps it.
        segment: The segment.
        known_by: The ranks that have its descriptor.
        tags: The collectives in which it may still be read.
    """

    number: int
    address: int
    segment: Segment
    known_by: set[int] = field(default_factory=set)
    tags: set[int] = field(default_factory=set)


@dataclass(eq=False)
class ImportedSegment:
    """A segment of another rank, mapped by this one.

    Attributes:
        data: Its bytes.
        lane: The lane of its last reader on this rank.
    """

    data: Tensor
    lane: str = ""


def _forget(
    exported: ExportedSegment,
    by_address: dict[int, ExportedSegment],
    forgotten: list[ExportedSegment],
) -> None:
    """Remove a segment before its pages are unmapped.

    Other pages may be mapped at its address afterwards.
    """
    del by_address[exported.address]
    forgotten.append(exported)


class HostPages:
    """Shared memory of the ranks of one host, and the messages about it.

    All groups of the process use the same instance. Ranks are world ranks here; `SharedMemory` uses
    the ranks of its group.

    Args:
        rank: The world rank of this process.
        sockets: The connections to the other ranks of this host.
    """

    def __init__(self, rank: int, sockets: LocalSockets) -> None:
        self.rank = rank
        self.sockets = sockets
        self.peers = tuple(sockets.ranks)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._exported: dict[int, ExportedSegment] = {}  # By address
        self._forgotten: list[ExportedSegment] = []
        self._imported: dict[tuple[int, int], ImportedSegment] = {}  # By (rank, segment)
        self._received_pages: dict[int, Segment] = {}  # By tag: pages that the first rank has sent
        self._offers: dict[tuple[int, int], SharedMessage] = {}  # By (rank, tag)
        self._in_flight: dict[int, InFlightReceive] = {}  # By tag
        self._failed: dict[int, Exception] = {}  # By tag: the error of `use`, raised by the wait
        # By tag: ranks that have not read this rank's pieces yet
        self._readers: dict[int, set[int]] = {}
        # By tag: copies of pieces that were in private memory
        self._staged: dict[int, list[Tensor]] = {}

    # -- memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer that other ranks of this host read in place.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.

        Returns:
            A 1-D tensor in memory that the other ranks map.
        """
        with self._lock:
            self._unmap_forgotten()
            if not numel:
                return torch.empty(0, dtype=dtype, device="cpu")
            segment = Segment.create(numel * dtype.itemsize)
            tensor = segment.map(0, numel, dtype)
            exported = self._exported[tensor.data_ptr()] = ExportedSegment(
                next(self._numbers), tensor.data_ptr(), segment
            )
            end = weakref.finalize(
                tensor.untyped_storage(), _forget, exported, self._exported, self._forgotten
            )
            end.atexit = False
            return tensor

    def _unmap_forgotten(self) -> None:
        """Release segments whose tensors were freed, and notify their readers."""
        while self._forgotten:
            exported = self._forgotten.pop()
            exported.segment.close()
            for peer in exported.known_by:
                self.sockets.send(peer, SharedMessage(MessageKind.FORGET, segment=exported.number))

    def end_engine(self, engine: str) -> None:
        """Release the mappings of one engine, and own segments whose tensors were freed."""
        with self._lock:
            for place in [
                place
                for place, imported in self._imported.items()
                if engine_of(imported.lane) == engine
            ]:
                del self._imported[place]
            self._unmap_forgotten()

    def share_pages(
        self, nbytes: int, ranks: Sequence[int], cid: CollectiveId
    ) -> Callable[[], Segment]:
        """Return a function that waits for pages that all of these ranks can map.

        The lowest rank allocates them.

        Args:
            nbytes: Size in bytes.
            ranks: World ranks of this host, including this one.
            cid: The identity of the collective.

        Returns:
            A function without arguments that returns the mapped pages.

        Note:
            Collective: each of these ranks must call it.
        """
        first = min(ranks)
        tag = tag_of(cid)
        if self.rank == first:
            with self._lock:
                segment = self._received_pages[tag] = Segment.create(nbytes)
                for peer in ranks:
                    if peer != self.rank:
                        message = SharedMessage(
                            MessageKind.SHARED, tag, nbytes=nbytes, descriptor=segment.descriptor
                        )
                        self.sockets.send(peer, message)

        def wait() -> Segment:
            self._until(lambda: tag in self._received_pages, lambda: {first}, base.POLL_SECONDS)
            return self._received_pages.pop(tag)

        return wait

    # -- movements

    def start(
        self,
        pieces: Mapping[int, Tensor],
        boxes: Mapping[int, Tensor | None],
        like: Tensor,
        cid: CollectiveId,
        use: Callable[[Mapping[int, Tensor]], None],
    ) -> Wait:
        """Offer pieces to ranks, and receive a piece from each rank that has a box.

        Args:
            pieces: The pieces to send, by world rank.
            boxes: By world rank, the tensor to copy to; None to read the piece in its owner's
                memory.
            like: A tensor with the dtype of the pieces.
            cid: The identity of the collective.
            use: Called with the received pieces by rank.

        Returns:
            A function that waits until the pieces were received and used.
        """
        tag = tag_of(cid)
        with self._lock:
            for peer, piece in pieces.items():
                self._offer(peer, piece, tag)
            awaiting = {peer for peer in boxes if (peer, tag) not in self._offers}
            self._in_flight[tag] = InFlightReceive(boxes, like, use, awaiting, cid)
            self._complete(tag)
            self._take_messages()

        def wait() -> None:
            self._until(
                lambda: tag not in self._in_flight,
                lambda: self._in_flight[tag].awaiting,
                poll_interval_of(cid),
            )
            if error := self._failed.pop(tag, None):
                raise error

        return wait

    def _offer(self, peer: int, piece: Tensor, tag: int) -> None:
        nbytes = piece.nbytes
        if nbytes <= INLINE_BYTES:
            payload = piece.contiguous().view(torch.uint8).numpy().tobytes()
            self.sockets.send(peer, SharedMessage(MessageKind.INLINE, tag, payload=payload))
            return
        exported = self._exported.get(_address(piece))
        if exported is None:
            piece = self.empty(piece.numel(), piece.dtype).copy_(piece)
            self._staged.setdefault(tag, []).append(piece)
            exported = self._exported[_address(piece)]
        else:
            exported.tags.add(tag)
        if peer not in exported.known_by:
            exported.known_by.add(peer)
            segment = exported.segment
            message = SharedMessage(
                MessageKind.SEGMENT,
                segment=exported.number,
                nbytes=segment.nbytes,
                descriptor=segment.descriptor,
            )
            self.sockets.send(peer, message)
            if len(exported.known_by) == len(self.peers):
                segment.close()
        self._readers.setdefault(tag, set()).add(peer)
        start = piece.data_ptr() - exported.address
        self.sockets.send(
            peer, SharedMessage(MessageKind.OFFER, tag, exported.number, start, nbytes)
        )

    @property
    def expects(self) -> bool:
        """Return whether a receive or an unsent message is in flight."""
        return bool(self._in_flight) or self.sockets.has_unsent

    def progress(self) -> None:
        """Receive messages, send those that did not fit into a queue, and complete receives."""
        with self._lock:
            self._take_messages()

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether another rank may still read this buffer."""
        exported = self._exported.get(_address(tensor))
        return exported is not None and self._still_read(exported)

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer.

        Raises:
            TimeoutError: A rank still reads it; the call may be repeated.
        """
        exported = self._exported.get(_address(tensor))
        if exported is not None and exported.tags:
            self._until(lambda: not self._still_read(exported), set, base.POLL_SECONDS)

    def _still_read(self, exported: ExportedSegment) -> bool:
        for tag in list(exported.tags):
            if not self._readers.get(tag, set()) - self.sockets.gone:
                exported.tags.discard(tag)
        return bool(exported.tags)

    # -- messages

    def _until(
        self,
        done: Callable[[], bool],
        needed: Callable[[], set[int]],
        poll_interval: float,
    ) -> None:
        """Receive messages until `done`, and until all messages of this rank are sent.

        This rank may not call again for long, so nothing may stay unsent. Raises ConnectionLost if
        a rank that is needed has exited, and TimeoutError after the poll interval.
        """
        began = time.perf_counter()
        while not (is_done := done()) or self.sockets.has_unsent:
            if not is_done and (ended := needed() & self.sockets.gone):
                raise ConnectionLost(f"the process of rank {min(ended)} has ended", min(ended))
            waited = time.perf_counter() - began
            if waited > poll_interval:
                raise TimeoutError
            if waited > SPIN_SECONDS:
                self.sockets.wait(poll_interval - waited)
            with self._lock:
                self._take_messages()

    def _take_messages(self) -> None:
        for rank, message in self.sockets.receive():
            match message.kind:
                case MessageKind.OFFER | MessageKind.INLINE:
                    self._offers[rank, message.tag] = message
                    if (receive := self._in_flight.get(message.tag)) is not None:
                        receive.awaiting.discard(rank)
                        self._complete(message.tag)
                case MessageKind.READ:
                    readers = self._readers[message.tag]
                    readers.discard(rank)
                    if not readers:
                        del self._readers[message.tag]
                        self._staged.pop(message.tag, None)
                case MessageKind.SEGMENT:
                    segment = _taken(message)
                    self._imported[rank, message.segment] = ImportedSegment(segment.view().tensor)
                    segment.close()
                case MessageKind.SHARED:
                    self._received_pages[message.tag] = _taken(message)
                case MessageKind.FORGET:
                    self._imported.pop((rank, message.segment), None)

    def _complete(self, tag: int) -> None:
        """Complete a receive if all its pieces have arrived.

        The pieces are copied or used, then their owners are notified.
        """
        receive = self._in_flight[tag]
        if receive.awaiting:
            return
        del self._in_flight[tag]
        receive.cid.arrived.append(time.perf_counter())
        offers = {peer: self._offers.pop((peer, tag)) for peer in receive.boxes}
        try:
            self._use(receive, offers)
        # The wait of another collective may have called this: the error does not belong to it
        except Exception as error:
            self._failed[tag] = error
        for peer, offer in offers.items():
            if offer.kind is MessageKind.OFFER:
                self.sockets.send(peer, SharedMessage(MessageKind.READ, tag))

    def _use(self, receive: InFlightReceive, offers: Mapping[int, SharedMessage]) -> None:
        found = {}
        for peer, box in receive.boxes.items():
            found[peer] = self._piece(peer, offers[peer], receive)
            if box is not None:
                # The caller's tensor may be an inference tensor, whichever wait copies to it
                with torch.inference_mode():
                    box.copy_(found[peer])
                found[peer] = box
        with torch.no_grad():
            receive.use(found)

    def _piece(self, peer: int, offer: SharedMessage, receive: InFlightReceive) -> Tensor:
        dtype = receive.like.dtype
        if offer.kind is MessageKind.OFFER:
            imported = self._imported[peer, offer.segment]
            imported.lane = receive.cid.lane
            return imported.data[offer.start : offer.start + offer.nbytes].view(dtype)
        if not offer.payload:  # `frombuffer` refuses an empty buffer
            return receive.like[:0]
        return torch.frombuffer(bytearray(offer.payload), dtype=dtype)


class SharedMemory(Transport):
    """The transport between the ranks of a group that run on one host.

    Messages to ranks of other hosts need another transport (`Hierarchical`).

    Args:
        ranks: The group's members as world ranks.
        pages: The shared memory of this process.
    """

    description = "shared memory"
    shares_pages = True
    reads_in_place = True

    def __init__(self, ranks: Sequence[int], pages: HostPages) -> None:
        self.ranks = tuple(ranks)
        self.pages = pages
        self.rank = self.ranks.index(pages.rank)
        self.size = len(self.ranks)
        # The indices of the other ranks of this host, by world rank
        self.neighbours = {
            rank: index for index, rank in enumerate(self.ranks) if rank in pages.peers
        }

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.pages.empty(numel, dtype)

    def symmetric_memory(
        self, numel: int, dtype: torch.dtype, cid: CollectiveId
    ) -> Callable[[], SymmetricMemory]:
        nbytes = numel * dtype.itemsize
        pages = self.pages.share_pages(nbytes, self.ranks, cid)

        def wait() -> SymmetricMemory:
            segment = pages()
            mapping = segment.view(dtype)
            own = segment.map(self.rank * nbytes // self.size, numel // self.size, dtype)
            segment.close()
            return SymmetricMemory(own, mapping.tensor, mapping)

        return wait

    def barrier(self, cid: CollectiveId) -> Wait:
        pieces = dict.fromkeys(self.neighbours, NO_BYTES)
        return self.pages.start(pieces, dict.fromkeys(pieces), NO_BYTES, cid, leave_in_place)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        slices = full.chunk(self.size)
        own = slices[self.rank]
        pieces = dict.fromkeys(self.neighbours, own)
        boxes = {rank: slices[index] for rank, index in self.neighbours.items()}
        return self.pages.start(pieces, boxes, own, cid, leave_in_place)

    def exchange(self, pieces: Sequence[Tensor], inbox: Inbox, cid: CollectiveId, use: Use) -> Wait:
        own = pieces[self.rank]
        sent = {}
        boxes = {}
        for rank, index in self.neighbours.items():
            piece = pieces[index]
            box = inbox[index]
            if piece.numel():
                sent[rank] = piece
            if (own if box is None else box).numel():
                boxes[rank] = box

        def land(found: Mapping[int, Tensor]) -> None:
            pieces_by_rank = {**found, self.pages.rank: own}
            use([pieces_by_rank.get(rank, own[:0]) for rank in self.ranks])

        return self.pages.start(sent, boxes, own, cid, land)

    @property
    def expects(self) -> bool:
        return self.pages.expects

    def progress(self) -> None:
        self.pages.progress()

    def is_read(self, tensor: Tensor) -> bool:
        return self.pages.is_read(tensor)

    def wait_until_read(self, tensor: Tensor) -> None:
        self.pages.wait_until_read(tensor)

    def end_engine(self, engine: str) -> None:
        self.pages.end_engine(engine)


def _taken(message: SharedMessage) -> Segment:
    return Segment(message.descriptor, message.nbytes)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class MessageKind(IntEnum):
    """The kinds of messages."""

    # The piece of collective `tag` is in segment `segment` of the sender, [start, start + nbytes)
    OFFER = 1
    INLINE = 2  # The piece of collective `tag` is the payload
    READ = 3  # The sender has read the receiver's piece of collective `tag`
    SEGMENT = 4  # Carries the descriptor of the sender's segment `segment`
    SHARED = 5  # Carries the descriptor of the segment that collective `tag` shares
    FORGET = 6  # The sender's segment `segment` no longer exists


class SharedMessage(NamedTuple):
    """One message between ranks of a host; `kind` determines which fields count.

    Attributes:
        kind: The kind of the message.
        tag: The tag of the collective.
        segment: The number of the sender's segment.
        start: The first byte of a piece in its segment.
        nbytes: The size of the piece or segment in bytes.
        payload: A piece that is sent in the message itself.
        descriptor: The file descriptor of a segment; -1 for none.
    """

    kind: MessageKind
    tag: int = 0
    segment: int = 0
    start: int = 0
    nbytes: int = 0
    payload: bytes = b""
    descriptor: int = -1


class LocalSockets:
    """Connections to the other ranks of this host.

    Args:
        sockets: The connected sockets by world rank.

    Attributes:
        ranks: The other ranks, ascending.
        gone: The ranks whose process has ended.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.ranks = sorted(sockets)
        self.gone: set[int] = set()
        self._sockets = sockets
        self._rank_of = {connection.fileno(): rank for rank, connection in sockets.items()}
        self._poll = select.poll()
        self._unsent: list[tuple[int, bytes, tuple[int, ...]]] = []
        self._is_flushing = False
        for connection in sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        self._is_forked = False
        # A forked child, such as a data loader's, would keep this rank seemingly alive
        os.register_at_fork(after_in_child=self._close_in_child)

    def send(self, rank: int, message: SharedMessage) -> None:
        """Send a message now, or as soon as the receiver's queue accepts it.

        The call never blocks. A message to a rank that has ended is dropped.

        Args:
            rank: The world rank of the receiver.
            message: Message to send.

        Raises:
            UsageError: This process was forked from a rank.
        """
        self._refuse_forked()
        check = message.tag & 0xFFFFFFFF
        tag = message.tag >> 32
        header = _HEADER.pack(
            message.kind, check, tag, message.segment, message.start, message.nbytes
        )
        descriptors = (os.dup(message.descriptor),) if message.descriptor >= 0 else ()
        self._unsent.append((rank, header + message.payload, descriptors))
        self._flush()

    @property
    def has_unsent(self) -> bool:
        """Return whether a message still waits because another rank's queue is full.

        `receive` sends what it can.
        """
        return bool(self._unsent)

    def _flush(self) -> None:
        # A finalizer may call this while it runs: the loop below also sends that message
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            self._send_unsent()
        finally:
            self._is_flushing = False

    def _send_unsent(self) -> None:
        blocked: set[int] = set()
        left = []
        for rank, data, descriptors in self._unsent:
            if rank not in self.gone and (
                rank in blocked or not self._sent(rank, data, descriptors)
            ):
                blocked.add(rank)
                left.append((rank, data, descriptors))
                continue
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent = left

    def _sent(self, rank: int, data: bytes, descriptors: Sequence[int]) -> bool:
        try:
            if descriptors:
                socket.send_fds(self._sockets[rank], [data], descriptors)
            else:
                self._sockets[rank].send(data)
        except BlockingIOError:
            return False
        except OSError:  # The process has exited; waits for this rank raise
            self._lose(rank)
        return True

    def wait(self, seconds: float) -> None:
        """Sleep until a message can be received, at most for `seconds`."""
        longest = RETRY_SECONDS if self._unsent else seconds
        self._poll.poll(min(seconds, longest) * 1000)

    def receive(self) -> Iterator[tuple[int, SharedMessage]]:
        """Yield the senders and messages that have arrived, without waiting.

        Raises:
            UsageError: This process was forked from a rank.
        """
        self._refuse_forked()
        if self._unsent:
            self._flush()
        for descriptor, _ in self._poll.poll(0):
            rank = self._rank_of[descriptor]
            while rank not in self.gone and (message := self._next(rank)) is not None:
                yield rank, message

    def _next(self, rank: int) -> SharedMessage | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._sockets[rank], _HEADER.size + INLINE_BYTES, 1
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # It exited with unread messages in its queue; its last messages are still to be read
            return self._next(rank)
        if not data:
            self._lose(rank)
            return None
        kind, check, tag, segment, start, nbytes = _HEADER.unpack_from(data)
        payload = data[_HEADER.size :]
        descriptor = descriptors[0] if descriptors else -1
        return SharedMessage(
            MessageKind(kind), tag << 32 | check, segment, start, nbytes, payload, descriptor
        )

    def _lose(self, rank: int) -> None:
        if rank not in self.gone:
            self.gone.add(rank)
            self._poll.unregister(self._sockets[rank])

    def _close_in_child(self) -> None:
        self._is_forked = True
        self.close()

    def _refuse_forked(self) -> None:
        if self._is_forked:
            raise UsageError(
                f"a process that was forked from a rank called a collective (pid {os.getpid()}).",
                "Sharded weights are gathered from other ranks, and only the rank's own process "
                "is connected to them.",
                "use the model in the process of the rank, or give the other process a copy of "
                "its state_dict().",
            )

    def close(self) -> None:
        """Close the sockets; the other ranks then treat this rank as ended."""
        for connection in self._sockets.values():
            connection.close()


def host_key() -> str:
    """Return text that is equal exactly on ranks that can use common shared memory.

    It identifies the running kernel, the network namespace and the user.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def connect_local(
    rank: int, size: int, group: dist.ProcessGroup | None
) -> tuple[Hosts, LocalSockets | None, str]:
    """Find the ranks of each host, and connect to those of this host.

    Either all ranks of a host are connected or none is.

    Args:
        rank: World rank of this process.
        size: Number of ranks in the world.
        group: A group of all ranks.

    Returns:
        The hosts, the connections or None, and the reason if there are none.

    Note:
        Collective: every rank of the world must call it.
    """
    listener = None
    address = ""
    key = ""
    refusal = ""
    name = socket.gethostname()
    try:
        key = host_key()
        listener, address = _listen()
    except OSError as error:  # Sockets are forbidden here
        refusal = str(error)
    everyone = [
        json.loads(text) for text in all_gather_text(json.dumps([key, address, name]), size, group)
    ]
    hosts = Hosts(rank, tuple(key for key, *_ in everyone), tuple(name for *_, name in everyone))
    others = [peer for peer in hosts.local_ranks if peer != rank]
    found: dict[int, socket.socket] = {}
    try:
        if listener is not None and all(everyone[peer][1] for peer in others):
            found = _connect(rank, others, listener, [address for _, address, _ in everyone])
    except OSError as error:
        refusal = str(error)
    finally:
        if listener is not None:
            listener.close()
    refusals = all_gather_text(refusal, size, group)
    refusal = next((refusals[peer] for peer in hosts.local_ranks if refusals[peer]), "")
    if not others or refusal:
        for connection in found.values():
            connection.close()
        return hosts, None, refusal
    return hosts, LocalSockets(found), ""


def _listen() -> tuple[socket.socket, str]:
    """Return a listening abstract socket with a random name, and the name."""
    address = f"\0deepseek-zero-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)
    listener.settimeout(CONNECT_SECONDS)
    return listener, address


def _connect(
    rank: int, others: Sequence[int], listener: socket.socket, addresses: Sequence[str]
) -> dict[int, socket.socket]:
    """Connect to lower ranks and accept higher ones; close other connections."""
    found = {}
    for peer in others:
        if peer < rank:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(addresses[peer])
            connection.send(_HELLO.pack(rank))
            found[peer] = connection
    awaited = {peer for peer in others if peer > rank}
    deadline = time.monotonic() + CONNECT_SECONDS
    while awaited:
        if time.monotonic() > deadline:
            raise TimeoutError("a rank of this host did not connect")
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_SECONDS)
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, user, _ = _CREDENTIALS.unpack(credentials)
        hello = connection.recv(_HELLO.size) if user == os.getuid() else b""
        peer = _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else -1
        if peer in awaited:
            awaited.remove(peer)
            found[peer] = connection
        else:
            connection.close()
    return found
