"""What two ranks of different hosts say to each other over one connection after another.

A message is a header and at most PIECE_BYTES; a longer tensor is several pieces.  Small tensors
leave at once and wait at the receiver for their box, as long as no more than EAGER_BUDGET bytes of
them do.  Every other tensor waits for READY, which a receiver says when it has a box for it: its
pieces land straight in that box, stored nowhere on the way. What is small leaves before the pieces
that are queued.

Messages are numbered.  A receiver says up to which number it has them, and a sender keeps what has
not been received, so that a new connection goes on where the last one ended.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ...base.errors import ModelMismatchError
from ..ids import CollectiveId
from ..transports.base import poll_interval_of
from .channel import Address, Refused

PIECE_BYTES = 1 << 18  # which a receipt or a question may wait for, if it has begun to leave
EAGER_BYTES = 1 << 14  # a tensor up to this size is copied, and leaves without a question
EAGER_BUDGET = 1 << 20  # of such bytes that one rank keeps for another
GATHERED = 16  # messages written by one call
_HEADER = struct.Struct("<BxxxIQQIIQQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_LINE_BITS = 32


class FrameKind(IntEnum):
    """The kinds of messages."""

    EAGER = 1  # a whole small tensor, unasked
    PIECE = 2  # a part of a tensor for which the receiver was ready
    READY = 3  # I have a box for this tensor
    RECEIVED = 4  # I have received your messages up to this number; not numbered itself
    RESUME = 5  # the same, as the first word on a new connection


_NUMBERED = (FrameKind.EAGER, FrameKind.PIECE, FrameKind.READY)


class Exchange:
    """What one collective waits for. left: boxes not filled and tensors of others' not received."""

    def __init__(self, cid: CollectiveId) -> None:
        self._cid = cid
        self.left = 0
        self.event = threading.Event()
        self.error: Exception | None = None

    def end_one(self) -> None:
        self.left -= 1
        if not self.left:
            self._cid.arrived.append(time.perf_counter())
            self.event.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.event.set()

    def wait(self) -> None:
        if not self.event.wait(poll_interval_of(self._cid)):
            raise TimeoutError
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class Frame:
    """A message to send, until the other has received it. exchange: what ends with it."""

    kind: FrameKind
    tag: int
    payload: memoryview | bytes = b""
    offset: int = 0
    total: int = 0
    exchange: Exchange | None = None
    number: int = 0
    header: bytes = b""

    def bytes_of_header(self) -> bytes:
        if not self.header:
            self.header = header_of(
                self.kind,
                self.number,
                self.tag,
                len(self.payload),
                zlib.crc32(self.payload),
                self.offset,
                self.total,
            )
        return self.header


def header_of(
    kind: FrameKind,
    number: int,
    tag: int = 0,
    length: int = 0,
    crc: int = 0,
    offset: int = 0,
    total: int = 0,
) -> bytes:
    line = tag >> _LINE_BITS
    check = tag & ((1 << _LINE_BITS) - 1)
    header = _HEADER.pack(kind, length, number, line, check, crc, offset, total)
    return header + _CHECK.pack(zlib.crc32(header))


@dataclass(eq=False)
class ReceiveBuffer:
    """Where a tensor lands. left: bytes that are still to come."""

    view: memoryview
    left: int
    exchange: Exchange


@dataclass(eq=False)
class Offer:
    """A tensor that waits for its receiver to be ready."""

    view: memoryview
    exchange: Exchange


@dataclass(eq=False)
class Link:
    """Everything between this rank and one other. host: as messages name it. gone: why it is lost,
    once it is.
    """

    rank: int
    address: Address
    host: str
    # Notified when the other end has said where to go on, and when it has received everything
    changed: threading.Condition
    scratch: memoryview  # for pieces that nobody waits for any more
    connection: socket.socket | None = None
    generation: int = 0  # connections so far
    resumed: bool = False  # the other has said where to go on
    recovering: bool = False
    gone: str = ""
    is_silent: bool = False  # why: its host answers nothing
    heard: float = 0.0
    spoke: float = 0.0
    silence_told_at: float | None = None
    # sending
    # Before what is queued: questions, and eager tensors
    urgent: deque[Frame] = field(default_factory=deque)
    queue: deque[Frame] = field(default_factory=deque)
    sent: deque[Frame] = field(default_factory=deque)  # and not received yet, as far as is known
    writing: deque[memoryview | bytes] = field(default_factory=deque)
    is_blocked: bool = False
    last_number: int = 0
    offers: dict[int, Offer] = field(default_factory=dict)
    # Tags for which the other has a box and this rank no tensor
    ready: dict[int, bool] = field(default_factory=dict)
    eager: set[int] = field(default_factory=set)  # tags of eager tensors that are not received yet
    eager_sent: int = 0
    eager_used: int = 0  # as the other says
    # receiving
    received: int = 0
    used: int = 0  # bytes of eager tensors that found their boxes
    owes_receipt: bool = False
    is_waited_for: bool = False  # the receipt, by an exchange of the other's
    boxes: dict[int, ReceiveBuffer] = field(default_factory=dict)
    early: dict[int, bytes] = field(default_factory=dict)  # eager tensors without a box
    header: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    # The rest of what is being read
    into: memoryview = field(default_factory=lambda: memoryview(b""))
    reads: tuple[FrameKind, int, int, int, int, ReceiveBuffer | bytearray | None] | None = (
        None  # a payload's kind, tag, ..., place
    )
    crc: int = 0
    wakes_at: int = 1  # bytes that have come before the kernel tells of them

    def expect_header(self) -> None:
        self.reads, self.into = None, memoryview(self.header)

    def received_up_to(self, number: int) -> list[Exchange]:
        """Drop what the other has received; return the exchanges that end with it, of which nothing
        is held here.
        """
        found = []
        while self.sent and self.sent[0].number <= number:
            frame = self.sent.popleft()
            self.eager.discard(frame.tag)
            if frame.exchange is not None:
                found.append(frame.exchange)
        return found

    def next_frame(self) -> Frame | None:
        """Take the next message to write.  What was sent before, over another connection, keeps its
        place.
        """
        is_sent_again = self.queue and self.queue[0].number
        waiting = self.queue if is_sent_again or not self.urgent else self.urgent
        return waiting.popleft() if waiting else None

    @property
    def unsent(self) -> int:
        """Return how many messages wait."""
        return len(self.urgent) + len(self.queue)

    @property
    def has_unreceived(self) -> bool:
        return not self.gone and bool(self.urgent or self.queue or self.sent)

    # -- sending and receiving

    def receive(self, view: memoryview, tag: int, exchange: Exchange) -> None:
        early = self.early.pop(tag, None)
        if early is None:
            exchange.left += 1
            self.boxes[tag] = ReceiveBuffer(view, len(view), exchange)
            self.urgent.append(Frame(FrameKind.READY, tag, total=len(view)))
            return
        self.used += len(early)
        self.owes_receipt = True
        if len(early) != len(view):
            exchange.fail(_other_size(self, len(early), len(view)))
        else:
            view[:] = early

    def send(self, view: memoryview, tag: int, exchange: Exchange) -> None:
        size = len(view)
        is_ready = self.ready.pop(tag, False)
        if size <= EAGER_BYTES and self.eager_sent + size - self.eager_used <= EAGER_BUDGET:
            self.eager_sent += size
            self.eager.add(tag)
            self.urgent.append(Frame(FrameKind.EAGER, tag, bytes(view), 0, size))
            return
        if size <= EAGER_BYTES and is_ready:
            self.queue.append(Frame(FrameKind.PIECE, tag, bytes(view), 0, size))
            return
        exchange.left += 1
        if is_ready:
            self._queue_pieces(Offer(view, exchange), tag)
        else:
            self.offers[tag] = Offer(view, exchange)

    def _queue_pieces(self, offer: Offer, tag: int) -> None:
        total = len(offer.view)
        for start in range(0, total, PIECE_BYTES):
            piece = offer.view[start : start + PIECE_BYTES]
            ends = offer.exchange if start + PIECE_BYTES >= total else None
            self.queue.append(Frame(FrameKind.PIECE, tag, piece, start, total, ends))

    def gather(self) -> bool:
        """Take the next messages to write; return whether there are any."""
        if self.owes_receipt and (self.is_waited_for or self.unsent):
            self.owes_receipt = self.is_waited_for = False
            self.writing.append(header_of(FrameKind.RECEIVED, self.received, offset=self.used))
        size = 0
        while self.resumed and size < PIECE_BYTES and len(self.writing) < 2 * GATHERED:
            if (frame := self.next_frame()) is None:
                break
            if not frame.number:
                self.last_number += 1
                frame.number = self.last_number
            self.sent.append(frame)
            self.writing.append(frame.bytes_of_header())
            if frame.payload:
                self.writing.append(frame.payload)
            size += len(frame.payload)
        return bool(self.writing)

    def take_header(self) -> Sequence[Exchange]:
        """Act on a whole header; return the exchanges that lose one reason to wait."""
        plain = self.header[: _HEADER.size]
        (check,) = _CHECK.unpack_from(self.header, _HEADER.size)
        kind, length, number, line, low, crc, offset, total = _HEADER.unpack(plain)
        if zlib.crc32(plain) != check or length > PIECE_BYTES or not 1 <= kind <= max(FrameKind):
            raise Refused("a header came damaged")
        tag = line << _LINE_BITS | low
        self.expect_header()
        if kind not in _NUMBERED:
            return self._take_receipt(FrameKind(kind), number, offset)
        if number != self.received + 1:
            raise Refused(f"message {number} came after message {self.received}")
        if kind == FrameKind.READY:
            self._count()
            self._take_ready(tag)
            return ()
        if offset + length > total or not length:
            raise Refused("a message reaches past its end")
        box = self.boxes.get(tag)
        place = None
        if box is not None and len(box.view) != total:
            del self.boxes[tag]
            box.exchange.fail(_other_size(self, total, len(box.view)))
            box = None
        if box is not None:
            into = box.view[offset : offset + length]
            place = box
        elif kind == FrameKind.EAGER:
            if length > EAGER_BYTES or sum(map(len, self.early.values())) + length > EAGER_BUDGET:
                raise Refused("more came unasked than is kept")
            place = bytearray(length)  # type: ignore[assignment]
            into = memoryview(place)  # type: ignore[arg-type]
        else:
            into = self.scratch[:length]
        self.reads = (FrameKind(kind), tag, length, total, crc, place)
        self.into = into
        self.crc = 0
        return ()

    def take_payload(self) -> Sequence[Exchange]:
        """Act on a whole payload; return the exchange that loses a reason to wait, of which nothing
        is held here.
        """
        assert self.reads is not None
        kind, tag, length, _, crc, place = self.reads
        self.expect_header()
        if crc != self.crc:
            raise Refused("a message came damaged")
        self._count()
        if isinstance(place, bytearray):
            return self._take_unasked(tag, place)
        if kind == FrameKind.EAGER:
            self.used += length
        if place is None:
            return ()
        place.left -= length
        if place.left:
            return ()
        self.is_waited_for = self.is_waited_for or kind is FrameKind.PIECE
        self.boxes.pop(tag, None)
        return (place.exchange,)

    def _take_unasked(self, tag: int, came: bytearray) -> Sequence[Exchange]:
        """Keep an eager tensor until there is a box for it, or fill the box that was made while it
        came.
        """
        box = self.boxes.pop(tag, None)
        if box is None:
            self.early[tag] = bytes(came)
            return ()
        self.used += len(came)
        asked = next(
            (frame for frame in self.urgent if frame.tag == tag and frame.kind is FrameKind.READY),
            None,
        )
        if asked is not None:
            # The other would keep it for a tensor that it has sent already
            self.urgent.remove(asked)
        if len(came) != len(box.view):
            box.exchange.fail(_other_size(self, len(came), len(box.view)))
            return ()
        box.view[:] = came
        return (box.exchange,)

    def _count(self) -> None:
        self.received += 1
        self.owes_receipt = True

    def _take_ready(self, tag: int) -> None:
        offer = self.offers.pop(tag, None)
        if offer is not None:
            self._queue_pieces(offer, tag)
        elif tag not in self.eager:
            self.ready[tag] = True

    def _take_receipt(self, kind: FrameKind, number: int, used: int) -> Sequence[Exchange]:
        self.eager_used = used
        ended = self.received_up_to(number)
        if kind is FrameKind.RESUME:
            self.queue.extendleft(reversed(self.sent))
            self.sent.clear()
            self.resumed = True
        if kind is FrameKind.RESUME or not self.has_unreceived:
            self.changed.notify_all()
        return ended


def _other_size(link: Link, came: int, expected: int) -> ModelMismatchError:
    return ModelMismatchError(
        f"rank {link.rank} sent {came} bytes where this rank expects {expected}.",
        "Ranks differ in a shape or a dtype.",
        "give every rank the same model, batch shapes and configuration.",
    )
