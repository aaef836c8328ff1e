"""Sockets between the ranks of one host: short messages that carry order, descriptors and the news of a death.

A message passes through the kernel, which orders memory on every machine: bytes that a rank wrote into shared pages
before it sent are there when the other has received. A process that ends, however it ends, closes its sockets, so its
end is known and not guessed.
"""

from __future__ import annotations

import array
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch.distributed as dist

from ..bootstrap import Hosts, all_gather_text

CONNECT_SECONDS = 30.0
RETRY_SECONDS = 0.001  # between attempts to send to a rank whose queue is full
INLINE_BYTES = 1 << 14  # pieces up to this size travel in the message itself
_HEADER = struct.Struct("<BxxxIQQQQ")
_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class Kind(IntEnum):
    """The kinds of messages."""

    OFFER = 1  # piece of collective `tag` lies in my segment `segment` at [start, start + nbytes)
    INLINE = 2  # piece of collective `tag` is the payload
    READ = 3  # I have read your piece of collective `tag`
    SEGMENT = 4  # here is the descriptor of my segment `segment`
    SHARED = 5  # here is the descriptor of the segment that collective `tag` shares out
    FORGET = 6  # my segment `segment` is gone


class Message(NamedTuple):
    kind: Kind
    tag: int = 0
    segment: int = 0
    start: int = 0
    nbytes: int = 0
    payload: bytes = b""
    descriptor: int = -1


class LocalSockets:
    """Connections to the other ranks of this host; `gone`: those whose process has ended."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.ranks = sorted(sockets)
        self.gone: set[int] = set()
        self._sockets = sockets
        self._rank_of = {connection.fileno(): rank for rank, connection in sockets.items()}
        self._poll = select.poll()
        self._buffer = bytearray(_HEADER.size + INLINE_BYTES)
        self._unsent: list[tuple[int, bytes, tuple[int, ...]]] = []
        self._is_flushing = False
        for connection in sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        os.register_at_fork(after_in_child=self.close)  # a data loader's child would keep this rank seemingly alive

    def send(self, rank: int, message: Message) -> None:
        """Send now, or as soon as the other's queue has room; to a rank that is gone, not at all. Never blocks."""
        check, tag = message.tag & 0xFFFFFFFF, message.tag >> 32
        header = _HEADER.pack(message.kind, check, tag, message.segment, message.start, message.nbytes)
        descriptors = (os.dup(message.descriptor),) if message.descriptor >= 0 else ()
        if self._unsent or descriptors or rank in self.gone or not self._sent(rank, header + message.payload, ()):
            self._unsent.append((rank, header + message.payload, descriptors))
            self._flush()

    @property
    def has_unsent(self) -> bool:
        """Return whether a message still waits for room in another rank's queue; `receive` sends what it can."""
        return bool(self._unsent)

    def _flush(self) -> None:
        if self._is_flushing:  # called by a finalizer in the midst of it: the loop below comes to its message, too
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
            if rank not in self.gone and (rank in blocked or not self._sent(rank, data, descriptors)):
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
        except OSError:  # its process has ended; the waits for it raise
            self._lose(rank)
        return True

    def wait(self, seconds: float) -> None:
        """Sleep until a message is there to be received, at most so long."""
        self._poll.poll(min(seconds, RETRY_SECONDS if self._unsent else seconds) * 1000)

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Return the messages that have arrived and their senders; empty if there are none."""
        if self._unsent:
            self._flush()
        for descriptor, _ in self._poll.poll(0):
            rank = self._rank_of[descriptor]
            while rank not in self.gone and (message := self._next(rank)) is not None:
                yield rank, message

    def _next(self, rank: int) -> Message | None:
        try:
            count, ancillary, _, _ = self._sockets[rank].recvmsg_into([self._buffer], socket.CMSG_SPACE(4))
        except BlockingIOError:
            return None
        except ConnectionResetError:  # it ended with messages unread; its own last ones are still to come
            return self._next(rank)
        if count == 0:
            self._lose(rank)
            return None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) // descriptors.itemsize * descriptors.itemsize])
        kind, check, tag, segment, start, nbytes = _HEADER.unpack_from(self._buffer)
        payload = bytes(self._buffer[_HEADER.size : count])
        descriptor = descriptors[0] if descriptors else -1
        return Message(Kind(kind), tag << 32 | check, segment, start, nbytes, payload, descriptor)

    def _lose(self, rank: int) -> None:
        if rank not in self.gone:
            self.gone.add(rank)
            self._poll.unregister(self._sockets[rank])

    def close(self) -> None:
        """Close the sockets; the others will take this rank for gone."""
        for connection in self._sockets.values():
            connection.close()


def host_key() -> str:
    """Return a text that only ranks that can share memory have in common: one kernel, one network namespace, one
    user.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def connect_local(rank: int, size: int, group: dist.ProcessGroup | None) -> tuple[Hosts, LocalSockets | None, str]:
    """Find the ranks that share a host and connect to those of this one; without sockets the text says why.

    Collective: every rank of the world calls it, and either all ranks of a host are connected or none is.
    """
    listener, address, key, refusal = None, "", "", ""
    try:
        key = host_key()
        listener, address = _listen()
    except OSError as error:  # forbidden
        refusal = str(error)
    everyone = [json.loads(text) for text in all_gather_text(json.dumps([key, address]), size, group)]
    hosts = Hosts(rank, tuple(key for key, _ in everyone))
    others = [peer for peer in hosts.near if peer != rank]
    found: dict[int, socket.socket] = {}
    try:
        if listener is not None and all(everyone[peer][1] for peer in others):
            found = _connect(rank, others, listener, [address for _, address in everyone])
    except OSError as error:
        refusal = str(error)
    finally:
        if listener is not None:
            listener.close()
    refusals = all_gather_text(refusal, size, group)
    refusal = next((refusals[peer] for peer in hosts.near if refusals[peer]), "")
    if not others or refusal:
        for connection in found.values():
            connection.close()
        return hosts, None, refusal
    return hosts, LocalSockets(found), ""


def _listen() -> tuple[socket.socket, str]:
    """Return a listening socket under a random name that no file system knows."""
    address = f"\0deepseek-zero-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)
    listener.settimeout(CONNECT_SECONDS)
    return listener, address


def _connect(
    rank: int, others: Sequence[int], listener: socket.socket, addresses: Sequence[str]
) -> dict[int, socket.socket]:
    """Connect to lower ranks, accept higher ones; a stranger who knocks is turned away."""
    found = {}
    for peer in others:
        if peer < rank:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(addresses[peer])
            connection.send(_HELLO.pack(rank))
            found[peer] = connection
    expected = {peer for peer in others if peer > rank}
    deadline = time.monotonic() + CONNECT_SECONDS
    while expected - found.keys() and time.monotonic() < deadline:
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_SECONDS)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        hello = connection.recv(_HELLO.size) if _CREDENTIALS.unpack(credentials)[1] == os.getuid() else b""
        peer = _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else -1
        if peer in expected:
            found[peer] = connection
        else:
            connection.close()
    if expected - found.keys():
        raise TimeoutError("a rank of this host did not connect")
    return found
