"""What holds states that are not in the training device's own memory: `Memory` hands out `Extent`s.

An extent is a flat tensor at one address for as long as it lives.  What differs from tier to tier is where its bytes
are while nobody uses them, and who needs that never learns more than: `fetch` before use, `store` after a change,
`drop` after a look.  Whoever forgets to fetch waits for it.
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
    """Which memory holds a state between uses."""

    DEVICE = "device"  # where forward and backward compute
    HOST = "host"
    NVME = "nvme"


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when it is over; StorageError where it failed."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class CopyEvent(Work, Protocol):
    """A copy to or from the training device."""

    def wait_stream(self) -> None:
        """Let what the device is asked for from now on come after it; the host does not wait."""


class CompletedWork:
    """A transfer that was none."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        return True

    def wait_stream(self) -> None:
        """Nothing that could come too early."""


COMPLETED = CompletedWork()


class Extent:
    """A flat state in a tier's memory.  This one stays where it is.  Places are elements: [low, high)."""

    copy_event: CopyEvent = COMPLETED  # under way between its elements and the training device

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def wait_for_copy(self) -> None:
        """Let what is copied to or from the training device be over."""
        crossing, self.copy_event = self.copy_event, COMPLETED
        crossing.wait()

    def fetch(self, low: int, high: int) -> Work:
        """Start bringing these elements to their address; nothing where they are there."""
        return COMPLETED

    def pin(self) -> None:
        """Let what is stored stay at its address too, until it is dropped: somebody will fetch all of it soon."""

    def read(self, low: int, high: int) -> Tensor:
        """These elements, to be read until `store` or `drop`: a view."""
        self.wait_for_copy()
        return self.memory[low:high]

    def write(self, low: int, high: int) -> Tensor:
        """As `look`, and they may be written."""
        return self.read(low, high)

    def store(self, low: int, high: int) -> Work:
        """They were changed and are not needed for a while."""
        return COMPLETED

    def evict(self, low: int, high: int) -> None:
        """They are not needed for a while; stored first where somebody asked for them to write."""

    def discard(self, low: int, high: int) -> None:
        """Their values are over; the next ones are written before they are read."""

    @property
    def is_offloaded(self) -> bool:
        """Whether a view shows nothing between `store` and `fetch`."""
        return False


def read_now(extent: Extent, low: int, high: int) -> Tensor:
    """These elements as they are, whatever is due, to be read only; from another thread where they rest in place."""
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
        """How bytes come and go here, and what a faster way would need."""

    def check_room(self, nbytes: int, sharers: int) -> None:
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
    budget: DeviceBudget = field(default_factory=DeviceBudget)

    def start_counting(self) -> None:
        """What was moved until now is not asked for."""
        for memory in self.memories.values():
            memory.traffic.reset()

    def capabilities(self) -> list[Capability]:
        """How bytes come and go in each memory."""
        return [each for memory in self.memories.values() for each in memory.capabilities()]

    def record(self, events: list[TransferEvent] | None) -> None:
        """From now on every transfer that is asked for gets an entry there; None: no longer."""
        for memory in self.memories.values():
            memory.traffic.events = events

    def reserve(self, tier: Tier, numel: int, dtype: torch.dtype, what: str) -> Extent:
        """A zeroed state on a tier."""
        return self.memories[tier].reserve(numel, dtype, self.chunk_numel, what)
