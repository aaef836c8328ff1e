"""A `torch.distributed.Store` over a `KeyValueStore`, for the rendezvous of a job.

It admits only processes that hold the job's secret; torch's own stores admit any client. Each call
is one request or a few. Waiting for a key polls it at increasing intervals, which happens only at
the start of a job.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # public

from ...base import launch, world
from .channel import Address, Listener, Role, read_secret
from .key_value_store import Answer, KeyValueStore, Operation, StoreClient

# For values that other processes write after they have started
START_TIMEOUT = timedelta(minutes=15)
# The public secret of launchers on several hosts that were given none
NO_SECRET = bytes(launch.SECRET_BYTES)
# Stores of this rank: torch keeps only the C++ part of a store, and uses it as long as it runs
_KEPT: list[RendezvousStore] = []
# Seconds between two requests for a key
SHORTEST_PAUSE = 1e-3
LONGEST_PAUSE = 0.05


class RendezvousStore(Store):
    """A `KeyValueStore` with the interface that torch expects.

    Methods raise RuntimeError if the process that holds the table has ended. A `KeyValueStore`
    holds texts, so bytes are stored as the characters with the same code (latin-1).

    Args:
        store: The table or its client.
        timeout: Maximum time to wait for a key or an answer.
    """

    def __init__(self, store: KeyValueStore | StoreClient, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._store = store
        self._who = secrets.token_hex(8)
        self._numbers = itertools.count()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the maximum time to wait for a key or an answer."""
        super().set_timeout(timeout)
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value.

        Args:
            key: Name under which the value is stored.
            value: Text or bytes.
        """
        self._request(Operation.SET, key, _text(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting until there is one."""
        self.wait([key])
        return _bytes(self._request(Operation.GET, key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, which is 0 at first.

        Args:
            key: Name under which the value is stored.
            amount: The number to add.

        Returns:
            The number after the addition.

        Raises:
            DistStoreError: The value of the key is not a number.
        """
        value = json.dumps([self._who, next(self._numbers), amount])
        text = self._request(Operation.ADD, key, value).text
        if text is None:
            raise DistStoreError(f"the value of {key!r} is not a number, so nothing was added")
        return int(text)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the current value is `expected`.

        An absent key matches an empty `expected`.

        Args:
            key: Name under which the value is stored.
            expected: The value to compare with.
            desired: The value to write.

        Returns:
            The value after the call, or `expected` if there is none.
        """
        value = json.dumps([_text(expected), _text(desired)])
        return _bytes(self._request(Operation.SWAP, key, value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys have values."""
        return all(self._request(Operation.GET, key).text is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys have values.

        Args:
            keys: Names that must have a value.
            timeout: Maximum time; None for the store's own.

        Raises:
            DistStoreError: A key has no value in time.
        """
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = SHORTEST_PAUSE
        for key in keys:
            while self._request(Operation.GET, key).text is None:
                if time.monotonic() > until:
                    raise DistStoreError(f"no rank wrote {key!r} in time")
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)

    def delete_key(self, key: str) -> bool:
        """Remove a value, and return whether there was one."""
        return self._request(Operation.DELETE, key).text is not None

    def list_keys(self) -> list[str]:
        """Return all keys that have a value in the store."""
        return [str(key) for key in json.loads(self._request(Operation.KEYS, "").text or "[]")]

    def num_keys(self) -> int:
        """Return the number of keys that have a value in the store."""
        return len(self.list_keys())

    # Names that torch calls from C++
    deleteKey = delete_key
    getNumKeys = num_keys

    def clone(self) -> RendezvousStore:
        """Return this store.

        torch would not keep another Python store alive.
        """
        return self

    def _request(self, operation: Operation, key: str, value: str = "") -> Answer:
        """Repeat a request until it is answered; raise DistStoreError after the timeout."""
        until = time.monotonic() + self._timeout.total_seconds()
        while (answer := self._store.request(operation, key, value)) is None:
            if time.monotonic() > until:
                raise DistStoreError(f"the store has not answered for {self._timeout}")
            # With a silent host, requests return at once without an answer
            time.sleep(LONGEST_PAUSE)
        return answer


def keep_store(
    host: str, port: int, secret: bytes
) -> tuple[RendezvousStore, KeyValueStore, Address]:
    """Open the store of a job in this process.

    Args:
        host: The address to listen at.
        port: The port; 0 is any free port.
        secret: Secret that all processes of the job hold, 32 bytes.

    Returns:
        The store, its table, and the address at which it listens.

    Raises:
        UsageError: The port is in use.
        OSError: This host cannot listen at that address.
    """
    listener = Listener(host, secret, 0, (port,))
    store = KeyValueStore(listener, Role.STORE)
    return RendezvousStore(store, START_TIMEOUT), store, listener.address


def reach_store(
    address: Address, secret: bytes, rank: int, *, watches: bool = False
) -> RendezvousStore:
    """Connect to the store at an address.

    Args:
        address: The address of the store's listener.
        secret: Secret that all processes of the job hold, 32 bytes.
        rank: The number by which this process identifies itself to the store.
        watches: Whether to detect that the store's host is lost; set it if the store is on another
            host.

    Returns:
        The connected store.

    Raises:
        OSError: Nothing listens at that address.
        RuntimeError: The host does not answer.
        Refused: Another program listens there, or the secret differs.
    """
    return RendezvousStore(
        StoreClient(address, secret, rank, role=Role.STORE, watches=watches), START_TIMEOUT
    )


def launchers_store() -> RendezvousStore | None:
    """Return the store that this library's launcher keeps for the ranks of this job.

    Return None under another launcher.

    Raises:
        UsageError: The secret cannot be read.
        OSError: The store cannot be reached; see `reach_store`.
    """
    if (place := launch.place_of_store()) is None:
        return None
    host, _, port = place.rpartition(":")
    _KEPT.append(reach_store((host, int(port)), read_secret() or NO_SECRET, world.rank()))
    return _KEPT[-1]


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _bytes(answer: Answer) -> bytes:
    return (answer.text or "").encode("latin-1")
