"""The key-value store in which ranks leave lines for each other: a table in rank 0's process, and
the way to it.

Rank 0 keeps the table behind its listener (channel.py), at one address and only for who proves the
job's secret.  A request is one operation with a key and a value, an answer is a text; both are
limited before anything is allocated.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
    ask_for_life,
    dial,
    fingerprint,
    introduce,
    parse_ports,
    read_secret,
    receive_exactly,
    silence_of,
    warn_without_secret,
)
from .tls import require_cryptography

# bytes
MOST_KEY = 1 << 10
MOST_TEXT = 1 << 24
GONE = "gone"  # the topic of ranks on other hosts whose process has ended, with or without a word
ANSWER_SECONDS = 30.0  # for rank 0, which may be busy, to take a line
HURRIED_SECONDS = 2.0  # for it to answer who waits for others meanwhile
QUIET_SECONDS = 5.0  # after a silence, until somebody waits for it again
# Without a sign of its host, until nobody waits for rank 0; its kernel answers every second
DOUBT_SECONDS = 2.5
POLL_SECONDS = 0.25  # between looks for such a sign, while a rank waits for an answer
SEND_SECONDS = 1.0  # for another rank to take an answer that it asked for
_REQUEST = struct.Struct("!BII")
_ANSWER = struct.Struct("!BI")
_NOTHING, _TEXT, _FAREWELL = range(3)  # how an answer begins
FAREWELL_SECONDS = 1.0  # for the farewell to leave


class Operation(IntEnum):
    """The requests. All but SET answer with a text, and say whether there is one."""

    SET = 1
    GET = 2
    # Add a number to the stored one, once per request; the value is [rank, request, number].
    ADD = 3
    SWAP = 4  # replace the text if it is the expected one; the value is [expected, wanted]
    DELETE = 5
    KEYS = 6  # as a list


class Answer(NamedTuple):
    """What is known of a key. text: None if there is none."""

    text: str | None


class KeyValueStore:
    """The table itself, in rank 0's process.

    role: of the connections that ask it. When a rank's idle connection has ended, there is a line
    under "gone/RANK".
    """

    def __init__(self, listener: Listener, role: Role = Role.RECORDER) -> None:
        self._texts: dict[str, str] = {}
        self._added: dict[
            str, tuple[int, str]
        ] = {}  # by who asked: the last request and its answer
        self._lock = threading.Lock()
        self._asking: dict[int, socket.socket] = {}  # by descriptor
        self._idle: dict[
            int, socket.socket
        ] = {}  # by rank of another host, over which kernels hear each other
        self._listener = listener
        listener.admit(role, self._take_asking)
        listener.admit(Role.LIFE, self._take_idle)

    def set(self, key: str, value: str) -> bool:
        self._texts[key] = value
        return True

    def get(self, key: str) -> str | None:
        """Return the text under a key, or None."""
        return self._texts.get(key)

    def ask(self, operation: Operation, key: str, value: str = "") -> Answer:
        """Do what a request says. ValueError if its value is none for it."""
        with self._lock:
            return Answer(_ACTIONS[operation](self, key, value))

    def _set(self, key: str, value: str) -> str:
        self._texts[key] = value
        return ""

    def _add(self, key: str, value: str) -> str:
        who, number, amount = json.loads(value)
        # Else it came twice, over two connections
        if self._added.get(who, (-1, ""))[0] != int(number):
            self._texts[key] = total = str(int(self._texts.get(key, "0")) + int(amount))
            self._added[who] = int(number), total
        return self._added[who][1]

    def _swap(self, key: str, value: str) -> str | None:
        """As torch's stores do: where there is nothing, expecting "" means it, and else what is
        wanted is answered.
        """
        expected, wanted = json.loads(value)
        if self._texts.get(key, "") == expected:
            self._texts[key] = str(wanted)
        return self._texts.get(key, str(expected))

    def _delete(self, key: str, _: str) -> str | None:
        return self._texts.pop(key, None)

    def _keys(self, _: str, __: str) -> str:
        return json.dumps(list(self._texts))

    def silences(self) -> dict[int, float]:
        """Return for how many seconds the hosts of ranks on other hosts have answered nothing, by
        rank.
        """
        found = {rank: silence_of(connection) for rank, connection in tuple(self._idle.items())}
        return {rank: seconds for rank, seconds in found.items() if seconds is not None}

    def say_farewell(self) -> None:
        """Send the whole table, before this process ends, to every rank that has requested a
        line.
        """

        def send() -> None:
            payload = json.dumps(self._texts).encode()
            for connection in list(self._asking.values()):
                with contextlib.suppress(OSError):  # its end is gone, or does not listen
                    _send(connection, _FAREWELL, payload)

        self._listener.call(send, FAREWELL_SECONDS)

    def close(self) -> None:
        """Listen to nobody any more."""
        self._listener.close()

    def _take_asking(self, connection: socket.socket, rank: int) -> None:
        self._asking[connection.fileno()] = connection
        self._listener.watch(connection, _Reader(self, connection).read)

    def drop_asking(self, connection: socket.socket) -> None:
        """Close a connection over which a rank sent requests. Only on the listener's thread."""
        del self._asking[connection.fileno()]
        self._listener.unwatch(connection)

    def _take_idle(self, connection: socket.socket, rank: int) -> None:
        ask_for_life(connection)
        self._idle[rank] = connection
        self._listener.watch(connection, lambda: self._drop_idle(connection, rank))

    def _drop_idle(self, connection: socket.socket, rank: int) -> None:
        """Take note that an idle connection has ended, with its process if nothing broke it."""
        try:
            has_ended = not connection.recv(1)
        except BlockingIOError:  # a word of TLS's own
            return
        except OSError:
            has_ended = False
        if self._idle.get(rank) is connection:
            del self._idle[rank]
            if has_ended:
                self.set(f"{GONE}/{rank}", "its process has ended")
        self._listener.unwatch(connection)


class _Reader:
    """One rank's requests, as they arrive."""

    def __init__(self, store: KeyValueStore, connection: socket.socket) -> None:
        self._store = store
        self._connection = connection
        self._came = bytearray()

    def read(self) -> None:
        """Take in what has come and answer whole requests; close the connection where it makes no
        sense.
        """
        try:
            data = self._connection.recv(1 << 16)
            self._came += data
            while data and self._answer_one():
                pass
            if data:
                return
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError):  # gone, deaf, or no protocol of ours
            pass
        self._store.drop_asking(self._connection)

    def _answer_one(self) -> bool:
        """Answer one request if it is whole; ValueError where it cannot be one."""
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
        found = self._store.ask(Operation(operation), key, value).text
        kind = _NOTHING if found is None else _TEXT
        _send(self._connection, kind, (found or "").encode())
        return True


def _send(connection: socket.socket, kind: int, payload: bytes) -> None:
    connection.settimeout(SEND_SECONDS)
    connection.sendall(_ANSWER.pack(kind, len(payload)) + payload)
    connection.setblocking(False)


_ACTIONS: Mapping[Operation, Callable[[KeyValueStore, str, str], str | None]] = {
    Operation.SET: KeyValueStore._set,
    Operation.GET: lambda store, key, _: store.get(key),
    Operation.ADD: KeyValueStore._add,
    Operation.SWAP: KeyValueStore._swap,
    Operation.DELETE: KeyValueStore._delete,
    Operation.KEYS: KeyValueStore._keys,
}


class StoreClient:
    """The store as another rank sees it.

    RuntimeError if rank 0 is gone: nobody listens there any more, or nothing has been heard of its
    host for `dead_after`. Where its host answers and it does not (it is stopped, or busy), nothing
    is known, and nobody waits
    long to learn that: a question stays under way, and nothing else is asked before it is answered.
    A new connection each time would fill the queue of those that rank 0 is to take.
    watches: rank 0 is on another host; the kernels of both ends hear each other, so that a silent
    host and an ended
    process are known. dead_after: seconds. role: as the store's.
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
        self._is_owed = False  # what was asked over it last has no answer yet
        self._quiet_until = 0.0  # it did not answer lately: until then nobody waits for it
        self._unreachable_since: float | None = None
        self._farewell: dict[str, str] | None = (
            None  # the table as rank 0 left it when its program ended
        )
        self._idle: socket.socket | None = None
        self._watches = watches
        self._connect(ANSWER_SECONDS)

    def set(self, key: str, value: str) -> bool:
        """Write a text; return whether it stands there."""
        if self._has_farewell():
            return False
        try:
            return self.ask(Operation.SET, key, value) is not None
        except RuntimeError:
            if self._farewell is None:  # else it came in place of an answer
                raise
            return False

    def get(self, key: str) -> str | None:
        """Return the text under a key; None if there is none, or if nothing is known."""
        if not self._has_farewell() and time.monotonic() >= self._quiet_until:
            try:
                if (answer := self._ask(Operation.GET, key, "", HURRIED_SECONDS)) is not None:
                    return answer.text
            except RuntimeError:
                if self._farewell is None:
                    raise
        return None if self._farewell is None else self._farewell.get(key)

    def _has_farewell(self) -> bool:
        """Return whether rank 0's program has ended, and left the table here."""
        with self._lock:
            if self._farewell is None and self._connection is not None and not self._is_owed:
                # It broke: the next question finds that out
                with contextlib.suppress(OSError, ValueError):
                    self._take_farewell(self._connection)
            return self._farewell is not None

    def say_farewell(self) -> None:
        """Do nothing: the store stays."""

    def ask(self, operation: Operation, key: str, value: str = "") -> Answer | None:
        """Have a request done; return None if it is not known whether it was."""
        return self._ask(operation, key, value, ANSWER_SECONDS)

    def silences(self) -> dict[int, float]:
        """Return for how many seconds rank 0's host has answered nothing, where that is another
        host.
        """
        connection = self._idle  # another thread may drop it
        seconds = None if connection is None else silence_of(connection)
        return {} if seconds is None else {0: seconds}

    def close(self) -> None:
        """Close the connections."""
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
        """Return a new connection for questions; what broke the last one may have broken the idle
        one, too.
        """
        connection = self._connection = self._introduced(self._role, seconds)
        if self._watches and (self._idle is None or silence_of(self._idle) is None):
            self._drop_idle()
            self._idle = self._introduced(Role.LIFE, seconds)
            ask_for_life(self._idle)
        return connection

    def _introduced(self, role: Role, seconds: float) -> socket.socket:
        connection = self._reach()
        connection.settimeout(seconds)
        return introduce(connection, self._secret, Hello(role, self._rank, 0))

    def _reach(self) -> socket.socket:
        """Return a connection that rank 0's host has taken. TimeoutError if it has not;
        RuntimeError if it has not for
        long, while nothing else told of it: a host that is heard, or this one, may have its queue
        full.
        """
        self._raise_if_silent()
        try:
            connection = dial(self._address, HURRIED_SECONDS)
        except ConnectionRefusedError:
            raise
        except OSError as error:
            if self._is_heard():
                raise TimeoutError from None
            self._unreachable_since = since = self._unreachable_since or time.monotonic()
            if time.monotonic() - since > self._dead_after:
                raise RuntimeError(
                    f"rank 0's host has not answered for {self._dead_after:g} s: {error}"
                ) from None
            raise TimeoutError from None
        self._unreachable_since = None
        return connection

    def _ask(self, operation: Operation, key: str, value: str, seconds: float) -> Answer | None:
        """Ask once, and again over a new connection where the old one broke; None if there is no
        answer.
        """
        name = key.encode()[:MOST_KEY]
        text = value.encode()[:MOST_TEXT]
        request = _REQUEST.pack(operation, len(name), len(text)) + name + text
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
                        f"rank 0, which keeps the board, has ended: {error}"
                    ) from None
                except TimeoutError:
                    self._drop()
                    break
                except (
                    OSError,
                    ValueError,
                ):  # it broke, or what came is damaged; TLS's own errors are OSErrors
                    self._drop()
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            return None

    def _exchange(self, request: bytes, seconds: float) -> Answer | None:
        """Return the answer to a request; None if rank 0 takes its time with it, or with the last
        one.

        Raises TimeoutError where the connection is of no more use.
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
                    if self._is_heard():
                        return None
                    raise TimeoutError
            kind, text = self._receive(connection)
            if kind != _FAREWELL:
                self._is_owed = False
                value = text if kind == _TEXT else None
                return Answer(value)

    def _take_farewell(self, connection: socket.socket) -> None:
        """Read what came over a connection that owes no answer."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while poll.poll(0):
            kind, _ = self._receive(connection)
            if kind != _FAREWELL:
                raise ConnectionResetError("an answer of a board to nothing")

    def _receive(self, connection: socket.socket) -> tuple[int, str]:
        kind, size = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size))
        if size > MOST_TEXT:
            raise ConnectionResetError("no answer of a board")
        text = receive_exactly(connection, size).decode()
        if kind == _FAREWELL:
            self._farewell = {str(key): str(value) for key, value in json.loads(text).items()}
        return kind, text

    def _is_heard(self) -> bool:
        """Return whether rank 0's host surely is there: it is this one, or its kernel answers."""
        return not self._watches or any(
            seconds <= DOUBT_SECONDS for seconds in self.silences().values()
        )

    def _raise_if_silent(self) -> None:
        """Raise TimeoutError where nobody answers and rank 0's host has been silent for a while."""
        if max(self.silences().values(), default=0.0) > DOUBT_SECONDS:
            raise TimeoutError


def _refusal_of(everyone: Sequence[Mapping[str, Any]]) -> UsageError | None:
    """Return the error with which all ranks end, because one cannot meet the others."""
    for rank, each in enumerate(everyone):
        if "error" in each:
            return UsageError(f"rank {rank} cannot meet the others: {each['error']}")
        if each["mark"] != everyone[0]["mark"]:
            return UsageError(
                f"rank {rank} holds another secret than rank 0, or one of the two holds none.",
                f"{launch.SECRET_FILE} names the file that holds it.",
                "give all hosts of a job the same file, and every job its own.",
            )
    return None


def open_store(
    rank: int, size: int, hosts: Hosts, group: dist.ProcessGroup | None
) -> tuple[KeyValueStore | StoreClient, bytes, Listener | None]:
    """Open the store of one world and agree on the job's secret; return both, and rank 0's
    listener. Collective in the group.

    Without a secret of the launcher's or the user's rank 0 draws one, which travels through the
    group as it is; where it listens beyond loopback it says so.  Raises `UsageError` on every rank
    if one cannot read its secret or holds another, or if TLS is asked for and one rank has no
    package for certificates.
    """
    said: dict[str, object] = {}
    listener = None
    store = None
    secret = None
    dead_after = math.inf
    try:
        if launch.uses_tls():
            require_cryptography()
        secret = read_secret()
        dead_after = launch.dead_after()
        if secret is None and launch.uses_tls() and not hosts.is_one:
            raise UsageError(
                f"{launch.TLS} is set, and no secret.",
                "The job's certificate is made from its secret, and one drawn now would travel as "
                "it is.",
                f"name a file of {launch.SECRET_BYTES} random bytes, the same on every host, in "
                f"{launch.SECRET_FILE}.",
            )
        if rank == 0:
            drawn = secrets.token_bytes(launch.SECRET_BYTES) if secret is None else b""
            listener = Listener(listening_host(hosts), secret or drawn, 0, listening_ports())
            store = KeyValueStore(listener)  # before the listener accepts a connection
            said |= {"drawn": drawn.hex(), "address": listener.address}
        said["mark"] = fingerprint(secret) if secret is not None else ""
    except (UsageError, OSError) as error:
        said["error"] = str(error)
    # The address travels through the group itself: no private default store, no port the user must
    # know.
    everyone = [json.loads(text) for text in all_gather_text(json.dumps(said), size, group)]
    refusal = _refusal_of(everyone)
    if refusal is not None:
        if store is not None:
            store.close()
        raise refusal
    if secret is None:
        secret = bytes.fromhex(everyone[0]["drawn"])
        if listener is not None:
            warn_without_secret(listener.address, "ranks")
    host, port = everyone[0]["address"]
    found: KeyValueStore | StoreClient | None = store
    problem = ""
    if found is None:
        watches = 0 not in hosts.local_ranks and not hosts.is_one
        try:
            found = StoreClient((host, port), secret, rank, watches=watches, dead_after=dead_after)
        except OSError as error:
            problem = f"rank {rank} does not reach rank 0 at {host}:{port}: {error}."
    problem = next(filter(None, all_gather_text(problem, size, group)), "")
    if problem or found is None:
        if found is not None:
            found.close()  # what was reached is of no use
        raise UsageError(
            problem,
            "Rank 0 keeps the notice board, at the address by which it is known or the one that "
            "was named.",
            f"name an interface that all hosts reach, and ports that are open ({launch.INTERFACE}, "
            f"{launch.PORTS}; the launcher's --interface and --ports).",
        )
    return found, secret, listener


def listening_ports() -> range:
    """Return the ports that this rank may listen at; 0 is any free one."""
    return parse_ports(said) if (said := os.environ.get(launch.PORTS)) else range(1)


def listening_host(hosts: Hosts) -> str:
    """Return the one address at which this rank listens (`listening_address`)."""
    return listening_address(hosts.is_one, meeting_address())
