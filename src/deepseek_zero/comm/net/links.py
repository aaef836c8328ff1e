"""Our own sockets between hosts: one authenticated connection for each pair of ranks, and messages
known by their tag.

A message is a header and at most PIECE_BYTES; a longer tensor is several pieces.  Small tensors
leave at once and wait at the receiver for their box, as long as no more than EAGER_BUDGET bytes of
them do.  Every other tensor waits for READY, which a receiver says when it has a box for it: its
pieces land straight in that box, stored nowhere on the way. What is small leaves before the pieces
that are queued, and the kernel is given little that it cannot send: a receipt behind megabytes
would keep a collective waiting whose data has come.

Messages are numbered.  A receiver says up to which number it has them, and a sender keeps what has
not been received, so that a connection that broke, or fell silent, is replaced by a new one and
goes on where it was.  A rank is lost when nobody listens any more where it did, or when its host
does not answer for `dead_after` seconds.  A rank that is stopped or busy is neither: its host still
answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ModelMismatchError
from ...base.launch import TELL_AFTER, dead_after
from ...base.log import logger
from ..ids import CollectiveId, engine_of, lane_of_tag, tag_of
from ..transports.base import ConnectionLost, Wait, poll_interval_of
from .channel import (
    Address,
    Hello,
    Listener,
    Refused,
    Role,
    dial,
    end_with_the_host,
    has_unanswered,
    introduce,
)

PIECE_BYTES = 1 << 18  # which a receipt or a question may wait for, if it has begun to leave
# That the kernel takes of a connection and has not sent yet: they wait for those, too
UNSENT_BYTES = 1 << 18
EAGER_BYTES = 1 << 14  # a tensor up to this size is copied, and leaves without a question
EAGER_BUDGET = 1 << 20  # of such bytes that one rank keeps for another
BEAT_SECONDS = 1.0  # a connection with nothing to say says so
SILENT_SECONDS = 3.0  # then a new connection is tried
ATTEMPT_SECONDS = 1.0  # of one attempt to reach it
PAUSE_SECONDS = 0.2  # between attempts
CONNECT_SECONDS = 30.0
FAREWELL_SECONDS = 1.0  # for the others to receive what this rank sent last
RECEIPT_SECONDS = 0.02  # that a receipt waits for a message to go with, where nobody waits for it
WAKE_BYTES = 1 << 17  # of a payload, that have come before the thread that serves is woken for them
_READ_AT_ONCE = 1 << 21  # bytes that are read before another connection's turn
_GATHERED = 16  # messages written by one call
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


class _Exchange:
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
class _Frame:
    """A message to send, until the other has received it. exchange: what ends with it."""

    kind: FrameKind
    tag: int
    payload: memoryview | bytes = b""
    offset: int = 0
    total: int = 0
    exchange: _Exchange | None = None
    number: int = 0
    header: bytes = b""

    def bytes_of_header(self) -> bytes:
        if not self.header:
            self.header = _header(
                self.kind,
                self.number,
                self.tag,
                len(self.payload),
                zlib.crc32(self.payload),
                self.offset,
                self.total,
            )
        return self.header


def _header(
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
class _Box:
    """Where a tensor lands. left: bytes that are still to come."""

    view: memoryview
    left: int
    exchange: _Exchange


@dataclass(eq=False)
class _Offer:
    """A tensor that waits for its receiver to be ready."""

    view: memoryview
    exchange: _Exchange


@dataclass(eq=False)
class _Link:
    """Everything between this rank and one other. host: as messages name it. gone: why it is lost,
    once it is.
    """

    rank: int
    address: Address
    host: str
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
    urgent: deque[_Frame] = field(default_factory=deque)
    queue: deque[_Frame] = field(default_factory=deque)
    sent: deque[_Frame] = field(default_factory=deque)  # and not received yet, as far as is known
    writing: deque[memoryview | bytes] = field(default_factory=deque)
    is_blocked: bool = False
    last_number: int = 0
    offers: dict[int, _Offer] = field(default_factory=dict)
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
    boxes: dict[int, _Box] = field(default_factory=dict)
    early: dict[int, bytes] = field(default_factory=dict)  # eager tensors without a box
    header: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    # The rest of what is being read
    into: memoryview = field(default_factory=lambda: memoryview(b""))
    reads: tuple[FrameKind, int, int, int, int, _Box | bytearray | None] | None = (
        None  # a payload's kind, tag, ..., place
    )
    crc: int = 0
    wakes_at: int = 1  # bytes that have come before the kernel tells of them

    def expect_header(self) -> None:
        self.reads, self.into = None, memoryview(self.header)

    def received_up_to(self, number: int) -> list[_Exchange]:
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

    def next_frame(self) -> _Frame | None:
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


class Links:
    """The connections of one rank to the ranks of other hosts, whatever groups they form, and the
    thread that serves them.

    Ranks are those of the world here; `Tcp` speaks of a group's.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        listener: Listener,
        addresses: Mapping[int, Address],
        names: Sequence[str] = (),
    ) -> None:
        """addresses: of the far ranks' listeners.  names: of all ranks' hosts, where they are
        known.
        """
        self.rank = rank
        self.listener = listener
        self._secret = secret
        self.links: dict[int, _Link] = {}
        for peer, address in addresses.items():
            name = f"{names[peer]} ({address[0]})" if names else address[0]
            self.links[peer] = _Link(peer, address, name)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._of_descriptor: dict[int, _Link] = {}
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        # For pieces that nobody waits for any more
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self._lanes: dict[str, int] = {}  # the number of each lane that was used
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._serve, daemon=True, name="deepseek-zero-sockets"
        )
        _OPEN.add(self)

    def connect(self) -> str:
        """Connect to all far ranks; return why that failed, or "". Every rank calls it, after all
        listeners are open.
        """
        self.listener.admit(Role.DATA, self._admit)
        self._thread.start()
        for link in self.links.values():
            if self._dials(link):
                self._start_recovery(link)
        with self._changed:
            self._changed.wait_for(
                lambda: all(link.resumed or link.gone for link in self.links.values()),
                CONNECT_SECONDS,
            )
            missing = [link for link in self.links.values() if not link.resumed]
        return "; ".join(
            f"rank {self.rank} has no connection to rank {link.rank} at "
            f"{link.address[0]}:{link.address[1]}" + (f" ({link.gone})" if link.gone else "")
            for link in missing
        )

    def start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        """Send a tensor to each of these ranks and receive one; by rank (outgoing, incoming), empty
        ones not at all.
        """
        exchange = _Exchange(cid)
        tag = tag_of(cid)
        lost = None
        with self._lock:
            self._lanes[cid.lane] = cid.lane_number
            exchange.left = 1  # until all are begun
            for peer, (outgoing, incoming) in messages.items():
                link = self.links[peer]
                if link.gone and (outgoing.numel() or incoming.numel()):
                    lost = lost or _lost(link)
                    continue
                if incoming.numel():
                    self._receive(link, _bytes_of(incoming), tag, exchange)
                if outgoing.numel():
                    self._send(link, _bytes_of(outgoing), tag, exchange)
            if lost is not None:
                exchange.fail(lost)
            exchange.end_one()
            for peer in messages:
                self._push(self.links[peer])
        return exchange.wait

    def end_engine(self, engine: str) -> None:
        """Drop what lanes of an engine that is gone still wait for."""
        with self._lock:
            names = [lane for lane in self._lanes if engine_of(lane) == engine]
            lanes = {self._lanes.pop(name) for name in names}
            for link in self.links.values():
                kept: tuple[dict[int, Any], ...] = (link.boxes, link.offers, link.ready, link.early)
                for tags in kept:
                    for tag in [tag for tag in tags if lane_of_tag(tag) in lanes]:
                        link.used += len(tags[tag]) if tags is link.early else 0
                        del tags[tag]

    def close(self) -> None:
        """Hang up, and stop listening."""
        self.hang_up()
        self.listener.close()

    def hang_up(self) -> None:
        """Wait until the others have received what was sent, for a second at most, and close all
        connections.
        """
        with self._changed:
            if self._is_closing:
                return
            self._changed.wait_for(
                lambda: not any(link.has_unreceived for link in self.links.values()),
                FAREWELL_SECONDS,
            )
            self._is_closing = True
        self._rouse()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(FAREWELL_SECONDS)
        with self._lock:
            for link in self.links.values():
                self._disconnect(link)

    # -- sending

    def _send(self, link: _Link, view: memoryview, tag: int, exchange: _Exchange) -> None:
        size = len(view)
        is_ready = link.ready.pop(tag, False)
        if size <= EAGER_BYTES and link.eager_sent + size - link.eager_used <= EAGER_BUDGET:
            link.eager_sent += size
            link.eager.add(tag)
            link.urgent.append(_Frame(FrameKind.EAGER, tag, bytes(view), 0, size))
            return
        if size <= EAGER_BYTES and is_ready:
            link.queue.append(_Frame(FrameKind.PIECE, tag, bytes(view), 0, size))
            return
        exchange.left += 1
        if is_ready:
            self._queue_pieces(link, _Offer(view, exchange), tag)
        else:
            link.offers[tag] = _Offer(view, exchange)

    def _queue_pieces(self, link: _Link, offer: _Offer, tag: int) -> None:
        total = len(offer.view)
        for start in range(0, total, PIECE_BYTES):
            piece = offer.view[start : start + PIECE_BYTES]
            ends = offer.exchange if start + PIECE_BYTES >= total else None
            link.queue.append(_Frame(FrameKind.PIECE, tag, piece, start, total, ends))

    def _push(self, link: _Link) -> None:
        """Have what is queued be written: small messages by this thread, at once, others by the one
        that serves.
        """
        if not (link.unsent and link.resumed) or link.is_blocked:
            return
        is_short = link.unsent <= _GATHERED
        if (
            is_short
            and sum(len(frame.payload) for frame in (*link.urgent, *link.queue)) <= EAGER_BYTES
        ):
            self._write_or_break(link)
        else:
            self._rouse()

    def _write_or_break(self, link: _Link) -> None:
        try:
            self._write(link)
        except OSError as error:
            self._break(link, error)

    def _write(self, link: _Link) -> None:
        """Write until nothing is left or the kernel takes no more."""
        connection = link.connection
        writing = link.writing
        if connection is None:
            return
        while writing or self._gather(link):
            try:
                count = connection.sendmsg(list(writing)[: 2 * _GATHERED + 1])
            except BlockingIOError:
                self._watch(link, blocked=True)
                return
            link.spoke = time.monotonic()
            while count:
                first = writing.popleft()
                if count < len(first):
                    writing.appendleft(memoryview(first)[count:])
                    break
                count -= len(first)
        self._watch(link, blocked=False)

    def _gather(self, link: _Link) -> bool:
        """Take the next messages to write; return whether there are any."""
        if link.owes_receipt and (link.is_waited_for or link.unsent):
            link.owes_receipt = link.is_waited_for = False
            link.writing.append(_header(FrameKind.RECEIVED, link.received, offset=link.used))
        size = 0
        while link.resumed and size < PIECE_BYTES and len(link.writing) < 2 * _GATHERED:
            if (frame := link.next_frame()) is None:
                break
            if not frame.number:
                link.last_number += 1
                frame.number = link.last_number
            link.sent.append(frame)
            link.writing.append(frame.bytes_of_header())
            if frame.payload:
                link.writing.append(frame.payload)
            size += len(frame.payload)
        return bool(link.writing)

    def _watch(self, link: _Link, *, blocked: bool) -> None:
        if link.connection is not None and link.is_blocked != blocked:
            link.is_blocked = blocked
            self._poll.modify(link.connection, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    # -- receiving

    def _receive(self, link: _Link, view: memoryview, tag: int, exchange: _Exchange) -> None:
        early = link.early.pop(tag, None)
        if early is None:
            exchange.left += 1
            link.boxes[tag] = _Box(view, len(view), exchange)
            link.urgent.append(_Frame(FrameKind.READY, tag, total=len(view)))
            return
        link.used += len(early)
        link.owes_receipt = True
        if len(early) != len(view):
            exchange.fail(_other_size(link, len(early), len(view)))
        else:
            view[:] = early

    def _read(self, link: _Link) -> None:
        """Read what has arrived, up to _READ_AT_ONCE bytes. OSError where the connection is of no
        more use.
        """
        left = _READ_AT_ONCE
        while link.connection is not None and (left > 0 or _has_more(link.connection)):
            try:
                count = link.connection.recv_into(link.into)
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            link.heard = time.monotonic()
            left -= count
            if link.reads is not None:
                link.crc = zlib.crc32(link.into[:count], link.crc)
            link.into = link.into[count:]
            if not link.into:
                for exchange in (
                    self._take_payload(link) if link.reads is not None else self._take_header(link)
                ):
                    exchange.end_one()
        wanted = min(len(link.into), WAKE_BYTES) if link.reads is not None else 1
        self._wake_at(link, wanted)

    def _wake_at(self, link: _Link, nbytes: int) -> None:
        """Have the kernel wake the reader only when `nbytes` have arrived, all of which are
        expected.

        A slow line brings a packet at a time, and a thread that is woken for each takes a core from
        what computes.
        """
        connection = link.connection
        if connection is None or link.wakes_at == nbytes or isinstance(connection, ssl.SSLSocket):
            return  # TLS may hold a part of them already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        link.wakes_at = nbytes

    def _take_header(self, link: _Link) -> Sequence[_Exchange]:
        """Act on a whole header; return the exchanges that lose one reason to wait."""
        plain = link.header[: _HEADER.size]
        (check,) = _CHECK.unpack_from(link.header, _HEADER.size)
        kind, length, number, line, low, crc, offset, total = _HEADER.unpack(plain)
        if zlib.crc32(plain) != check or length > PIECE_BYTES or not 1 <= kind <= max(FrameKind):
            raise Refused("a header came damaged")
        tag = line << _LINE_BITS | low
        link.expect_header()
        if kind not in _NUMBERED:
            return self._take_receipt(link, FrameKind(kind), number, offset)
        if number != link.received + 1:
            raise Refused(f"message {number} came after message {link.received}")
        if kind == FrameKind.READY:
            self._count(link)
            self._take_ready(link, tag)
            return ()
        if offset + length > total or not length:
            raise Refused("a message reaches past its end")
        box = link.boxes.get(tag)
        place = None
        if box is not None and len(box.view) != total:
            del link.boxes[tag]
            box.exchange.fail(_other_size(link, total, len(box.view)))
            box = None
        if box is not None:
            into = box.view[offset : offset + length]
            place = box
        elif kind == FrameKind.EAGER:
            if length > EAGER_BYTES or sum(map(len, link.early.values())) + length > EAGER_BUDGET:
                raise Refused("more came unasked than is kept")
            place = bytearray(length)  # type: ignore[assignment]
            into = memoryview(place)  # type: ignore[arg-type]
        else:
            into = self._scratch[:length]
        link.reads = (FrameKind(kind), tag, length, total, crc, place)
        link.into = into
        link.crc = 0
        return ()

    def _take_payload(self, link: _Link) -> Sequence[_Exchange]:
        """Act on a whole payload; return the exchange that loses a reason to wait, of which nothing
        is held here.
        """
        assert link.reads is not None
        kind, tag, length, _, crc, place = link.reads
        link.expect_header()
        if crc != link.crc:
            raise Refused("a message came damaged")
        self._count(link)
        if isinstance(place, bytearray):
            return self._take_unasked(link, tag, place)
        if kind == FrameKind.EAGER:
            link.used += length
        if place is None:
            return ()
        place.left -= length
        if place.left:
            return ()
        link.is_waited_for = link.is_waited_for or kind is FrameKind.PIECE
        link.boxes.pop(tag, None)
        return (place.exchange,)

    def _take_unasked(self, link: _Link, tag: int, came: bytearray) -> Sequence[_Exchange]:
        """Keep an eager tensor until there is a box for it, or fill the box that was made while it
        came.
        """
        box = link.boxes.pop(tag, None)
        if box is None:
            link.early[tag] = bytes(came)
            return ()
        link.used += len(came)
        asked = next(
            (frame for frame in link.urgent if frame.tag == tag and frame.kind is FrameKind.READY),
            None,
        )
        if asked is not None:
            # The other would keep it for a tensor that it has sent already
            link.urgent.remove(asked)
        if len(came) != len(box.view):
            box.exchange.fail(_other_size(link, len(came), len(box.view)))
            return ()
        box.view[:] = came
        return (box.exchange,)

    def _count(self, link: _Link) -> None:
        link.received += 1
        link.owes_receipt = True

    def _take_ready(self, link: _Link, tag: int) -> None:
        offer = link.offers.pop(tag, None)
        if offer is not None:
            self._queue_pieces(link, offer, tag)
        elif tag not in link.eager:
            link.ready[tag] = True

    def _take_receipt(
        self, link: _Link, kind: FrameKind, number: int, used: int
    ) -> Sequence[_Exchange]:
        link.eager_used = used
        ended = link.received_up_to(number)
        if kind is FrameKind.RESUME:
            link.queue.extendleft(reversed(link.sent))
            link.sent.clear()
            link.resumed = True
        if kind is FrameKind.RESUME or not link.has_unreceived:
            self._changed.notify_all()
        return ended

    # -- the thread that serves

    def _serve(self) -> None:
        looked = time.monotonic()
        while not self._is_closing:
            owes = any(link.owes_receipt for link in self.links.values())
            seconds = RECEIPT_SECONDS if owes else BEAT_SECONDS
            events = self._poll.poll(seconds)
            with self._lock:
                for descriptor, event in events:
                    if descriptor == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    elif (link := self._of_descriptor.get(descriptor)) is not None:
                        self._look_at(link, event)
                for link in self.links.values():
                    link.is_waited_for |= link.owes_receipt and not events
                    if link.connection is not None and not link.is_blocked:
                        self._write_or_break(link)
            if time.monotonic() - looked > BEAT_SECONDS / 2:
                looked = time.monotonic()
                self._beat(looked)

    def _look_at(self, link: _Link, event: int) -> None:
        try:
            if event & ~select.EPOLLOUT:
                self._read(link)
            if event & select.EPOLLOUT:
                self._write(link)
        except OSError as error:
            self._break(link, error)

    def _beat(self, now: float) -> None:
        """Tell the others that this rank is there; try a new connection to those that are
        silent.
        """
        with self._lock:
            for link in self.links.values():
                if link.generation and not link.gone:
                    _tell_silence(link, now)
                if link.connection is None and link.generation:
                    # Should the last one have ended at the moment of the break
                    self._start_recovery(link)
                if link.wakes_at > 1:
                    # What a slow line has brought so far is a sign of life
                    self._look_at(link, select.EPOLLIN)
                if not link.resumed:
                    continue
                if now - link.spoke >= BEAT_SECONDS and not link.is_blocked:
                    link.owes_receipt = link.is_waited_for = True
                    self._write_or_break(link)
                if now - link.heard > SILENT_SECONDS:
                    self._start_recovery(link)

    def _rouse(self) -> None:
        os.eventfd_write(self._wake, 1)

    # -- connections

    def _dials(self, link: _Link) -> bool:
        """Return whether this rank is the one of the two that makes connections."""
        return self.rank > link.rank

    def _admit(self, connection: socket.socket, rank: int) -> None:
        link = self.links.get(rank)
        if link is None or self._dials(link):
            connection.close()
        else:
            self._install(link, connection)

    def _install(self, link: _Link, connection: socket.socket) -> None:
        """Go on over a new connection."""
        connection.setblocking(False)
        _keep_little_unsent(connection)
        with self._lock:
            if self._is_closing or link.gone:
                connection.close()
                return
            self._disconnect(link)
            link.connection, link.generation, link.heard = (
                connection,
                link.generation + 1,
                time.monotonic(),
            )
            link.writing.append(_header(FrameKind.RESUME, link.received, offset=link.used))
            link.expect_header()
            self._of_descriptor[connection.fileno()] = link
            self._poll.register(connection, select.EPOLLIN)
        self._rouse()

    def _disconnect(self, link: _Link) -> None:
        if link.connection is not None:
            self._of_descriptor.pop(link.connection.fileno(), None)
            link.connection.close()
        link.connection = None
        link.resumed = False
        link.is_blocked = False
        link.owes_receipt = False
        link.is_waited_for = False
        link.wakes_at = 1
        link.writing.clear()
        link.expect_header()

    def _break(self, link: _Link, error: OSError) -> None:
        """Drop a connection that is of no more use, and look for another."""
        if isinstance(error, Refused):
            logger.warning(f"the connection to rank {link.rank} is made anew: {error}")
        self._disconnect(link)
        self._start_recovery(link)

    def _start_recovery(self, link: _Link) -> None:
        if not (link.recovering or link.gone or self._is_closing):
            link.recovering = True
            name = f"deepseek-zero-reach-{link.rank}"
            threading.Thread(target=self._recover, args=(link,), daemon=True, name=name).start()

    def _recover(self, link: _Link) -> None:
        """Look for a new connection until there is one, or evidence that the rank is lost."""
        generation = link.generation
        began = time.monotonic()
        # Not before: this rank may have stood still itself
        answered = max(link.heard, began - SILENT_SECONDS)
        # A cut begins so long after the last sign, on the average
        limit = dead_after() + BEAT_SECONDS / 2
        try:
            while not (self._is_closing or link.gone):
                now = time.monotonic()
                if link.resumed and (link.generation > generation or self._is_back(link, began)):
                    return
                if (
                    link.generation > generation
                    and link.connection is not None
                    and now - link.heard < SILENT_SECONDS
                ):
                    # It is new: the other end has not said where to go on yet
                    time.sleep(PAUSE_SECONDS / 10)
                    continue
                try:
                    self._reach(
                        link, min(ATTEMPT_SECONDS, max(PAUSE_SECONDS, answered + limit - now))
                    )
                    answered = time.monotonic()
                except (
                    Refused,
                    ConnectionRefusedError,
                ):  # nobody listens there any more, or somebody else
                    self._lose(link, "its process has ended")
                    return
                except OSError:
                    if time.monotonic() - answered > limit:
                        link.is_silent = True
                        self._lose(
                            link, f"its host {link.host} has not answered for {dead_after():g} s"
                        )
                        return
                time.sleep(PAUSE_SECONDS)
        finally:
            link.recovering = False

    def _is_back(self, link: _Link, began: float) -> bool:
        """Return whether the old connection carries again, both ways.

        Who dials has a new one sooner than a kernel sends again what nobody has acknowledged.
        """
        if link.heard <= began:
            return False
        connection = link.connection
        return connection is None or not self._dials(link) or not has_unanswered(connection)

    def _reach(self, link: _Link, seconds: float) -> None:
        """Make a new connection, if that is this rank's part, or ask whether the other still lives.

        A process that is stopped takes its time to answer, while its host keeps the connection
        alive. Raises ConnectionRefusedError or `Refused` if it does not listen any more, OSError if
        its host does not answer.
        """
        connection = dial(link.address, seconds)
        try:
            end_with_the_host(connection, dead_after())
            connection.settimeout(None)
            dials = self._dials(link)
            role = Role.DATA if dials else Role.KNOCK
            hello = Hello(role, self.rank, link.rank)
            connection = introduce(connection, self._secret, hello)
            if dials:
                self._install(link, connection)
        except BaseException:
            connection.close()
            raise
        if not dials:
            connection.close()

    def _lose(self, link: _Link, reason: str) -> None:
        """Give a rank up: whatever waits for it ends in `ConnectionLost`."""
        with self._changed:
            if link.gone or self._is_closing:
                return
            link.gone = reason
            self._disconnect(link)
            ended = {box.exchange for box in link.boxes.values()} | {
                offer.exchange for offer in link.offers.values()
            }
            ended |= {
                frame.exchange for frame in (*link.queue, *link.sent) if frame.exchange is not None
            }
            frames = link.urgent, link.queue, link.sent
            for kept in (*frames, link.boxes, link.offers, link.early, link.ready, link.eager):
                kept.clear()
            for exchange in ended:
                exchange.fail(_lost(link))
            self._changed.notify_all()

    def _close_in_child(self) -> None:
        for (
            link
        ) in self.links.values():  # or it would look as if this rank still lived when it has ended
            if link.connection is not None:
                link.connection.close()


def _keep_little_unsent(connection: socket.socket) -> None:
    """Have the kernel take no more of a connection than it can soon send, where it knows how."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _has_more(connection: socket.socket) -> bool:
    """Return whether a connection by TLS has read what nobody has taken yet; of that the kernel
    says nothing.
    """
    return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0


def _tell_silence(link: _Link, now: float) -> None:
    """Say once that a rank is silent, and once that it is heard again."""
    if link.silence_told_at is None and now - link.heard > TELL_AFTER:
        link.silence_told_at = link.heard
        logger.warning(f"rank {link.rank} on {link.host} is silent; this rank waits for it")
    elif link.silence_told_at is not None and now - link.heard < SILENT_SECONDS:
        seconds = link.heard - link.silence_told_at
        logger.warning(f"rank {link.rank} on {link.host} is heard again, after {seconds:.1f} s")
        link.silence_told_at = None


def _lost(link: _Link) -> ConnectionLost:
    return ConnectionLost(
        f"rank {link.rank} is lost: {link.gone}", link.rank, is_silence=link.is_silent
    )


def _other_size(link: _Link, came: int, expected: int) -> ModelMismatchError:
    return ModelMismatchError(
        f"rank {link.rank} sent {came} bytes where this rank expects {expected}.",
        "Ranks differ in a shape or a dtype.",
        "give every rank the same model, batch shapes and configuration.",
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat tensor as bytes, to be read or written."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


_OPEN: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    for links in list(_OPEN):
        links._close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
