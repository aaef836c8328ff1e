"""Memories that hold states outside the training device's own: `Memory` reserves `Extent`s, `Tiers` opens memories.

An extent is a flat tensor at one address for as long as it lives. Tiers differ in where its bytes are between uses. A
user calls `fetch` before a use, `store` after a change and `evict` after a read; a view that was not fetched is waited
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ..base.capabilities import Capability
from .budget import DeviceBudget
from .traffic import Traffic, TransferEvent


class Tier(Enum):
    """The memory that holds a state between uses."""

    DEVICE = "device"  # where forward and backward compute
    HOST = "host"
    NVME = "nvme"


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Wait until the transfer is over; raise `StorageError` if it failed."""

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class CopyEvent(Work, Protocol):
    """A copy to or from the training device."""

    def wait_stream(self) -> None:
        """Order what the device is asked for from now on behind this copy; the host does not wait."""


class CompletedWork:
    """A transfer that had nothing to move."""

    def wait(self) -> None:
        """Return at once: there is nothing to wait for."""

    def is_done(self) -> bool:
        return True

    def wait_stream(self) -> None:
        """Return at once: there is nothing to order."""


COMPLETED = CompletedWork()


class Extent:
    """A flat state in a tier's memory; one of this class never leaves it. Ranges are elements: [low, high).

    All verbs act on this rank alone and change no values. `fetch`, `read` and `write` raise `StorageError` where bytes
    do not come back as they were written.
    """

    copy_event: CopyEvent = COMPLETED  # under way between its elements and the training device

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def wait_for_copy(self) -> None:
        """Wait until every copy to or from the training device is over."""
        copy_event, self.copy_event = self.copy_event, COMPLETED
        copy_event.wait()

    def fetch(self, low: int, high: int) -> Work:
        """Start to bring elements [low, high) to their address; return a completed `Work` if they are there."""
        return COMPLETED

    def pin(self) -> None:
        """Keep elements at their address after `store`, until `evict`: a fetch of the whole extent follows soon."""

    def read(self, low: int, high: int) -> Tensor:
        """Return a read-only view of elements [low, high), valid until `store` or `evict`; it waits for their fetch."""
        self.wait_for_copy()
        return self.memory[low:high]

    def write(self, low: int, high: int) -> Tensor:
        """Return a view as `read` does, and mark the elements as changed."""
        return self.read(low, high)

    def store(self, low: int, high: int) -> Work:
        """Send changed elements to the tier; they are not needed for a while."""
        return COMPLETED

    def evict(self, low: int, high: int) -> None:
        """Free the pages of elements that are not needed for a while; changed ones are stored first."""

    def discard(self, low: int, high: int) -> None:
        """Drop the values: the next ones are written before they are read."""

    @property
    def is_offloaded(self) -> bool:
        """Return whether a view shows nothing between `store` and `fetch`."""
        return False


def read_now(extent: Extent, low: int, high: int) -> Tensor:
    """Return a read-only view of elements as they lie, past every guard; safe from another thread where they never
    move.
    """
    extent.copy_event.wait()
    if not extent.is_offloaded:
        return extent.memory[low:high]
    extent.fetch(low, high).wait()
    return extent.memory[low:high]


class Memory(Protocol):
    """One tier of one rank."""

    traffic: Traffic
    reserved_bytes: int

    def capabilities(self) -> list[Capability]:
        """Describe how bytes come and go here, and what a faster way would need."""

    def check_room(self, nbytes: int, sharers: int) -> None:
        """Raise if each of `sharers` ranks of this host cannot have so many bytes; reserve nothing."""

    def reserve(self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str) -> Extent:
        """Return a zeroed extent, moved in chunks of so many elements."""

    def close(self) -> None:
        """Release everything; extents must not be used any more."""


@dataclass(frozen=True)
class Tiers:
    """The memories beside the training device's that one rank's states may be kept in.

    chunk_numel: elements that are moved, and updated, together. budget: counts what is taken of the training device.
    """

    memories: Mapping[Tier, Memory] = field(default_factory=dict)
    chunk_numel: int = 1 << 20
    budget: DeviceBudget = field(default_factory=DeviceBudget)

    def start_counting(self) -> None:
        """Count from zero: bytes moved so far are left out."""
        for memory in self.memories.values():
            memory.traffic.reset()

    def capabilities(self) -> list[Capability]:
        """Describe how bytes come and go in each memory."""
        return [each for memory in self.memories.values() for each in memory.capabilities()]

    def record(self, events: list[TransferEvent] | None) -> None:
        """Add an entry to this list for every transfer from now on; None stops that."""
        for memory in self.memories.values():
            memory.traffic.events = events

    def reserve(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Extent:
        """Return a zeroed extent on a tier."""
        return self.memories[tier].reserve(numel, dtype, self.chunk_numel, what)
