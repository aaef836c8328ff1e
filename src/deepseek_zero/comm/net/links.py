"""Serves the connections of a rank to other hosts, one per pair of ranks.

`link.py` has the messages of one pair, identified by their tag. Few bytes are queued in the kernel
at a time. Otherwise an acknowledgement would have to wait until megabytes of earlier data are sent,
and so would a collective that has received all its data.

A connection that breaks or falls silent is replaced by a new one, which continues where it ended. A
rank is lost if its port refuses connections, or if its host does not answer for `dead_after`
seconds. A rank that is stopped or busy is not lost, because its host still answers.
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

import torch
from torch import Tensor

from ...base.launch import TELL_AFTER, dead_after
from ...base.log import logger
from ..ids import CollectiveId, engine_of, tag_of
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
    Header,
    Link,
)

# Unsent bytes per connection that the kernel accepts: acknowledgements wait for those, too
UNSENT_BYTES = 1 << 18
BEAT_SECONDS = 1.0  # Interval of acknowledgements on an otherwise quiet connection
SILENT_SECONDS = 3.0  # After this silence a new connection is tried
ATTEMPT_SECONDS = 1.0  # Timeout of one attempt to connect
PAUSE_SECONDS = 0.2  # Between attempts
CONNECT_SECONDS = 30.0
FAREWELL_SECONDS = 1.0  # For the other ranks to receive the last messages of this rank
# Delay of an acknowledgement that no rank waits for, so that a message can carry it
RECEIPT_SECONDS = 0.02
WAKE_BYTES = 1 << 17  # Received bytes of a payload for which the thread is woken
_READ_AT_ONCE = 1 << 21  # Bytes that are read before another connection's turn


class Links:
    """Serves the connections of this process to the ranks on other hosts, in a thread.

    A `Link` holds the messages and the connection between this rank and one other rank. All groups
    of the process use the same `Links` object, in which every rank is a world rank. The constructor
    opens no connection; `connect` does.

    Args:
        rank: The world rank of this process.
        secret: The secret of the job, with which both ends of a new connection authenticate.
        listener: The listener that accepts connections from ranks on other hosts.
        addresses: The address of the listener of each rank on another host, by world rank.
        names: The host name of each rank, for error messages; empty if not known.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        listener: Listener,
        addresses: Mapping[int, Address],
        names: Sequence[str] = (),
    ) -> None:
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
        self._lanes: dict[str, int] = {}  # The number of each lane that was used
        self.is_closing = False
        self._thread = threading.Thread(
            target=self._serve, daemon=True, name="deepseek-zero-sockets"
        )
        _OPEN.add(self)

    def connect(self) -> str:
        """Connect to all ranks on other hosts, and start the thread.

        The method waits at most 30 seconds for the connections. It must not be called a second
        time.

        Returns:
            A text that names the ranks to which there is no connection and the reasons, or "" if
            all connections were established.

        Note:
            Collective: every rank must call it, after all listeners are open.
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
        described = []
        for link in missing:
            reason = f" ({link.gone})" if link.gone else ""
            described.append(
                f"rank {self.rank} has no connection to rank {link.rank} at "
                f"{link.address[0]}:{link.address[1]}{reason}"
            )
        return "; ".join(described)

    def start(self, messages: Mapping[int, tuple[Tensor, Tensor]], cid: CollectiveId) -> Wait:
        """Start one collective: send a tensor to several ranks, and receive one from each of them.

        The tensors must not be changed until the returned function has returned.

        Args:
            messages: By world rank, a pair of the tensor to send and the tensor to receive into.
                The tensors are flat and in host memory. Empty tensors are not sent.
            cid: The identifier of the collective, by which ranks match their messages.

        Returns:
            A function that waits until all tensors were sent and received. It raises `TimeoutError`
            if that takes longer than the poll interval, and may be called again. It raises
            `ConnectionLost` if one of the ranks is lost.
        """
        exchange = Exchange(cid)
        tag = tag_of(cid)
        lost = None
        with self._lock:
            self._lanes[cid.lane] = cid.lane_number
            exchange.left = 1  # Until all messages are begun
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
        """Discard the pending messages of an engine that no longer exists.

        Args:
            engine: The name of the engine.
        """
        with self._lock:
            names = [lane for lane in self._lanes if engine_of(lane) == engine]
            lanes = {self._lanes.pop(name) for name in names}
            for link in self.links.values():
                link.drop_lanes(lanes)

    def close(self) -> None:
        """Close all connections, and then the listener.

        Before it closes the connections, the method waits until the other ranks have received all
        messages, and then until the thread has ended. Each wait takes at most 1 second.
        """
        self.hang_up()
        self.listener.close()

    def hang_up(self) -> None:
        """Close all connections after the other ranks have received all messages.

        The method waits at most 1 second for the other ranks, and then at most 1 second for the
        thread to end. It closes the connections in any case. A second call has no effect.
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
        """Send what is queued: small messages on this thread, others on the serving one."""
        unsent = len(link.urgent) + len(link.queue)
        if not (unsent and link.resumed) or link.is_blocked:
            return
        if (
            unsent <= GATHERED
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
        """Write until nothing is left or the kernel accepts no more."""
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
            events = select.EPOLLIN
            if blocked:
                events |= select.EPOLLOUT
            self._poll.modify(link.connection, events)

    # -- receiving

    def _read(self, link: Link) -> None:
        """Read available data, up to about `_READ_AT_ONCE` bytes.

        Raises OSError if the connection must be dropped.
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
        """Make the kernel wake the reader only when `nbytes` are readable.

        At least that many bytes must be expected. A slow network delivers one packet at a time, and
        a thread that is woken for each packet takes a core from the computation.
        """
        connection = link.connection
        if connection is None or link.wakes_at == nbytes or isinstance(connection, ssl.SSLSocket):
            return  # TLS may hold some of the bytes already
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
        """Send a sign of life to quiet links, and reconnect to silent ones."""
        with self._lock:
            for link in self.links.values():
                if link.generation and not link.gone:
                    _log_silence(link, now)
                if link.connection is None and link.generation:
                    # The last recovery may have ended at the moment of the break
                    self._start_recovery(link)
                if link.wakes_at > 1:
                    # Bytes that a slow network has delivered so far are a sign of life
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
        """Return whether this rank opens the connections of a link.

        The rank with the higher world rank opens them.
        """
        return self.rank > link.rank

    def _admit(self, connection: socket.socket, rank: int) -> None:
        link = self.links.get(rank)
        if link is None or self.dials(link):
            connection.close()
        else:
            self.install(link, connection)

    def install(self, link: Link, connection: socket.socket) -> None:
        """Replace the connection of a link by a new one, over which its messages continue.

        The new connection is closed instead if the other rank is lost or this process is closing
        its connections.

        Args:
            link: Link to another rank.
            connection: New connection to the other rank, after a valid handshake.
        """
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        with self._lock:
            if self.is_closing or link.gone:
                connection.close()
                return
            self._disconnect(link)
            link.connection = connection
            link.generation += 1
            link.heard = time.monotonic()
            link.writing.append(Header(FrameKind.RESUME, link.received, offset=link.used).pack())
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
        """Drop a broken connection and look for a new one."""
        if isinstance(error, Refused):
            logger.warning(f"the connection to rank {link.rank} is replaced: {error}")
        self._disconnect(link)
        self._start_recovery(link)

    def _start_recovery(self, link: Link) -> None:
        if not (link.recovering or link.gone or self.is_closing):
            link.recovering = True
            name = f"deepseek-zero-reach-{link.rank}"
            threading.Thread(target=_Recovery(self, link).run, daemon=True, name=name).start()

    def lose(self, link: Link, reason: str) -> None:
        """Declare a rank lost, so that collectives that wait for it raise `ConnectionLost`.

        The connection to the rank is closed. The call has no effect if the rank is already lost or
        this process is closing its connections.

        Args:
            link: The link to the lost rank.
            reason: Why the rank is lost, as a clause for the error message.
        """
        with self._changed:
            if link.gone or self.is_closing:
                return
            link.gone = reason
            self._disconnect(link)
            for exchange in link.drop_all():
                exchange.fail(_lost(link))
            self._changed.notify_all()


class _Recovery:
    """Looks for a new connection until there is one or the rank is known to be lost."""

    def __init__(self, links: Links, link: Link) -> None:
        self._links = links
        self._link = link
        self._generation = link.generation
        self._began = time.monotonic()
        # Not earlier than this: this rank may have been stopped itself
        self._answered = max(link.heard, self._began - SILENT_SECONDS)
        # A network cut begins this long after the last sign of life, on average
        self._limit = dead_after() + BEAT_SECONDS / 2

    def run(self) -> None:
        """Try until it is over; runs on a separate thread."""
        try:
            while not (self._links.is_closing or self._link.gone or self._is_over()):
                time.sleep(self._try())
        finally:
            self._link.recovering = False

    def _is_over(self) -> bool:
        """Return whether there is a connection that works in both directions."""
        link = self._link
        return link.resumed and (link.generation > self._generation or self._is_back())

    def _try(self) -> float:
        """Try once to reach the other end, or declare it lost; return the pause (s)."""
        link = self._link
        now = time.monotonic()
        is_new = link.generation > self._generation and link.connection is not None
        if is_new and now - link.heard < SILENT_SECONDS:
            # The other end has not sent RESUME yet
            return PAUSE_SECONDS / 10
        left = max(PAUSE_SECONDS, self._answered + self._limit - now)
        try:
            self._reach(min(ATTEMPT_SECONDS, left))
            self._answered = time.monotonic()
        except (Refused, ConnectionRefusedError):
            # The port is closed, or another program has it
            self._links.lose(link, "its process has ended")
        except OSError:
            if time.monotonic() - self._answered > self._limit:
                link.is_silent = True
                seconds = f"{dead_after():g} s"
                self._links.lose(link, f"its host {link.host} has not answered for {seconds}")
        return PAUSE_SECONDS

    def _is_back(self) -> bool:
        """Return whether the old connection works again in both directions.

        The dialing rank does not wait for the kernel to retransmit unacknowledged data: a new
        connection is faster.
        """
        link = self._link
        if link.heard <= self._began:
            return False
        connection = link.connection
        return connection is None or not self._links.dials(link) or not has_unanswered(connection)

    def _reach(self, seconds: float) -> None:
        """Open a new connection if this rank dials, else check that the peer is alive.

        A stopped process answers late, while its host keeps the connection alive. Raises
        ConnectionRefusedError or `Refused` if the process no longer listens, and OSError if its
        host does not answer.
        """
        links = self._links
        link = self._link
        connection = dial(link.address, seconds)
        try:
            end_with_the_host(connection, dead_after())
            connection.settimeout(None)
            dials = links.dials(link)
            role = Role.DATA if dials else Role.PROBE
            hello = Hello(role, links.rank, link.rank)
            connection = introduce(connection, links.secret, hello)
            if dials:
                links.install(link, connection)
        except BaseException:
            connection.close()
            raise
        if not dials:
            connection.close()


def _has_more(connection: socket.socket) -> bool:
    """Return whether a TLS connection holds decrypted data that a poll does not see."""
    return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0


def _log_silence(link: Link, now: float) -> None:
    """Log once that a rank is silent, and once that it answers again."""
    if link.silence_logged_at is None and now - link.heard > TELL_AFTER:
        link.silence_logged_at = link.heard
        logger.warning(f"rank {link.rank} on {link.host} is silent; this rank waits for it")
    elif link.silence_logged_at is not None and now - link.heard < SILENT_SECONDS:
        seconds = link.heard - link.silence_logged_at
        logger.warning(f"rank {link.rank} on {link.host} answers again, after {seconds:.1f} s")
        link.silence_logged_at = None


def _lost(link: Link) -> ConnectionLost:
    return ConnectionLost(
        f"rank {link.rank} is lost: {link.gone}", link.rank, is_silence=link.is_silent
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat tensor as writable bytes."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


_OPEN: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    for links in list(_OPEN):
        for link in links.links.values():
            # An open copy in a child would make this rank seem alive after it exited
            if link.connection is not None:
                link.connection.close()


os.register_at_fork(after_in_child=_close_in_child)
