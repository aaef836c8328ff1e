"""What holds states that are not in the training device's own memory: `Memory` hands out `Extent`s.

An extent is a flat tensor at one address for as long as it lives.  What differs from tier to tier is where its bytes
are while nobody uses them, and who needs that never learns more than: `fetch` before use, `store` after a change,
`drop` after a look.  Whoever forgets to fetch waits for it.  Called by sharding/buffer.py and optim/flow.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from .device import Allowance


class Tier(Enum):
    """Which memory holds a state between uses."""

    DEVICE = "device"  # where forward and backward compute
    HOST = "host"
    NVME = "nvme"


class Traffic:
    """What one rank moves to and from one memory.

    read_bytes, written_bytes: since `reset`.  seconds: in which some transfer was under way.  waited_seconds: in which
    somebody stood and waited for one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active, self._since = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.read_bytes = self.written_bytes = 0
            self.seconds = self.waited_seconds = 0.0
            self._since = time.perf_counter()

    @contextmanager
    def transfer(self, *, read: int = 0, written: int = 0) -> Iterator[None]:
        """So many bytes move in this block, in any thread."""
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                self.read_bytes += read
                self.written_bytes += written
                if not self._active:
                    self.seconds += time.perf_counter() - self._since


class Ticket(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when it is over; StorageError where it failed."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class Over:
    """A transfer that was none."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        return True


OVER = Over()


@dataclass(frozen=True)
class Due:
    """What must be done before anybody sees an extent's elements: about it alone, or about all that wait."""

    this: Callable[[], None]
    everything: Callable[[], None]


class Extent:
    """A flat state in a tier's memory.  This one stays where it is.  Places are elements: [low, high)."""

    due: Due | None = None

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def catch_up(self) -> None:
        """Let these elements, and nothing more than needs to, be what they ought to be by now."""
        if self.due is not None:
            self.due.this()

    def settle(self) -> None:
        """As `catch_up`, for whoever will look at other states too, and keep views of them."""
        if self.due is not None:
            self.due.everything()

    def fetch(self, low: int, high: int) -> Ticket:
        """Start bringing these elements to their address; nothing where they are there."""
        return OVER

    def look(self, low: int, high: int) -> Tensor:
        """These elements, to be read until `store` or `drop`: a view."""
        self.settle()
        return self.memory[low:high]

    def part(self, low: int, high: int) -> Tensor:
        """As `look`, and they may be written."""
        return self.look(low, high)

    def store(self, low: int, high: int) -> Ticket:
        """They were changed and are not needed for a while."""
        return OVER

    def drop(self, low: int, high: int) -> None:
        """They are not needed for a while; stored first where somebody asked for them to write."""

    def forget(self, low: int, high: int) -> None:
        """Their values are over; the next ones are written before they are read."""

    @property
    def rests_elsewhere(self) -> bool:
        """Whether a view shows nothing between `store` and `fetch`."""
        return False


class Memory(Protocol):
    """One tier of one rank."""

    traffic: Traffic
    reserved_bytes: int

    def admit(self, nbytes: int, sharers: int) -> None:
        """Raise if so many bytes cannot be had by each of `sharers` ranks of this host; reserves nothing."""

    def reserve(self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str) -> Extent:
        """A zeroed state, moved in chunks of so many elements."""

    def close(self) -> None:
        """Let go of everything; extents must not be used any more."""


@dataclass(frozen=True)
class Tiers:
    """The memories one rank's states may rest in beside the training device's.

    chunk_numel: elements that are moved, and updated, together.  allowance: what may be taken of the training device.
    """

    memories: Mapping[Tier, Memory] = field(default_factory=dict)
    chunk_numel: int = 1 << 20
    allowance: Allowance = field(default_factory=Allowance)

    def start_counting(self) -> None:
        """What was moved until now is not asked for."""
        for memory in self.memories.values():
            memory.traffic.reset()

    def reserve(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Extent:
        """A zeroed state on a tier."""
        return self.memories[tier].reserve(numel, dtype, self.chunk_numel, what)
