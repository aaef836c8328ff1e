"""A store for torch over a `KeyValueStore`, in which the processes of a job find each other. It
admits only those that hold the job's secret.

torch's own stores listen at a port for whoever comes.  This one is a `torch.distributed.Store` to
torch, and a client of a `KeyValueStore` to us: each call is a request or a few, and
waiting for a key is asking again and again, at longer and longer intervals, which only a start
does.
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

START_TIMEOUT = timedelta(minutes=15)  # for what others write when they have started
# Of launchers on several hosts that were given none: anybody knows it
NO_SECRET = bytes(launch.SECRET_BYTES)
_KEPT: list[
    RendezvousStore
] = []  # of this rank: torch keeps of a store what is C++, and asks it as long as it runs
# seconds between two looks for a key
SHORTEST_PAUSE = 1e-3
LONGEST_PAUSE = 0.05


class RendezvousStore(Store):
    """A `KeyValueStore` as torch calls it. RuntimeError if the process that has it is gone.

    A `KeyValueStore` has texts: bytes of torch's are written as the characters of these numbers.
    """

    def __init__(self, store: KeyValueStore | StoreClient, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._store = store
        self._who = secrets.token_hex(8)
        self._numbers = itertools.count()

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait no longer than this for a key, or for whoever keeps the store."""
        super().set_timeout(timeout)
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(Operation.SET, key, _text(value))

    def get(self, key: str) -> bytes:
        """Return a value as soon as there is one."""
        self.wait([key])
        return _bytes(self._ask(Operation.GET, key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, which is 0 at first; return the sum."""
        return int(
            self._ask(Operation.ADD, key, json.dumps([self._who, next(self._numbers), amount])).text
            or 0
        )

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`, or if there is none and nothing is expected;
        return the value.
        """
        return _bytes(self._ask(Operation.SWAP, key, json.dumps([_text(expected), _text(desired)])))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys have values."""
        return all(self._ask(Operation.GET, key).text is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys have values; DistStoreError if they do not within the
        time.
        """
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = SHORTEST_PAUSE
        for key in keys:
            while self._ask(Operation.GET, key).text is None:
                if time.monotonic() > until:
                    raise DistStoreError(f"nobody wrote {key!r} in time")
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        return self._ask(Operation.DELETE, key).text is not None

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return [str(key) for key in json.loads(self._ask(Operation.KEYS, "").text or "[]")]

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self.list_keys())

    # as torch calls these two from C++
    deleteKey = delete_key
    getNumKeys = num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys as soon as all have one."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` may be used; torch does without."""
        return False

    def clone(self) -> RendezvousStore:
        """Return a store of the same values: this one, since what torch holds of another would not
        keep it alive.
        """
        return self

    def _ask(self, operation: Operation, key: str, value: str = "") -> Answer:
        """Ask until there is an answer; DistStoreError if there is none within the store's own
        time.
        """
        until = time.monotonic() + self._timeout.total_seconds()
        while (answer := self._store.ask(operation, key, value)) is None:
            if time.monotonic() > until:
                raise DistStoreError(f"who keeps the store has not answered for {self._timeout}")
            time.sleep(LONGEST_PAUSE)  # behind a silent host there is no answer at once
        return answer


def keep_store(
    host: str, port: int, secret: bytes
) -> tuple[RendezvousStore, KeyValueStore, Address]:
    """Open the store of a job in this process; return it, its table, and where it listens. port: 0
    is any free one.

    Raises `UsageError` if the port is taken, OSError if this host cannot listen at that address.
    """
    listener = Listener(host, secret, 0, (port,))
    store = KeyValueStore(listener, Role.STORE)
    return RendezvousStore(store, START_TIMEOUT), store, listener.address


def reach_store(
    address: Address, secret: bytes, rank: int, *, watches: bool = False
) -> RendezvousStore:
    """Return the store that listens there. rank: by which this process is known to it. watches: as
    `StoreClient`.

    Raises OSError or RuntimeError if nobody listens there, `Refused` if it is somebody else.
    """
    return RendezvousStore(
        StoreClient(address, secret, rank, role=Role.STORE, watches=watches), START_TIMEOUT
    )


def launchers_store() -> RendezvousStore | None:
    """Return the store that our launcher keeps for the ranks of this job; None under another
    launcher.

    Raises as `reach_store`, and `UsageError` if the secret cannot be read.
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
