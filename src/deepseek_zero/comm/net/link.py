"""Messages between two ranks of different hosts, over a sequence of connections.

A message is a header and at most PIECE_BYTES; a longer tensor is sent in several pieces. Small
tensors are sent at once and kept by the receiver until their box exists, up to EAGER_BUDGET bytes.
Every other tensor waits for READY, which a receiver sends when it has a box for it. Its pieces are
received straight into the box, without an intermediate copy. Small messages are sent before queued
pieces.

Messages are numbered. A receiver acknowledges the last number, and a sender keeps messages until
they are acknowledged, so a new connection continues where the last one ended.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from ...base.errors import ModelMismatchError
from ..ids import lane_of_tag
from ..transports.base import Completion
from .channel import Address, Refused

# An acknowledgement or a READY may have to wait for one piece that is being sent
PIECE_BYTES = 1 << 18
EAGER_BYTES = 1 << 14  # A tensor up to this size is copied and sent without READY
EAGER_BUDGET = 1 << 20  # Bytes of such tensors that one rank keeps for another
GATHERED = 16  # Messages written by one call
_HEADER = struct.Struct("<BxxxIQQIIQQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_LINE_BITS = 32


class FrameKind(IntEnum):
    """The kinds of messages."""

    EAGER = 1  # A whole small tensor, sent without READY
    PIECE = 2  # A part of a tensor after READY
    READY = 3  # The sender has a box for this tensor
    RECEIVED = 4  # Acknowledges all messages up to this number; has no number
    RESUME = 5  # The same, as the first message on a new connection


_NUMBERED = (FrameKind.EAGER, FrameKind.PIECE, FrameKind.READY)


class Exchange(Completion):
    """The state of one collective on this rank.

    Attributes:
        left: Boxes that are not filled, and sent tensors that are not acknowledged.
    """

    left = 0

    def end_one(self) -> None:
        """Record that one message has been transferred; end the collective after the last one."""
        self.left -= 1
        if not self.left:
            self.cid.arrived.append(time.perf_counter())
            self.event.set()

    def fail(self, error: Exception) -> None:
        """End the collective with an error. If it is called again, the first error is kept."""
        self.error = self.error or error
        self.event.set()


@dataclass(eq=False)
class Frame:
    """A message to send, kept until it is acknowledged.

    Attributes:
        kind: The kind of the message.
        tag: The tag of the collective.
        payload: The bytes of the tensor or of its piece.
        offset: The position of the piece in the tensor, in bytes.
        total: The size of the tensor in bytes.
        exchange: The exchange whose `left` this message decrements when it is acknowledged.
        number: The number of the message; 0 until it is sent.
    """

    kind: FrameKind
    tag: int
    payload: memoryview | bytes = b""
    offset: int = 0
    total: int = 0
    exchange: Exchange | None = None
    number: int = 0

    def header(self) -> Header:
        """Return the header that is sent before the payload."""
        return Header(
            self.kind,
            self.number,
            self.tag,
            len(self.payload),
            zlib.crc32(self.payload),
            self.offset,
            self.total,
        )


class Header(NamedTuple):
    """The header of a message, which is sent before its payload.

    Attributes:
        kind: The kind of the message.
        number: The number of the message, or the last received number in an acknowledgement.
        tag: The tag of the collective.
        length: The length of the payload in bytes.
        crc: The checksum of the payload.
        offset: The position of the piece in the tensor, or the used eager bytes in an
            acknowledgement.
        total: The size of the tensor in bytes.
    """

    kind: FrameKind
    number: int
    tag: int = 0
    length: int = 0
    crc: int = 0
    offset: int = 0
    total: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes, with a checksum at the end."""
        kind, number, tag, length, crc, offset, total = self
        line, check = divmod(tag, 1 << _LINE_BITS)
        packed = _HEADER.pack(kind, length, number, line, check, crc, offset, total)
        return packed + _CHECK.pack(zlib.crc32(packed))

    @classmethod
    def unpack(cls, data: bytearray) -> Header:
        """Return the header that `pack` wrote.

        Raises:
            Refused: The header is damaged.
        """
        packed = data[: _HEADER.size]
        kind, length, number, line, low, crc, offset, total = _HEADER.unpack(packed)
        is_valid = _CHECK.pack(zlib.crc32(packed)) == data[_HEADER.size :]
        if not is_valid or length > PIECE_BYTES or kind not in tuple(FrameKind):
            raise Refused("a header is damaged")
        return cls(FrameKind(kind), number, line << _LINE_BITS | low, length, crc, offset, total)


@dataclass(eq=False)
class ReceiveBuffer:
    """The box of one tensor.

    Attributes:
        view: The memory that is filled.
        left: Bytes that are still to be received.
        exchange: The exchange that waits for it.
    """

    view: memoryview
    left: int
    exchange: Exchange


class Offer(NamedTuple):
    """A tensor that waits for READY.

    Attributes:
        view: The memory to send.
        exchange: The exchange that waits for the acknowledgement.
    """

    view: memoryview
    exchange: Exchange


@dataclass(eq=False)
class Link:
    """The state of the messages and connections between this rank and one other rank.

    Attributes:
        rank: The other world rank.
        address: The address of its listener.
        host: The name of its host for messages.
        changed: Notified when the other end has resumed and when it has received everything.
        scratch: Receives pieces that no exchange waits for any more.
        connection: The current connection.
        generation: Number of connections so far.
        resumed: Whether the other end has sent RESUME over this connection.
        recovering: Whether a thread looks for a new connection.
        gone: Why the rank is lost; "" if it is not lost.
        is_silent: Whether the reason is that its host does not answer.
        heard: The time of the last received data.
        spoke: The time of the last sent data.
        silence_logged_at: The time of the last received data before a logged silence.
    """

    rank: int
    address: Address
    host: str
    changed: threading.Condition
    scratch: memoryview
    connection: socket.socket | None = None
    generation: int = 0
    resumed: bool = False
    recovering: bool = False
    gone: str = ""
    is_silent: bool = False
    heard: float = 0.0
    spoke: float = 0.0
    silence_logged_at: float | None = None
    # sending
    # READY and eager tensors, sent before `queue`
    urgent: deque[Frame] = field(default_factory=deque)
    queue: deque[Frame] = field(default_factory=deque)
    sent: deque[Frame] = field(default_factory=deque)  # Sent, but not acknowledged
    writing: deque[memoryview | bytes] = field(default_factory=deque)
    is_blocked: bool = False
    last_number: int = 0
    offers: dict[int, Offer] = field(default_factory=dict)
    # Tags for which the other rank has a box and this rank has no tensor yet
    ready: set[int] = field(default_factory=set)
    # Tags of eager tensors that are not acknowledged yet
    eager: set[int] = field(default_factory=set)
    eager_sent: int = 0
    eager_used: int = 0  # Bytes, as acknowledged by the other rank
    # receiving
    received: int = 0
    used: int = 0  # Bytes of eager tensors that were copied to their boxes
    owes_receipt: bool = False
    is_waited_for: bool = False  # An exchange of the other rank waits for the acknowledgement
    boxes: dict[int, ReceiveBuffer] = field(default_factory=dict)
    early: dict[int, bytes] = field(default_factory=dict)  # Eager tensors without a box
    header: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    # The unread rest of the current header or payload
    into: memoryview = field(default_factory=lambda: memoryview(b""))
    # The header of the current payload and the place of its bytes
    reads: tuple[Header, ReceiveBuffer | bytearray | None] | None = None
    crc: int = 0
    wakes_at: int = 1  # Readable bytes after which the kernel wakes the reader

    def expect_header(self) -> None:
        """Expect the header of a message as the next bytes of the connection."""
        self.reads = None
        self.into = memoryview(self.header)

    def received_up_to(self, number: int) -> list[Exchange]:
        """Drop messages that the other rank has acknowledged.

        Args:
            number: Number of the last acknowledged message.

        Returns:
            The exchanges to decrement for these messages, which hold no memory here any more.
        """
        found = []
        while self.sent and self.sent[0].number <= number:
            frame = self.sent.popleft()
            self.eager.discard(frame.tag)
            if frame.exchange is not None:
                found.append(frame.exchange)
        return found

    def next_frame(self) -> Frame | None:
        """Take the next message to write, or None.

        Messages that were sent over an earlier connection keep their order.
        """
        is_sent_again = self.queue and self.queue[0].number
        waiting = self.queue if is_sent_again or not self.urgent else self.urgent
        return waiting.popleft() if waiting else None

    def drop_all(self) -> set[Exchange]:
        """Drop all messages, and return the exchanges that waited for them."""
        ended = {box.exchange for box in self.boxes.values()}
        ended |= {offer.exchange for offer in self.offers.values()}
        for frame in (*self.queue, *self.sent):
            if frame.exchange is not None:
                ended.add(frame.exchange)
        for frames in (self.urgent, self.queue, self.sent):
            frames.clear()
        self.boxes.clear()
        self.offers.clear()
        self.early.clear()
        self.ready.clear()
        self.eager.clear()
        return ended

    def drop_lanes(self, lanes: Collection[int]) -> None:
        """Drop the messages that these lanes still wait for."""
        self.used += sum(
            len(self.early.pop(tag)) for tag in list(self.early) if lane_of_tag(tag) in lanes
        )
        kept: tuple[dict[int, Any], ...] = (self.boxes, self.offers)
        for tags in kept:
            for tag in [tag for tag in tags if lane_of_tag(tag) in lanes]:
                del tags[tag]
        self.ready -= {tag for tag in self.ready if lane_of_tag(tag) in lanes}

    @property
    def has_unreceived(self) -> bool:
        """Return whether a message is unsent or not acknowledged."""
        return not self.gone and bool(self.urgent or self.queue or self.sent)

    # -- sending and receiving

    def receive(self, view: memoryview, tag: int, exchange: Exchange) -> None:
        """Receive a tensor: fill the box from an early message, or send READY.

        Args:
            view: The memory to fill.
            tag: The tag of the collective.
            exchange: The exchange that waits for it.
        """
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
        """Send a tensor: at once, after READY, or keep it until READY.

        Args:
            view: The memory to send.
            tag: The tag of the collective.
            exchange: The exchange that waits until it was received.
        """
        size = len(view)
        is_ready = tag in self.ready
        self.ready.discard(tag)
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
        """Move the next messages to `writing`; return whether there are any."""
        if self.owes_receipt and (self.is_waited_for or self.urgent or self.queue):
            self.owes_receipt = self.is_waited_for = False
            receipt = Header(FrameKind.RECEIVED, self.received, offset=self.used)
            self.writing.append(receipt.pack())
        size = 0
        while self.resumed and size < PIECE_BYTES and len(self.writing) < 2 * GATHERED:
            if (frame := self.next_frame()) is None:
                break
            if not frame.number:
                self.last_number += 1
                frame.number = self.last_number
            self.sent.append(frame)
            self.writing.append(frame.header().pack())
            if frame.payload:
                self.writing.append(frame.payload)
            size += len(frame.payload)
        return bool(self.writing)

    def take_header(self) -> Sequence[Exchange]:
        """Process a complete header, and return the exchanges to decrement.

        Raises:
            Refused: The header is damaged or does not follow the protocol.
        """
        header = Header.unpack(self.header)
        kind, number, tag, length, _, offset, total = header
        self.expect_header()
        if kind not in _NUMBERED:
            return self._take_receipt(kind, number, offset)
        if number != self.received + 1:
            raise Refused(f"message {number} arrived after message {self.received}")
        if kind is FrameKind.READY:
            self._count()
            self._take_ready(tag)
            return ()
        if offset + length > total or not length:
            raise Refused("a message is longer than its header states")
        box = self.boxes.get(tag)
        if box is not None and len(box.view) != total:
            del self.boxes[tag]
            box.exchange.fail(_other_size(self, total, len(box.view)))
            box = None
        place: ReceiveBuffer | bytearray | None = box
        if box is not None:
            self.into = box.view[offset : offset + length]
        elif kind is FrameKind.EAGER:
            if length > EAGER_BYTES or sum(map(len, self.early.values())) + length > EAGER_BUDGET:
                raise Refused("more early messages arrived than the buffer can hold")
            place = bytearray(length)
            self.into = memoryview(place)
        else:
            self.into = self.scratch[:length]
        self.reads = header, place
        self.crc = 0
        return ()

    def take_payload(self) -> Sequence[Exchange]:
        """Process a complete payload, and return the exchanges to decrement.

        Raises:
            Refused: The payload is damaged.
        """
        assert self.reads is not None
        header, place = self.reads
        self.expect_header()
        if header.crc != self.crc:
            raise Refused("a message is damaged")
        self._count()
        if isinstance(place, bytearray):
            return self._take_unasked(header.tag, place)
        if header.kind is FrameKind.EAGER:
            self.used += header.length
        if place is None:
            return ()
        place.left -= header.length
        if place.left:
            return ()
        self.is_waited_for = self.is_waited_for or header.kind is FrameKind.PIECE
        self.boxes.pop(header.tag, None)
        return (place.exchange,)

    def _take_unasked(self, tag: int, came: bytearray) -> Sequence[Exchange]:
        """Keep an eager tensor, or fill a box that was created while it arrived."""
        box = self.boxes.pop(tag, None)
        if box is None:
            self.early[tag] = bytes(came)
            return ()
        self.used += len(came)
        for frame in self.urgent:
            if frame.tag == tag and frame.kind is FrameKind.READY:
                # The other rank would apply this READY to a tensor that it has already sent
                self.urgent.remove(frame)
                break
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
            self.ready.add(tag)

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
        "use the same model, batch shapes and configuration on every rank.",
    )
