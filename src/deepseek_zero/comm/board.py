"""The board on which ranks leave lines for each other: a table in rank 0's process, and the way to it.

Rank 0 keeps the table behind its door (channel.py), at one address and only for who proves the job's secret.  A request
is one operation with a key and a value, an answer is a text; both are limited before anything is allocated.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from enum import IntEnum

import torch.distributed as dist

from ..base import launch
from ..base.errors import UsageError
from ..base.log import logger
from ..base.world import meeting_address
from .bootstrap import Hosts, all_gather_text
from .channel import (
    Address,
    Door,
    Hello,
    Refused,
    Role,
    address_of,
    dial,
    fingerprint,
    introduce,
    parse_ports,
    read_secret,
    receive_exactly,
)

MOST_KEY, MOST_TEXT = 1 << 10, 1 << 24  # bytes
ANSWER_SECONDS = 30.0  # for rank 0, which may be busy, to take a line
HURRIED_SECONDS = 2.0  # for it to answer who waits for others meanwhile
QUIET_SECONDS = 5.0  # after a silence, until somebody waits for it again
HOST_SECONDS = 10.0  # without a sign of its host, until rank 0 is gone
SEND_SECONDS = 1.0  # for another rank to take an answer that it asked for
LOOPBACK = "127.0.0.1"
_REQUEST = struct.Struct("!BII")
_ANSWER = struct.Struct("!BI")


class Operation(IntEnum):
    """The requests. LOOK answers with the text, and says whether there is one."""

    SET = 1
    LOOK = 2


class Board:
    """The table itself, in rank 0's process."""

    def __init__(self, door: Door) -> None:
        self._texts: dict[str, str] = {}
        self._door = door
        door.admit(Role.BOARD, lambda connection, rank: door.watch(connection, _Reader(self, connection, door).read))

    def set(self, key: str, value: str) -> bool:
        self._texts[key] = value
        return True

    def look(self, key: str) -> str | None:
        """Return the text under a key, or None."""
        return self._texts.get(key)

    def close(self) -> None:
        """Listen to nobody any more."""
        self._door.close()


class _Reader:
    """One rank's requests, as they arrive."""

    def __init__(self, board: Board, connection: socket.socket, door: Door) -> None:
        self._board, self._connection, self._door = board, connection, door
        self._came = bytearray()

    def read(self) -> None:
        """Take in what has come and answer whole requests; close the connection where it makes no sense."""
        try:
            data = self._connection.recv(1 << 16)
            self._came += data
            while data and self._answer_one():
                pass
            if data:
                return
        except BlockingIOError:
            return
        except (OSError, ValueError):  # gone, deaf, or no protocol of ours
            pass
        self._door.unwatch(self._connection)

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
        found: str | None = ""
        if operation == Operation.SET:
            self._board.set(key, value)
        else:
            found = self._board.look(key)
        payload = (found or "").encode()
        self._connection.settimeout(SEND_SECONDS)
        self._connection.sendall(_ANSWER.pack(found is not None, len(payload)) + payload)
        self._connection.setblocking(False)
        return True


class FarBoard:
    """The board as another rank sees it.

    RuntimeError if rank 0 is gone: nobody listens there any more, or its host has not answered for HOST_SECONDS. Where
    its host answers and it does not (it is stopped, or busy), nothing is known, and nobody waits long to learn that.
    """

    def __init__(self, address: Address, secret: bytes, rank: int) -> None:
        self._address, self._secret, self._rank = address, secret, rank
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._quiet_until = 0.0  # it did not answer lately: until then nobody waits for it
        self._unreachable_since: float | None = None
        self._connect(ANSWER_SECONDS)

    def set(self, key: str, value: str) -> bool:
        """Write a text; return whether it stands there."""
        return self._ask(Operation.SET, key, value, ANSWER_SECONDS) is not None

    def look(self, key: str) -> str | None:
        """Return the text under a key; None if there is none, or if nothing is known."""
        if time.monotonic() < self._quiet_until:
            return None
        return self._ask(Operation.LOOK, key, "", HURRIED_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self, seconds: float) -> socket.socket:
        connection = self._reach()
        try:
            connection.settimeout(seconds)
            introduce(connection, self._secret, Hello(Role.BOARD, self._rank, 0))
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _reach(self) -> socket.socket:
        """Return a connection that rank 0's host has taken. TimeoutError if it has not, RuntimeError if for long."""
        try:
            connection = dial(self._address, HURRIED_SECONDS)
        except ConnectionRefusedError:
            raise
        except OSError as error:
            self._unreachable_since = since = self._unreachable_since or time.monotonic()
            if time.monotonic() - since > HOST_SECONDS:
                raise RuntimeError(f"rank 0's host has not answered for {HOST_SECONDS:g} s: {error}") from None
            raise TimeoutError from None
        self._unreachable_since = None
        return connection

    def _ask(self, operation: Operation, key: str, value: str, seconds: float) -> str | None:
        """Ask once, and again over a new connection where the old one broke; None if there is no answer."""
        name, text = key.encode()[:MOST_KEY], value.encode()[:MOST_TEXT]
        request = _REQUEST.pack(operation, len(name), len(text)) + name + text
        if time.monotonic() < self._quiet_until:
            seconds = HURRIED_SECONDS
        with self._lock:
            for _ in range(2):
                try:
                    connection = self._connection or self._connect(seconds)
                    connection.settimeout(seconds)
                    return self._answer(connection, request)
                except (ConnectionRefusedError, Refused) as error:
                    self._drop()
                    raise RuntimeError(f"rank 0, which keeps the board, has ended: {error}") from None
                except ConnectionError:
                    self._drop()
                except TimeoutError:
                    self._drop()
                    break
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            return None

    def _answer(self, connection: socket.socket, request: bytes) -> str | None:
        connection.sendall(request)
        is_there, size = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size))
        if size > MOST_TEXT:
            raise ConnectionResetError("no answer of a board")
        text = receive_exactly(connection, size).decode()
        return text if is_there else None


def open_board(
    rank: int, size: int, hosts: Hosts, group: dist.ProcessGroup | None
) -> tuple[Board | FarBoard, bytes, Door | None]:
    """Open the board of one world and agree on the job's secret; return both, and rank 0's door.  Collective in the
    group.

    Without a secret of the launcher's or the user's rank 0 draws one, which travels through the group as it is; beyond
    one host it says so.  Raises `UsageError` on every rank if one cannot read its secret or holds another.
    """
    said: dict[str, object] = {}
    door, secret = None, None
    try:
        secret = read_secret()
        if rank == 0:
            drawn = secrets.token_bytes(launch.SECRET_BYTES) if secret is None else b""
            door = Door(listening_host(hosts), secret or drawn, 0, listening_ports())
            said |= {"drawn": drawn.hex(), "address": door.address}
        said["mark"] = fingerprint(secret) if secret is not None else ""
    except (UsageError, OSError) as error:
        said["error"] = str(error)
    # The address travels through the group itself: no private default store, no port the user must know.
    everyone = [json.loads(text) for text in all_gather_text(json.dumps(said), size, group)]
    for other, each in enumerate(everyone):
        if "error" in each:
            raise UsageError(f"rank {other} cannot meet the others: {each['error']}")
        if each["mark"] != everyone[0]["mark"]:
            raise UsageError(
                f"rank {other} holds another secret than rank 0, or one of the two holds none.",
                f"{launch.SECRET_FILE} names the file that holds it.",
                "give all hosts of a job the same file, and every job its own.",
            )
    if secret is None:
        secret = bytes.fromhex(everyone[0]["drawn"])
        if rank == 0 and not hosts.is_one:
            logger.warning(
                "ranks on several hosts hold no secret: whoever reads their network can join them. Name a file of "
                f"{launch.SECRET_BYTES} random bytes, mode 0600, the same on every host, in {launch.SECRET_FILE}."
            )
    if door is not None:
        return Board(door), secret, door
    host, port = everyone[0]["address"]
    return FarBoard((host, port), secret, rank), secret, None


def listening_ports() -> range:
    """Return the ports that this rank may listen at; 0 is any free one."""
    return parse_ports(said) if (said := os.environ.get(launch.PORTS)) else range(1)


def listening_host(hosts: Hosts) -> str:
    """Return the one address at which this rank listens: of the interface that was named, else the one by which it
    reaches rank 0; loopback where all ranks are on one host.
    """
    if said := os.environ.get(launch.INTERFACE):
        return address_of(said)
    if hosts.is_one:
        return LOOPBACK
    for target in (meeting_address(), socket.gethostname(), "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target or "", 9))  # asks the routing table; nothing is sent
            found = str(probe.getsockname()[0])
            if target == meeting_address() or not found.startswith("127."):  # a host's own name may mean 127.0.1.1
                return found
    return LOOPBACK
