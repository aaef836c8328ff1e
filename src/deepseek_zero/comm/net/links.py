"""Our own sockets between hosts: one authenticated connection for each pair of ranks, and the
thread that serves all of them.

link.py has the messages of one pair of ranks, known by their tag.  Few bytes are queued in the
kernel at a time. Otherwise a receipt would wait until megabytes before it are sent, and with it a
collective whose data has arrived.

A connection that broke, or fell silent, is replaced by a new one and goes on where it was.  A rank
is lost when nobody listens any more where it did, or when its host does not answer for
`dead_after` seconds.  A rank that is stopped or busy is neither: its host still answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.launch import TELL_AFTER, dead_after
from ...base.log import logger
from ..ids import CollectiveId, engine_of, lane_of_tag, tag_of
from ..transports.base import ConnectionLost, Wait
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
from .link import (
    EAGER_BYTES,
    GATHERED,
    PIECE_BYTES,
    Exchange,
    FrameKind,
    Link,
    header_of,
)

# That the kernel takes of a connection and has not sent yet: they wait for those, too
UNSENT_BYTES = 1 << 18
BEAT_SECONDS = 1.0  # a connection with nothing to say says so
SILENT_SECONDS = 3.0  # then a new connection is tried
ATTEMPT_SECONDS = 1.0  # of one attempt to reach it
PAUSE_SECONDS = 0.2  # between attempts
CONNECT_SECONDS = 30.0
FAREWELL_SECONDS = 1.0  # for the others to receive what this rank sent last
RECEIPT_SECONDS = 0.02  # that a receipt waits for a message to go with, where nobody waits for it
WAKE_BYTES = 1 << 17  # of a payload, that have come before the thread that serves is woken for them
_READ_AT_ONCE = 1 << 21  # bytes that are read before another connection's turn


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
        self.secret = secret
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        scratch = memoryview(bytearray(PIECE_BYTES))
        self.links: dict[int, Link] = {}
        for peer, address in addresses.items():
            name = f"{names[peer]} ({address[0]})" if names else address[0]
            self.links[peer] = Link(peer, address, name, self._changed, scratch)
        self._of_descriptor: dict[int, Link] = {}
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._lanes: dict[str, int] = {}  # the number of each lane that was used
        self.is_closing = False
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
            if self.dials(link):
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
        exchange = Exchange(cid)
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
                    link.receive(_bytes_of(incoming), tag, exchange)
                if outgoing.numel():
                    link.send(_bytes_of(outgoing), tag, exchange)
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
            if self.is_closing:
                return
            self._changed.wait_for(
                lambda: not any(link.has_unreceived for link in self.links.values()),
                FAREWELL_SECONDS,
            )
            self.is_closing = True
        self._rouse()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(FAREWELL_SECONDS)
        with self._lock:
            for link in self.links.values():
                self._disconnect(link)

    # -- sending

    def _push(self, link: Link) -> None:
        """Have what is queued be written: small messages by this thread, at once, others by the one
        that serves.
        """
        if not (link.unsent and link.resumed) or link.is_blocked:
            return
        is_short = link.unsent <= GATHERED
        if (
            is_short
            and sum(len(frame.payload) for frame in (*link.urgent, *link.queue)) <= EAGER_BYTES
        ):
            self._write_or_break(link)
        else:
            self._rouse()

    def _write_or_break(self, link: Link) -> None:
        try:
            self._write(link)
        except OSError as error:
            self._break(link, error)

    def _write(self, link: Link) -> None:
        """Write until nothing is left or the kernel takes no more."""
        connection = link.connection
        writing = link.writing
        if connection is None:
            return
        while writing or link.gather():
            try:
                count = connection.sendmsg(list(writing)[: 2 * GATHERED + 1])
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

    def _watch(self, link: Link, *, blocked: bool) -> None:
        if link.connection is not None and link.is_blocked != blocked:
            link.is_blocked = blocked
            self._poll.modify(link.connection, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    # -- receiving

    def _read(self, link: Link) -> None:
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
                ended = link.take_payload() if link.reads is not None else link.take_header()
                for exchange in ended:
                    exchange.end_one()
        wanted = min(len(link.into), WAKE_BYTES) if link.reads is not None else 1
        self._wake_at(link, wanted)

    def _wake_at(self, link: Link, nbytes: int) -> None:
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

    # -- the thread that serves

    def _serve(self) -> None:
        looked = time.monotonic()
        while not self.is_closing:
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

    def _look_at(self, link: Link, event: int) -> None:
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

    def dials(self, link: Link) -> bool:
        """Return whether this rank is the one of the two that makes connections."""
        return self.rank > link.rank

    def _admit(self, connection: socket.socket, rank: int) -> None:
        link = self.links.get(rank)
        if link is None or self.dials(link):
            connection.close()
        else:
            self.install(link, connection)

    def install(self, link: Link, connection: socket.socket) -> None:
        """Go on over a new connection."""
        connection.setblocking(False)
        _keep_little_unsent(connection)
        with self._lock:
            if self.is_closing or link.gone:
                connection.close()
                return
            self._disconnect(link)
            link.connection, link.generation, link.heard = (
                connection,
                link.generation + 1,
                time.monotonic(),
            )
            link.writing.append(header_of(FrameKind.RESUME, link.received, offset=link.used))
            link.expect_header()
            self._of_descriptor[connection.fileno()] = link
            self._poll.register(connection, select.EPOLLIN)
        self._rouse()

    def _disconnect(self, link: Link) -> None:
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

    def _break(self, link: Link, error: OSError) -> None:
        """Drop a connection that is of no more use, and look for another."""
        if isinstance(error, Refused):
            logger.warning(f"the connection to rank {link.rank} is made anew: {error}")
        self._disconnect(link)
        self._start_recovery(link)

    def _start_recovery(self, link: Link) -> None:
        if not (link.recovering or link.gone or self.is_closing):
            link.recovering = True
            name = f"deepseek-zero-reach-{link.rank}"
            recovery = _Recovery(self, link)
            threading.Thread(target=recovery.run, daemon=True, name=name).start()

    def lose(self, link: Link, reason: str) -> None:
        """Give a rank up: whatever waits for it ends in `ConnectionLost`."""
        with self._changed:
            if link.gone or self.is_closing:
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


class _Recovery:
    """Looks for a new connection to a rank until there is one, or evidence that the rank is
    lost.
    """

    def __init__(self, links: Links, link: Link) -> None:
        self._links = links
        self._link = link
        self._generation = link.generation
        self._began = time.monotonic()
        # Not before: this rank may have stood still itself
        self._answered = max(link.heard, self._began - SILENT_SECONDS)
        # A cut begins so long after the last sign, on the average
        self._limit = dead_after() + BEAT_SECONDS / 2

    def run(self) -> None:
        """Try until it is over; a thread of its own does."""
        try:
            while not (self._links.is_closing or self._link.gone or self._is_over()):
                time.sleep(self._try())
        finally:
            self._link.recovering = False

    def _is_over(self) -> bool:
        """Return whether there is a connection that carries both ways."""
        link = self._link
        return link.resumed and (link.generation > self._generation or self._is_back())

    def _try(self) -> float:
        """Try to reach the other end once, or give it up; return how long to pause."""
        link = self._link
        now = time.monotonic()
        is_new = link.generation > self._generation and link.connection is not None
        if is_new and now - link.heard < SILENT_SECONDS:
            # The other end has not said where to go on yet
            return PAUSE_SECONDS / 10
        left = max(PAUSE_SECONDS, self._answered + self._limit - now)
        try:
            self._reach(min(ATTEMPT_SECONDS, left))
            self._answered = time.monotonic()
        except (Refused, ConnectionRefusedError):
            # Nobody listens there any more, or somebody else
            self._links.lose(link, "its process has ended")
        except OSError:
            if time.monotonic() - self._answered > self._limit:
                link.is_silent = True
                seconds = f"{dead_after():g} s"
                self._links.lose(link, f"its host {link.host} has not answered for {seconds}")
        return PAUSE_SECONDS

    def _is_back(self) -> bool:
        """Return whether the old connection carries again, both ways.

        The rank that dials has a new one sooner than a kernel sends again what nobody has
        acknowledged.
        """
        link = self._link
        if link.heard <= self._began:
            return False
        connection = link.connection
        return connection is None or not self._links.dials(link) or not has_unanswered(connection)

    def _reach(self, seconds: float) -> None:
        """Make a new connection, if that is this rank's part, or ask whether the other still lives.

        A process that is stopped takes its time to answer, while its host keeps the connection
        alive. Raises ConnectionRefusedError or `Refused` if it does not listen any more, OSError if
        its host does not answer.
        """
        links = self._links
        link = self._link
        connection = dial(link.address, seconds)
        try:
            end_with_the_host(connection, dead_after())
            connection.settimeout(None)
            dials = links.dials(link)
            role = Role.DATA if dials else Role.KNOCK
            hello = Hello(role, links.rank, link.rank)
            connection = introduce(connection, links.secret, hello)
            if dials:
                links.install(link, connection)
        except BaseException:
            connection.close()
            raise
        if not dials:
            connection.close()


def _keep_little_unsent(connection: socket.socket) -> None:
    """Have the kernel take no more of a connection than it can soon send, where it knows how."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _has_more(connection: socket.socket) -> bool:
    """Return whether a connection by TLS has read what nobody has taken yet; of that the kernel
    says nothing.
    """
    return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0


def _tell_silence(link: Link, now: float) -> None:
    """Say once that a rank is silent, and once that it is heard again."""
    if link.silence_told_at is None and now - link.heard > TELL_AFTER:
        link.silence_told_at = link.heard
        logger.warning(f"rank {link.rank} on {link.host} is silent; this rank waits for it")
    elif link.silence_told_at is not None and now - link.heard < SILENT_SECONDS:
        seconds = link.heard - link.silence_told_at
        logger.warning(f"rank {link.rank} on {link.host} is heard again, after {seconds:.1f} s")
        link.silence_told_at = None


def _lost(link: Link) -> ConnectionLost:
    return ConnectionLost(
        f"rank {link.rank} is lost: {link.gone}", link.rank, is_silence=link.is_silent
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat tensor as bytes, to be read or written."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


_OPEN: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    for links in list(_OPEN):
        links._close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
