"""What holds states that are not in the training device's own memory: `Memory` hands out `Extent`s.

An extent is a flat tensor at one address for as long as it lives.  What differs from tier to tier is where its bytes
are while nobody uses them, and who needs that never learns more than: `fetch` before use, `store` after a change,
`drop` after a look.  Whoever forgets to fetch waits for it.  Called by sharding/buffer.py and optim/flow.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ..base.capabilities import Capability
from .device import Allowance
from .traffic import Traffic, TransferEvent


class Tier(Enum):
    """Which memory holds a state between uses."""

    DEVICE = "device"  # where forward and backward compute
    HOST = "host"
    NVME = "nvme"


class Ticket(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when it is over; StorageError where it failed."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class Crossing(Ticket, Protocol):
    """A copy to or from the training device."""

    def order(self) -> None:
        """Let what the device is asked for from now on come after it; the host does not wait."""


class Over:
    """A transfer that was none."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        return True

    def order(self) -> None:
        """Nothing that could come too early."""


OVER = Over()


@dataclass(frozen=True)
class Due:
    """What must be done before anybody sees an extent's elements: about it alone, or about all that wait."""

    this: Callable[[], None]
    everything: Callable[[], None]


class Extent:
    """A flat state in a tier's memory.  This one stays where it is.  Places are elements: [low, high)."""

    due: Due | None = None
    crossing: Crossing = OVER  # under way between its elements and the training device

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def catch_up(self) -> None:
        """Let these elements, and nothing more than needs to, be what they ought to be by now."""
        if self.due is not None:
            self.due.this()

    def settle(self) -> None:
        """As `catch_up`, for whoever will look at other states too, and keep views of them; and let nothing cross."""
        if self.due is not None:
            self.due.everything()
        self.land()

    def land(self) -> None:
        """Let what is copied to or from the training device be over."""
        crossing, self.crossing = self.crossing, OVER
        crossing.wait()

    def fetch(self, low: int, high: int) -> Ticket:
        """Start bringing these elements to their address; nothing where they are there."""
        return OVER

    def keep(self) -> None:
        """Let what is stored stay at its address too, until it is dropped: somebody will fetch all of it soon."""

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


class Delivery:
    """All elements of an extent, on their way to their address as soon as what is due is done.

    Somebody has to ask for what is due: `wait` does, so whoever does not wait leaves it to the others.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self._transfer: Ticket | None = None
        if self._fetch() is None:
            extent.keep()

    def wait(self) -> None:
        self.extent.catch_up()
        if (transfer := self._fetch()) is not None:
            transfer.wait()

    def is_done(self) -> bool:
        transfer = self._fetch()
        return transfer is not None and transfer.is_done()

    def _fetch(self) -> Ticket | None:
        """The transfer, started as soon as nothing is due; None before that."""
        if self._transfer is None and self.extent.due is None:
            self._transfer = self.extent.fetch(0, self.extent.memory.numel())
        return self._transfer


def peek(extent: Extent, low: int, high: int) -> Tensor:
    """These elements as they are, whatever is due, to be read only; from another thread where they rest in place."""
    extent.crossing.wait()
    if not extent.rests_elsewhere:
        return extent.memory[low:high]
    extent.fetch(low, high).wait()
    return extent.memory[low:high]


class Memory(Protocol):
    """One tier of one rank."""

    traffic: Traffic
    reserved_bytes: int

    def capabilities(self) -> list[Capability]:
        """How bytes come and go here, and what a faster way would need."""

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
