"""The key-value store in which ranks write lines for each other, and its client.

Rank 0 holds the table and serves it over its listener (`channel.py`), only to holders of the job's
secret. A request is one operation with a key and a value, and an answer is a text. The sizes of
both are limited before anything is allocated.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch.distributed as dist

from ...base import launch
from ...base.errors import UsageError
from ...base.network import listening_address
from ...base.world import meeting_address
from ..bootstrap import Hosts, all_gather_text
from .channel import (
    Address,
    Hello,
    Listener,
    Refused,
    Role,
    dial,
    enable_keep_alive,
    fingerprint,
    introduce,
    parse_ports,
    read_secret,
    receive_exactly,
    silence_of,
    warn_without_secret,
)
from .tls import require_cryptography

# Maximum bytes
MOST_KEY = 1 << 10
MOST_TEXT = 1 << 24
GONE = "gone"  # Topic of ranks on other hosts whose process has exited, with or without a message
ANSWER_SECONDS = 30.0  # Timeout for rank 0, which may be busy, to accept a line
HURRIED_SECONDS = 2.0  # Timeout for rank 0 to answer a rank that waits for others meanwhile
QUIET_SECONDS = 5.0  # After an unanswered request, no rank waits for rank 0 for this long
# After this silence of its host, no rank waits for rank 0; its kernel answers every second
DOUBT_SECONDS = 2.5
POLL_SECONDS = 0.25  # Interval of checks for a sign of life, while a rank waits for an answer
SEND_SECONDS = 1.0  # Timeout for another rank to receive its answer
_NUMBER = re.compile("-?[0-9]{1,99}")
_REQUEST = struct.Struct("!BII")
_ANSWER = struct.Struct("!BI")
_NOTHING, _TEXT, _FAREWELL = range(3)  # First byte of an answer
FAREWELL_SECONDS = 1.0  # Timeout to send the farewell


class Operation(IntEnum):
    """The requests that a key-value store answers, all except SET with a text or None."""

    SET = 1
    GET = 2
    # Add a number to the stored one, once per request; the value is [rank, request, number].
    # The answer has no text if the stored text is not a number.
    ADD = 3
    SWAP = 4  # Replace the text if it is the expected one; the value is [expected, wanted]
    DELETE = 5
    KEYS = 6  # As a list


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        text: The text, or None if the key has none.
    """

    text: str | None


class KeyValueStore:
    """The table of texts by key, in rank 0's process.

    When a rank's idle connection ends with its process, the table gets a line under "gone/RANK".

    Args:
        listener: The listener of this process.
        role: The role of the connections that send requests.
    """

    def __init__(self, listener: Listener, role: Role = Role.RECORDER) -> None:
        self._texts: dict[str, str] = {}
        # By requester: its last request and the answer
        self._added: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()
        self._asking: dict[int, socket.socket] = {}  # By descriptor
        # By rank of another host; the kernels of both ends probe each other over it
        self._idle: dict[int, socket.socket] = {}
        self._listener = listener
        listener.admit(role, self._take_asking)
        listener.admit(Role.KEEP_ALIVE, self._take_idle)

    def set(self, key: str, value: str) -> bool:
        """Write a text under a key.

        Args:
            key: Name under which the text is stored.
            value: Text to store.

        Returns:
            True.
        """
        self._texts[key] = value
        return True

    def get(self, key: str) -> str | None:
        """Return the text that was stored under a key, or None if there is none."""
        return self._texts.get(key)

    def request(self, operation: Operation, key: str, value: str = "") -> Answer:
        """Execute a request on the table.

        Args:
            operation: What to do with the key.
            key: Name under which the text is stored.
            value: The value, in the form that the operation requires.

        Returns:
            The text of the answer.

        Raises:
            ValueError: The value does not have this form.
        """
        with self._lock:
            return Answer(self._carry_out(operation, key, value))

    def _carry_out(self, operation: Operation, key: str, value: str) -> str | None:
        texts = self._texts
        match operation:
            case Operation.SET:
                texts[key] = value
                return ""
            case Operation.GET:
                return texts.get(key)
            case Operation.ADD:
                who, number, amount = json.loads(value)
                # Otherwise the request came twice, over two connections
                if self._added.get(who, (-1, ""))[0] != int(number):
                    stored = texts.get(key, "0")
                    if not _NUMBER.fullmatch(stored):
                        return None
                    texts[key] = total = str(int(stored) + int(amount))
                    self._added[who] = int(number), total
                return self._added[who][1]
            case Operation.SWAP:
                # As in torch's stores, an absent key matches an expected "". The answer is the
                # current value, or `expected` if there is none.
                expected, wanted = json.loads(value)
                if texts.get(key, "") == expected:
                    texts[key] = str(wanted)
                return texts.get(key, str(expected))
            case Operation.DELETE:
                return texts.pop(key, None)
            case Operation.KEYS:
                return json.dumps(list(texts))

    def silences(self) -> dict[int, float]:
        """Return the seconds since other hosts last answered, by rank."""
        found = {rank: silence_of(connection) for rank, connection in tuple(self._idle.items())}
        return {rank: seconds for rank, seconds in found.items() if seconds is not None}

    def send_farewell(self) -> None:
        """Send the whole table to every connected rank before this process exits."""

        def send() -> None:
            payload = json.dumps(self._texts).encode()
            for connection in list(self._asking.values()):
                with contextlib.suppress(OSError):  # The other end is gone or does not read
                    _send(connection, _FAREWELL, payload)

        self._listener.call(send, FAREWELL_SECONDS)

    def close(self) -> None:
        """Close the listener, so that clients can no longer connect to the store."""
        self._listener.close()

    def _take_asking(self, connection: socket.socket, rank: int) -> None:
        self._asking[connection.fileno()] = connection
        self._listener.watch(connection, _Reader(self, connection).read)

    def drop_asking(self, connection: socket.socket) -> None:
        """Close a connection of requests; call this only on the listener's thread."""
        del self._asking[connection.fileno()]
        self._listener.unwatch(connection)

    def _take_idle(self, connection: socket.socket, rank: int) -> None:
        enable_keep_alive(connection)
        self._idle[rank] = connection
        self._listener.watch(connection, lambda: self._drop_idle(connection, rank))

    def _drop_idle(self, connection: socket.socket, rank: int) -> None:
        """Record that an idle connection ended.

        Its process has ended, too, unless the connection raised an error.
        """
        try:
            has_ended = not connection.recv(1)
        except BlockingIOError:  # A TLS message without data
            return
        except OSError:
            has_ended = False
        if self._idle.get(rank) is connection:
            del self._idle[rank]
            if has_ended:
                self.set(f"{GONE}/{rank}", "its process has ended")
        self._listener.unwatch(connection)


class _Reader:
    """Reads and answers one rank's requests."""

    def __init__(self, store: KeyValueStore, connection: socket.socket) -> None:
        self._store = store
        self._connection = connection
        self._came = bytearray()

    def read(self) -> None:
        """Read available data and answer whole requests; close the connection on an error."""
        try:
            data = self._connection.recv(1 << 16)
            self._came += data
            while data and self._answer_one():
                pass
            if data:
                return
        except BlockingIOError:
            return
        # The connection is gone, does not read, or does not follow the protocol
        except (OSError, ValueError, TypeError):
            pass
        self._store.drop_asking(self._connection)

    def _answer_one(self) -> bool:
        """Answer one request if it is complete; return whether it was.

        Raise ValueError if the data cannot be a request.
        """
        if len(self._came) < _REQUEST.size:
            return False
        operation, key_bytes, value_bytes = _REQUEST.unpack_from(self._came)
        if operation not in tuple(Operation) or key_bytes > MOST_KEY or value_bytes > MOST_TEXT:
            raise ValueError
        end = _REQUEST.size + key_bytes + value_bytes
        if len(self._came) < end:
            return False
        key = self._came[_REQUEST.size : _REQUEST.size + key_bytes].decode()
        value = self._came[_REQUEST.size + key_bytes : end].decode()
        del self._came[:end]
        found = self._store.request(Operation(operation), key, value).text
        kind = _NOTHING if found is None else _TEXT
        _send(self._connection, kind, (found or "").encode())
        return True


def _send(connection: socket.socket, kind: int, payload: bytes) -> None:
    connection.settimeout(SEND_SECONDS)
    connection.sendall(_ANSWER.pack(kind, len(payload)) + payload)
    connection.setblocking(False)


class StoreClient:
    """Client of the key-value store, for other ranks.

    Methods raise RuntimeError if rank 0 is lost: its port refuses connections, or its host was
    silent for `dead_after`. If the host answers but rank 0 does not (it is stopped or busy), the
    result is unknown, and no call waits long for it. An unanswered request stays in flight, and
    nothing else is sent before its answer. A new connection for each attempt would fill rank 0's
    accept queue.

    Args:
        address: The address of rank 0's listener.
        secret: The job's secret.
        rank: The world rank of this process.
        watches: Whether rank 0 is on another host. The kernels of both ends probe each other, which
            reveals a silent host and an exited process.
        dead_after: Seconds of silence after which rank 0's host is lost.
        role: Role of the connection, which selects the service at rank 0's listener.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        rank: int,
        *,
        watches: bool = False,
        dead_after: float = math.inf,
        role: Role = Role.RECORDER,
    ) -> None:
        self._address = address
        self._secret = secret
        self._rank = rank
        self._role = role
        self._dead_after = dead_after
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_owed = False  # The last request over this connection has no answer yet
        # Until this time no call waits for rank 0, because it has not answered a recent request
        self._quiet_until = 0.0
        self._unreachable_since: float | None = None
        # The table as rank 0 sent it when its program ended
        self._farewell: dict[str, str] | None = None
        self._idle: socket.socket | None = None
        self._watches = watches
        self._connect(ANSWER_SECONDS)

    def set(self, key: str, value: str) -> bool:
        """Write a text under a key.

        Args:
            key: Name under which the text is stored.
            value: Text to store.

        Returns:
            Whether it was stored.

        Raises:
            RuntimeError: The process of rank 0 has ended.
        """
        if self._has_farewell():
            return False
        try:
            return self.request(Operation.SET, key, value) is not None
        except RuntimeError:
            if self._farewell is None:  # Otherwise the farewell came in place of an answer
                raise
            return False

    def get(self, key: str) -> str | None:
        """Return the text under a key, or None if there is none or it is unknown.

        Raises:
            RuntimeError: The process of rank 0 has ended unexpectedly.
        """
        if not self._has_farewell() and time.monotonic() >= self._quiet_until:
            try:
                answer = self.request(Operation.GET, key, seconds=HURRIED_SECONDS)
                if answer is not None:
                    return answer.text
            except RuntimeError:
                if self._farewell is None:
                    raise
        return None if self._farewell is None else self._farewell.get(key)

    def _has_farewell(self) -> bool:
        """Return whether rank 0's program has ended and sent its table."""
        with self._lock:
            if self._farewell is None and self._connection is not None and not self._is_owed:
                # The connection broke: the next request finds that out
                with contextlib.suppress(OSError, ValueError):
                    self._take_farewell(self._connection)
            return self._farewell is not None

    def send_farewell(self) -> None:
        """Do nothing, because this process does not hold the table."""

    def silences(self) -> dict[int, float]:
        """Return the seconds since rank 0's host last answered, by rank.

        The result is empty if rank 0 is on this host.
        """
        connection = self._idle  # Read once: another thread may drop it
        seconds = None if connection is None else silence_of(connection)
        return {} if seconds is None else {0: seconds}

    def close(self) -> None:
        """Close this client's connections to the store."""
        with self._lock:
            self._drop()
            self._drop_idle()

    def _drop_idle(self) -> None:
        if self._idle is not None:
            self._idle.close()
        self._idle = None

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._is_owed = False

    def _connect(self, seconds: float) -> socket.socket:
        """Open a new connection for requests, and a new idle one if it broke, too."""
        connection = self._connection = self._introduced(self._role, seconds)
        if self._watches and (self._idle is None or silence_of(self._idle) is None):
            self._drop_idle()
            self._idle = self._introduced(Role.KEEP_ALIVE, seconds)
            enable_keep_alive(self._idle)
        return connection

    def _introduced(self, role: Role, seconds: float) -> socket.socket:
        connection = self._reach()
        connection.settimeout(seconds)
        return introduce(connection, self._secret, Hello(role, self._rank, 0))

    def _reach(self) -> socket.socket:
        """Return a connection to rank 0's host.

        Raise TimeoutError if there is none yet. Raise RuntimeError if there was none for
        `dead_after` without any other sign of life. If the host is known to be alive, a full accept
        queue there or on this host may be the reason, so only TimeoutError is raised.
        """
        self._raise_if_silent()
        try:
            connection = dial(self._address, HURRIED_SECONDS)
        except ConnectionRefusedError:
            raise
        except OSError as error:
            if self._is_answering():
                raise TimeoutError from None
            self._unreachable_since = since = self._unreachable_since or time.monotonic()
            if time.monotonic() - since > self._dead_after:
                raise RuntimeError(
                    f"rank 0's host has not answered for {self._dead_after:g} s: {error}"
                ) from None
            raise TimeoutError from None
        self._unreachable_since = None
        return connection

    def request(
        self, operation: Operation, key: str, value: str = "", seconds: float | None = None
    ) -> Answer | None:
        """Send a request and wait for the answer.

        The request is repeated once over a new connection if the old one broke.

        Args:
            operation: What to do with the key.
            key: Name under which the text is stored.
            value: The value, in the form that the operation requires.
            seconds: Maximum time to wait for the answer; by default `ANSWER_SECONDS`.

        Returns:
            The answer, or None if it is unknown whether the request was executed.

        Raises:
            RuntimeError: The process of rank 0 has ended.
        """
        name = key.encode()[:MOST_KEY]
        text = value.encode()[:MOST_TEXT]
        request = _REQUEST.pack(operation, len(name), len(text)) + name + text
        if seconds is None:
            seconds = ANSWER_SECONDS
        if time.monotonic() < self._quiet_until:
            seconds = HURRIED_SECONDS
        with self._lock:
            for _ in range(2):
                try:
                    if (answer := self._exchange(request, seconds)) is not None:
                        return answer
                    break
                except (ConnectionRefusedError, Refused) as error:
                    self._drop()
                    raise RuntimeError(
                        f"rank 0, which holds the key-value store, has ended: {error}"
                    ) from None
                except TimeoutError:
                    self._drop()
                    break
                except (OSError, ValueError):
                    # It broke, or its data is damaged; TLS's own errors are OSErrors
                    self._drop()
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            return None

    def _exchange(self, request: bytes, seconds: float) -> Answer | None:
        """Return the answer to a request, or None if rank 0 has not answered yet.

        The unanswered request may be this one or the one before. Raises TimeoutError if the
        connection must be dropped.
        """
        connection = self._connection or self._connect(seconds)
        connection.settimeout(seconds)
        if self._is_owed and self._answer(connection, seconds) is None:
            return None
        connection.sendall(request)
        self._is_owed = True
        return self._answer(connection, seconds)

    def _answer(self, connection: socket.socket, seconds: float) -> Answer | None:
        poll = select.poll()
        until = time.monotonic() + seconds
        poll.register(connection, select.POLLIN)
        while True:
            while not poll.poll(POLL_SECONDS * 1000):
                self._raise_if_silent()
                if time.monotonic() > until:
                    if self._is_answering():
                        return None
                    raise TimeoutError
            kind, text = self._receive(connection)
            if kind != _FAREWELL:
                self._is_owed = False
                value = text if kind == _TEXT else None
                return Answer(value)

    def _take_farewell(self, connection: socket.socket) -> None:
        """Read a farewell from a connection without an outstanding answer."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while poll.poll(0):
            kind, _ = self._receive(connection)
            if kind != _FAREWELL:
                raise ConnectionResetError("an answer of a store without a request")

    def _receive(self, connection: socket.socket) -> tuple[int, str]:
        kind, size = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size))
        if size > MOST_TEXT:
            raise ConnectionResetError("not an answer of a store")
        text = receive_exactly(connection, size).decode()
        if kind == _FAREWELL:
            self._farewell = {str(key): str(value) for key, value in json.loads(text).items()}
        return kind, text

    def _is_answering(self) -> bool:
        """Return whether rank 0's host is certainly running.

        It is this host, or its kernel answers.
        """
        return not self._watches or any(
            seconds <= DOUBT_SECONDS for seconds in self.silences().values()
        )

    def _raise_if_silent(self) -> None:
        """Raise TimeoutError if rank 0's host has been silent for `DOUBT_SECONDS`."""
        if max(self.silences().values(), default=0.0) > DOUBT_SECONDS:
            raise TimeoutError


def _refusal_of(everyone: Sequence[Mapping[str, Any]]) -> UsageError | None:
    """Return the error that all ranks raise because one cannot join, or None."""
    for rank, each in enumerate(everyone):
        if "error" in each:
            return UsageError(f"rank {rank} cannot connect to the others: {each['error']}")
        if each["mark"] != everyone[0]["mark"]:
            return UsageError(
                f"rank {rank} has another secret than rank 0, or one of the two has none.",
                f"{launch.SECRET_FILE} is the path of the file with the secret.",
                "use the same file on all hosts of a job, and a different one for every job.",
            )
    return None


def open_store(
    rank: int, size: int, hosts: Hosts, group: dist.ProcessGroup | None
) -> tuple[KeyValueStore | StoreClient, bytes, Listener | None]:
    """Open the key-value store of a world, and agree on the job's secret.

    If neither the launcher nor the user provides a secret, rank 0 draws one and sends it
    unencrypted through the group. It logs a warning if it listens beyond loopback.

    Args:
        rank: World rank of this process.
        size: Number of ranks in the world.
        hosts: The hosts of all ranks.
        group: A group of all ranks.

    Returns:
        The store or its client, the secret, and the listener on rank 0 or None.

    Raises:
        UsageError: On every rank. A rank cannot read its secret, holds a different one, or cannot
            reach rank 0; or TLS is required, and a rank has no secret or no package for
            certificates.

    Note:
        Collective: every rank of `group` must call it.
    """
    said: dict[str, object] = {}
    listener = None
    found: KeyValueStore | StoreClient | None = None
    secret = None
    dead_after = math.inf
    try:
        if launch.uses_tls():
            require_cryptography()
        secret = read_secret()
        dead_after = launch.dead_after()
        if secret is None and launch.uses_tls() and not hosts.is_one:
            raise UsageError(
                f"{launch.TLS} is set, but there is no secret.",
                "The job's certificate is derived from its secret, and a secret created now would "
                "be sent unencrypted.",
                f"create a file of {launch.SECRET_BYTES} random bytes, the same on every host, "
                f"and set {launch.SECRET_FILE} to its path.",
            )
        if rank == 0:
            drawn = secrets.token_bytes(launch.SECRET_BYTES) if secret is None else b""
            listener = Listener(listening_host(hosts), secret or drawn, 0, listening_ports())
            found = KeyValueStore(listener)  # Before the listener accepts a connection
            said |= {"drawn": drawn.hex(), "address": listener.address}
        said["mark"] = fingerprint(secret) if secret is not None else ""
    except (UsageError, OSError) as error:
        said["error"] = str(error)
    # The address is sent through the group, so there is no private default store and no port that
    # the user must know
    everyone = [json.loads(text) for text in all_gather_text(json.dumps(said), size, group)]
    refusal = _refusal_of(everyone)
    if refusal is not None:
        if found is not None:
            found.close()
        raise refusal
    if secret is None:
        secret = bytes.fromhex(everyone[0]["drawn"])
        if listener is not None:
            warn_without_secret(listener.address, "ranks")
    host, port = everyone[0]["address"]
    problem = ""
    if found is None:
        watches = 0 not in hosts.local_ranks and not hosts.is_one
        try:
            found = StoreClient((host, port), secret, rank, watches=watches, dead_after=dead_after)
        except OSError as error:
            problem = f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}."
    problem = next(filter(None, all_gather_text(problem, size, group)), "")
    if problem or found is None:
        if found is not None:
            found.close()  # This rank's own connection is of no use then
        raise UsageError(
            problem,
            "Rank 0 holds the key-value store, at its rendezvous address or the configured "
            "interface.",
            f"set an interface that all hosts reach, and open ports ({launch.INTERFACE}, "
            f"{launch.PORTS}; the launcher's --interface and --ports).",
        )
    return found, secret, listener


def listening_ports() -> range:
    """Return the ports that this rank may listen at; 0 is any free port."""
    return parse_ports(said) if (said := os.environ.get(launch.PORTS)) else range(1)


def listening_host(hosts: Hosts) -> str:
    """Return the address at which this rank listens (`listening_address`)."""
    return listening_address(hosts.is_one, meeting_address())
