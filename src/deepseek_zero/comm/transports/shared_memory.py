"""Ranks of one host exchange through shared memory: a rank that needs a piece reads it in its owner's memory.

Buffers that travel come from `empty`. An offer is a message that says where in its owner's segment a piece is; its
reader answers when it has read. Sharded weights lie in `SharedWeights`, pages that every rank maps whole, so that
gathering them moves nothing. Other ranks map pages copy-on-write: no in-place edit leaves its process.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...base.memory import Segment, SegmentView
from ..ids import CollectiveId, engine_of
from . import base
from .base import ConnectionLost, Use, Wait
from .local_sockets import INLINE_BYTES, Kind, LocalSockets, Message

NO_BYTES = torch.empty(0, dtype=torch.uint8)
SPIN_SECONDS = 50e-6  # a wait looks so long before it sleeps: waking up costs about as much


@dataclass
class InFlightReceive:
    """The pieces this rank is to receive in one collective. boxes: by rank; None: the piece is read in its owner's
    memory.
    """

    boxes: Mapping[int, Tensor | None]
    like: Tensor  # a piece that is read in place has its dtype
    use: Callable[[Mapping[int, Tensor]], None]
    awaiting: set[int]
    cid: CollectiveId


@dataclass(eq=False)
class ExportedSegment:
    """A segment of this rank's that others may read."""

    number: int
    address: int
    segment: Segment
    known_by: set[int] = field(default_factory=set)
    tags: set[int] = field(default_factory=set)  # collectives in which it is still read


@dataclass(eq=False)
class ImportedSegment:
    """A segment of another rank's, as this one sees it. reader: the engine that reads it here."""

    data: Tensor
    reader: str = ""


@dataclass(frozen=True, eq=False)
class SharedWeights:
    """A sharded weight in shared pages: every rank writes its own slice and sees all of them. own: (slice,), shared
    with all.
    """

    own: Tensor
    mapping: SegmentView

    @property
    def whole(self) -> Tensor:
        """Return all slices, (ranks * slice,), to be read."""
        return self.mapping.tensor

    def release(self) -> None:
        """End the use of the whole: in-place edits of it, which only this rank sees, are dropped."""
        if self.mapping.was_written():
            self.mapping.clear_written()


class HostPages:
    """The segments, offers and readers that the ranks of one host share, whatever groups they form.

    Ranks are those of the world here; `SharedMemory` speaks of a group's.
    """

    def __init__(self, rank: int, sockets: LocalSockets) -> None:
        self.rank, self.sockets = rank, sockets
        self.peers = tuple(sockets.ranks)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._exported: dict[int, ExportedSegment] = {}  # by address
        self._forgotten: list[ExportedSegment] = []
        self._imported: dict[tuple[int, int], ImportedSegment] = {}  # (rank, segment)
        self._received_pages: dict[int, Segment] = {}  # tag -> pages that the first rank has sent
        self._offers: dict[tuple[int, int], Message] = {}  # (rank, tag)
        self._in_flight: dict[int, InFlightReceive] = {}  # by tag
        self._failed: dict[int, Exception] = {}  # by tag: the error of its use, for the wait
        self._readers: dict[int, set[int]] = {}  # tag -> ranks that have not read our pieces yet
        self._staged: dict[int, list[Tensor]] = {}  # tag -> copies of pieces that lay in private memory

    # -- memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer that the other ranks of this host can read in place; arbitrary contents."""
        with self._lock:
            self._unmap_forgotten()
            if not numel:
                return torch.empty(0, dtype=dtype)
            segment = Segment.create(numel * dtype.itemsize)
            tensor = segment.map(0, numel, dtype)
            exported = self._exported[tensor.data_ptr()] = ExportedSegment(
                next(self._numbers), tensor.data_ptr(), segment
            )
            weakref.finalize(tensor.untyped_storage(), self._forgotten.append, exported).atexit = False
            return tensor

    def _unmap_forgotten(self) -> None:
        """Release segments whose tensors are gone, and tell the ranks that mapped them."""
        while self._forgotten:
            exported = self._forgotten.pop()
            self._exported.pop(exported.address)
            exported.segment.close()
            for peer in exported.known_by:
                self.sockets.send(peer, Message(Kind.FORGET, segment=exported.number))

    def end_engine(self, engine: str) -> None:
        """Release what one engine mapped of other ranks' memory, and its own segments that are gone."""
        with self._lock:
            for place in [place for place, imported in self._imported.items() if imported.reader == engine]:
                del self._imported[place]
            self._unmap_forgotten()

    def share_pages(self, nbytes: int, ranks: Sequence[int], cid: CollectiveId) -> Callable[[], Segment]:
        """Let the first of these ranks make pages that all of them can map.  Collective among them."""
        first = min(ranks)
        if self.rank == first:
            with self._lock:
                segment = self._received_pages[cid.tag] = Segment.create(nbytes)
                for peer in ranks:
                    if peer != self.rank:
                        message = Message(Kind.SHARED, cid.tag, nbytes=nbytes, descriptor=segment.descriptor)
                        self.sockets.send(peer, message)

        def wait() -> Segment:
            self._until(lambda: cid.tag in self._received_pages, lambda: {first})
            return self._received_pages.pop(cid.tag)

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
        """Offer a piece to each of these ranks and take one from each rank that has a box; then use what came."""
        tag = cid.tag
        with self._lock:
            for peer, piece in pieces.items():
                self._offer(peer, piece, tag)
            awaiting = {peer for peer in boxes if (peer, tag) not in self._offers}
            self._in_flight[tag] = InFlightReceive(boxes, like, use, awaiting, cid)
            self._complete(tag)
            self._take_messages()

        def wait() -> None:
            self._until(lambda: tag not in self._in_flight, lambda: self._in_flight[tag].awaiting)
            if error := self._failed.pop(tag, None):
                raise error

        return wait

    def _offer(self, peer: int, piece: Tensor, tag: int) -> None:
        nbytes = piece.nbytes
        if nbytes <= INLINE_BYTES:
            self.sockets.send(peer, Message(Kind.INLINE, tag, payload=_bytes(piece).numpy().tobytes()))
            return
        exported = self._exported.get(_address(piece))
        if exported is None:
            copy = self.empty(piece.numel(), piece.dtype).copy_(piece)
            self._staged.setdefault(tag, []).append(copy)
            piece, exported = copy, self._exported[_address(copy)]
        else:
            exported.tags.add(tag)
        if peer not in exported.known_by:
            exported.known_by.add(peer)
            size, descriptor = exported.segment.nbytes, exported.segment.descriptor
            self.sockets.send(peer, Message(Kind.SEGMENT, 0, exported.number, 0, size, descriptor=descriptor))
            if len(exported.known_by) == len(self.peers):
                exported.segment.close()
        self._readers.setdefault(tag, set()).add(peer)
        start = piece.data_ptr() - exported.address
        self.sockets.send(peer, Message(Kind.OFFER, tag, exported.number, start, nbytes))

    @property
    def expects(self) -> bool:
        return bool(self._in_flight) or self.sockets.has_unsent

    def progress(self) -> None:
        """Take in what has arrived, send what found no room; sums whose pieces are all here are formed."""
        with self._lock:
            self._take_messages()

    def is_read(self, tensor: Tensor) -> bool:
        exported = self._exported.get(_address(tensor))
        return exported is not None and self._still_read(exported)

    def wait_until_read(self, tensor: Tensor) -> None:
        """Wait until no other rank reads this buffer any more; TimeoutError after a while, to be called again."""
        exported = self._exported.get(_address(tensor))
        if exported is not None and exported.tags:
            self._until(lambda: not self._still_read(exported), set)

    def _still_read(self, exported: ExportedSegment) -> bool:
        for tag in list(exported.tags):
            if not self._readers.get(tag, set()) - self.sockets.gone:
                exported.tags.discard(tag)
        return bool(exported.tags)

    # -- messages

    def _until(self, done: Callable[[], bool], needed: Callable[[], set[int]]) -> None:
        """Take messages in until `done` and all of this rank's own are sent: it may not come here again for long.

        ConnectionLost where a rank that is needed has ended; TimeoutError after a while.
        """
        began = time.perf_counter()
        while not (is_done := done()) or self.sockets.has_unsent:
            if not is_done and (ended := needed() & self.sockets.gone):
                raise ConnectionLost(f"the process of rank {min(ended)} has ended")
            waited = time.perf_counter() - began
            if waited > base.POLL_SECONDS:
                raise TimeoutError
            if waited > SPIN_SECONDS:
                self.sockets.wait(base.POLL_SECONDS - waited)
            with self._lock:
                self._take_messages()

    def _take_messages(self) -> None:
        for rank, message in self.sockets.receive():
            match message.kind:
                case Kind.OFFER | Kind.INLINE:
                    self._offers[rank, message.tag] = message
                    if (receive := self._in_flight.get(message.tag)) is not None:
                        receive.awaiting.discard(rank)
                        self._complete(message.tag)
                case Kind.READ:
                    readers = self._readers[message.tag]
                    readers.discard(rank)
                    if not readers:
                        del self._readers[message.tag]
                        self._staged.pop(message.tag, None)
                case Kind.SEGMENT:
                    segment = _taken(message)
                    self._imported[rank, message.segment] = ImportedSegment(segment.view().tensor)
                    segment.close()
                case Kind.SHARED:
                    self._received_pages[message.tag] = _taken(message)
                case Kind.FORGET:
                    self._imported.pop((rank, message.segment), None)

    def _complete(self, tag: int) -> None:
        """Complete a receive whose pieces have all arrived: copy or use them, and tell their owners that they were
        read.
        """
        receive = self._in_flight[tag]
        if receive.awaiting:
            return
        del self._in_flight[tag]
        receive.cid.arrived.append(time.perf_counter())
        offers = {peer: self._offers.pop((peer, tag)) for peer in receive.boxes}
        try:
            self._use(receive, offers)
        except Exception as error:  # another collective's wait may have brought us here: it is not that one's error
            self._failed[tag] = error
        for peer, offer in offers.items():
            if offer.kind is Kind.OFFER:
                self.sockets.send(peer, Message(Kind.READ, tag))

    def _use(self, receive: InFlightReceive, offers: Mapping[int, Message]) -> None:
        found = {}
        for peer, box in receive.boxes.items():
            found[peer] = self._piece(peer, offers[peer], receive)
            if box is not None:
                with torch.inference_mode():  # the caller's tensor may be of that kind, whoever lands it for him
                    box.copy_(found[peer])
                found[peer] = box
        with torch.no_grad():
            receive.use(found)

    def _piece(self, peer: int, offer: Message, receive: InFlightReceive) -> Tensor:
        dtype = receive.like.dtype
        if offer.kind is Kind.OFFER:
            imported = self._imported[peer, offer.segment]
            imported.reader = engine_of(receive.cid.lane)
            return imported.data[offer.start : offer.start + offer.nbytes].view(dtype)
        return torch.frombuffer(bytearray(offer.payload), dtype=dtype) if offer.payload else receive.like[:0]


class SharedMemory:
    """The transport between those ranks of a group that share a host.  Others are another transport's business.

    ranks: the group's, as the world counts them.  `rank`, `size`, `peers`: as the group does.
    """

    reads_in_place = True

    def __init__(self, ranks: Sequence[int], pages: HostPages) -> None:
        self.ranks, self.pages = tuple(ranks), pages
        self.rank, self.size = self.ranks.index(pages.rank), len(self.ranks)
        self.peers = tuple(index for index, rank in enumerate(self.ranks) if rank in pages.peers)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.pages.empty(numel, dtype)

    def shared_weights(self, numel: int, dtype: torch.dtype, cid: CollectiveId) -> Callable[[], SharedWeights]:
        """Return pages for `numel` elements, a slice for each rank of the group, that all map. Collective."""
        nbytes = numel * dtype.itemsize
        pages = self.pages.share_pages(nbytes, self.ranks, cid)

        def wait() -> SharedWeights:
            segment = pages()
            mapping = segment.view(dtype)
            own = segment.map(self.rank * nbytes // self.size, numel // self.size, dtype)
            segment.close()
            return SharedWeights(own, mapping)

        return wait

    def barrier(self, cid: CollectiveId) -> Wait:
        """Wait until every rank has come here."""
        peers = self._in_world(dict.fromkeys(self.peers, NO_BYTES))
        return self.pages.start(peers, dict.fromkeys(peers), NO_BYTES, cid, _ignore)

    def all_gather(self, full: Tensor, cid: CollectiveId) -> Wait:
        slices = list(full.chunk(self.size))
        own = slices[self.rank]
        pieces = self._in_world(dict.fromkeys(self.peers, own))
        boxes: dict[int, Tensor | None] = {self.ranks[peer]: slices[peer] for peer in self.peers}
        return self.pages.start(pieces, boxes, own, cid, _ignore)

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], cid: CollectiveId, use: Use) -> Wait:
        own = pieces[self.rank]
        boxes = {
            self.ranks[peer]: inbox[peer]
            for peer in self.peers
            if (own if inbox[peer] is None else inbox[peer]).numel()  # type: ignore[union-attr]
        }

        def land(found: Mapping[int, Tensor]) -> None:
            use([own if rank == self.pages.rank else found.get(rank, own[:0]) for rank in self.ranks])

        sent = self._in_world({peer: pieces[peer] for peer in self.peers if pieces[peer].numel()})
        return self.pages.start(sent, boxes, own, cid, land)

    def _in_world(self, by_index: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {self.ranks[index]: value for index, value in by_index.items()}

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


def _ignore(found: Mapping[int, Tensor]) -> None:
    """Leave gathered slices in place: nothing more is to do."""


def _taken(message: Message) -> Segment:
    return Segment(message.descriptor, message.nbytes)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
