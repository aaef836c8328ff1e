"""Ranks of one host exchange through shared memory: a piece is read where it lies, by whoever needs it.

Buffers that travel come from `empty`.  An offer is a message that says where in its owner's segment a piece is; its
reader answers when it has read.  Weights at rest lie in `common` pages that every rank maps whole, so that gathering
them moves nothing.  What others read is copy-on-write there: no in-place edit leaves its process.  Called by
collectives.py, as the transports of transports.py are.
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

from ..base.memory import Look, Segment
from . import transports
from .marks import Mark, engine_of
from .neighbours import INLINE_BYTES, Kind, Message, Neighbours
from .transports import ConnectionLost, Use, Wait

NO_BYTES = torch.empty(0, dtype=torch.uint8)
SPIN_SECONDS = 50e-6  # a wait looks so long before it sleeps: waking up costs about as much


@dataclass
class Flight:
    """What this rank is to receive in one collective.  boxes: by rank; None: the piece is read where it lies."""

    boxes: Mapping[int, Tensor | None]
    like: Tensor  # a piece that is read in place has its dtype
    use: Callable[[Mapping[int, Tensor]], None]
    awaiting: set[int]
    mark: Mark


@dataclass(eq=False)
class Ours:
    """A segment of this rank's that others may read."""

    number: int
    address: int
    segment: Segment
    known_by: set[int] = field(default_factory=set)
    tags: set[int] = field(default_factory=set)  # collectives in which somebody still reads it


@dataclass(eq=False)
class Theirs:
    """A segment of another rank's, as this one sees it.  reader: the engine that reads it here."""

    data: Tensor
    reader: str = ""


@dataclass(frozen=True, eq=False)
class Common:
    """Weights at rest: every rank writes its own slice and sees all of them.  own: (slice,), shared with everybody."""

    own: Tensor
    look: Look

    @property
    def whole(self) -> Tensor:
        """(ranks * slice,), to be read."""
        return self.look.tensor

    def release(self) -> None:
        """Its use is over: what was written over the whole, on this rank alone, is gone."""
        if self.look.was_written():
            self.look.forget_writes()


class SameHost:
    """The transport between the ranks of one host.  Others are another transport's business."""

    reads_in_place = True

    def __init__(self, rank: int, size: int, neighbours: Neighbours) -> None:
        self.rank, self.size, self.neighbours = rank, size, neighbours
        self.peers = tuple(neighbours.ranks)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._ours: dict[int, Ours] = {}  # by address
        self._forgotten: list[Ours] = []
        self._theirs: dict[tuple[int, int], Theirs] = {}  # (rank, segment)
        self._handed: dict[int, Segment] = {}  # tag -> pages that the first rank hands out
        self._offers: dict[tuple[int, int], Message] = {}  # (rank, tag)
        self._flights: dict[int, Flight] = {}  # by tag
        self._failed: dict[int, Exception] = {}  # by tag: what its use raised, for whoever waits for it
        self._readers: dict[int, set[int]] = {}  # tag -> ranks that have not read our pieces yet
        self._staged: dict[int, list[Tensor]] = {}  # tag -> copies of pieces that lay in private memory

    # -- memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that neighbours can read in place; arbitrary contents."""
        with self._lock:
            self._forget()
            if not numel:
                return torch.empty(0, dtype=dtype)
            segment = Segment.create(numel * dtype.itemsize)
            tensor = segment.map(0, numel, dtype)
            ours = self._ours[tensor.data_ptr()] = Ours(next(self._numbers), tensor.data_ptr(), segment)
            weakref.finalize(tensor.untyped_storage(), self._forgotten.append, ours).atexit = False
            return tensor

    def _forget(self) -> None:
        """Let go of segments whose tensors are gone, and tell those who mapped them."""
        while self._forgotten:
            ours = self._forgotten.pop()
            self._ours.pop(ours.address)
            ours.segment.close()
            for peer in ours.known_by:
                self.neighbours.send(peer, Message(Kind.FORGET, segment=ours.number))

    def end_engine(self, engine: str) -> None:
        """Let go of what one engine held here of other ranks' memory, and of its own that is gone."""
        with self._lock:
            for place in [place for place, theirs in self._theirs.items() if theirs.reader == engine]:
                del self._theirs[place]
            self._forget()

    def common(self, numel: int, dtype: torch.dtype, mark: Mark) -> Callable[[], Common]:
        """Pages for `numel` elements, a slice for each rank, that the first rank makes and all map.  Collective."""
        nbytes, first = numel * dtype.itemsize, min(self.rank, *self.peers)
        if self.rank == first:
            with self._lock:
                segment = self._handed[mark.tag] = Segment.create(nbytes)
                for peer in self.peers:
                    message = Message(Kind.COMMON, mark.tag, nbytes=nbytes, descriptor=segment.descriptor)
                    self.neighbours.send(peer, message)

        def wait() -> Common:
            self._until(lambda: mark.tag in self._handed, lambda: {first})
            segment = self._handed.pop(mark.tag)
            look = segment.look(dtype)
            own = segment.map(self.rank * nbytes // self.size, numel // self.size, dtype)
            segment.close()
            return Common(own, look)

        return wait

    # -- movements

    def meet(self, mark: Mark) -> Wait:
        """Wait until every rank has come here."""
        return self._start(dict.fromkeys(self.peers, NO_BYTES), dict.fromkeys(self.peers), NO_BYTES, mark, _ignore)

    def all_gather(self, full: Tensor, mark: Mark) -> Wait:
        slices = list(full.chunk(self.size))
        pieces = dict.fromkeys(self.peers, slices[self.rank])
        return self._start(pieces, {peer: slices[peer] for peer in self.peers}, slices[self.rank], mark, _ignore)

    def exchange(self, pieces: Sequence[Tensor], inbox: Sequence[Tensor | None], mark: Mark, use: Use) -> Wait:
        own = pieces[self.rank]
        boxes = {peer: inbox[peer] for peer in self.peers if (own if inbox[peer] is None else inbox[peer]).numel()}  # type: ignore[union-attr]

        def land(found: Mapping[int, Tensor]) -> None:
            use([own if rank == self.rank else found.get(rank, own[:0]) for rank in range(self.size)])

        return self._start({peer: pieces[peer] for peer in self.peers if pieces[peer].numel()}, boxes, own, mark, land)

    def _start(
        self,
        pieces: Mapping[int, Tensor],
        boxes: Mapping[int, Tensor | None],
        like: Tensor,
        mark: Mark,
        use: Callable[[Mapping[int, Tensor]], None],
    ) -> Wait:
        tag = mark.tag
        with self._lock:
            for peer, piece in pieces.items():
                self._offer(peer, piece, tag)
            awaiting = {peer for peer in boxes if (peer, tag) not in self._offers}
            self._flights[tag] = Flight(boxes, like, use, awaiting, mark)
            self._land(tag)
            self._receive()

        def wait() -> None:
            self._until(lambda: tag not in self._flights, lambda: self._flights[tag].awaiting)
            if error := self._failed.pop(tag, None):
                raise error

        return wait

    def _offer(self, peer: int, piece: Tensor, tag: int) -> None:
        nbytes = piece.nbytes
        if nbytes <= INLINE_BYTES:
            self.neighbours.send(peer, Message(Kind.INLINE, tag, payload=_bytes(piece).numpy().tobytes()))
            return
        ours = self._ours.get(_address(piece))
        if ours is None:
            copy = self.empty(piece.numel(), piece.dtype).copy_(piece)
            self._staged.setdefault(tag, []).append(copy)
            piece, ours = copy, self._ours[_address(copy)]
        else:
            ours.tags.add(tag)
        if peer not in ours.known_by:
            ours.known_by.add(peer)
            size, descriptor = ours.segment.nbytes, ours.segment.descriptor
            self.neighbours.send(peer, Message(Kind.SEGMENT, 0, ours.number, 0, size, descriptor=descriptor))
            if len(ours.known_by) == len(self.peers):
                ours.segment.close()
        self._readers.setdefault(tag, set()).add(peer)
        start = piece.data_ptr() - ours.address
        self.neighbours.send(peer, Message(Kind.OFFER, tag, ours.number, start, nbytes))

    @property
    def expects(self) -> bool:
        return bool(self._flights) or self.neighbours.has_unsent

    def progress(self) -> None:
        """Take in what has arrived, send what found no room; sums whose pieces are all here are formed."""
        with self._lock:
            self._receive()

    def is_read(self, tensor: Tensor) -> bool:
        ours = self._ours.get(_address(tensor))
        return ours is not None and self._still_read(ours)

    def settle(self, tensor: Tensor) -> None:
        """Return when nobody reads this buffer any more; TimeoutError after a while, to be called again."""
        ours = self._ours.get(_address(tensor))
        if ours is not None and ours.tags:
            self._until(lambda: not self._still_read(ours), set)

    def _still_read(self, ours: Ours) -> bool:
        for tag in list(ours.tags):
            if not self._readers.get(tag, set()) - self.neighbours.gone:
                ours.tags.discard(tag)
        return bool(ours.tags)

    # -- messages

    def _until(self, done: Callable[[], bool], needed: Callable[[], set[int]]) -> None:
        """Take messages in until `done` and all of this rank's own are sent: it may not come here again for long.

        ConnectionLost where a rank that is needed has ended; TimeoutError after a while.
        """
        began = time.perf_counter()
        while not (is_done := done()) or self.neighbours.has_unsent:
            if not is_done and (ended := needed() & self.neighbours.gone):
                raise ConnectionLost(f"the process of rank {min(ended)} has ended")
            waited = time.perf_counter() - began
            if waited > transports.POLL_SECONDS:
                raise TimeoutError
            if waited > SPIN_SECONDS:
                self.neighbours.wait(transports.POLL_SECONDS - waited)
            with self._lock:
                self._receive()

    def _receive(self) -> None:
        for rank, message in self.neighbours.receive():
            match message.kind:
                case Kind.OFFER | Kind.INLINE:
                    self._offers[rank, message.tag] = message
                    if (flight := self._flights.get(message.tag)) is not None:
                        flight.awaiting.discard(rank)
                        self._land(message.tag)
                case Kind.READ:
                    readers = self._readers[message.tag]
                    readers.discard(rank)
                    if not readers:
                        del self._readers[message.tag]
                        self._staged.pop(message.tag, None)
                case Kind.SEGMENT:
                    segment = _taken(message)
                    self._theirs[rank, message.segment] = Theirs(segment.look().tensor)
                    segment.close()
                case Kind.COMMON:
                    self._handed[message.tag] = _taken(message)
                case Kind.FORGET:
                    self._theirs.pop((rank, message.segment), None)

    def _land(self, tag: int) -> None:
        """Where everything has arrived: put it where it belongs, use it, and tell its owners that it was read."""
        flight = self._flights[tag]
        if flight.awaiting:
            return
        del self._flights[tag]
        flight.mark.arrived.append(time.perf_counter())
        offers = {peer: self._offers.pop((peer, tag)) for peer in flight.boxes}
        try:
            self._use(flight, offers)
        except Exception as error:  # another collective's wait may have brought us here: it is not that one's error
            self._failed[tag] = error
        for peer, offer in offers.items():
            if offer.kind is Kind.OFFER:
                self.neighbours.send(peer, Message(Kind.READ, tag))

    def _use(self, flight: Flight, offers: Mapping[int, Message]) -> None:
        found = {}
        for peer, box in flight.boxes.items():
            found[peer] = self._piece(peer, offers[peer], flight)
            if box is not None:
                with torch.inference_mode():  # the caller's tensor may be of that kind, whoever lands it for him
                    box.copy_(found[peer])
                found[peer] = box
        with torch.no_grad():
            flight.use(found)

    def _piece(self, peer: int, offer: Message, flight: Flight) -> Tensor:
        dtype = flight.like.dtype
        if offer.kind is Kind.OFFER:
            theirs = self._theirs[peer, offer.segment]
            theirs.reader = engine_of(flight.mark.lane)
            return theirs.data[offer.start : offer.start + offer.nbytes].view(dtype)
        return torch.frombuffer(bytearray(offer.payload), dtype=dtype) if offer.payload else flight.like[:0]


def _ignore(found: Mapping[int, Tensor]) -> None:
    """A gathered slice needs no more than to be in its place."""


def _taken(message: Message) -> Segment:
    return Segment(message.descriptor, message.nbytes)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
