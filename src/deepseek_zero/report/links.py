"""The traffic of the link to each other memory in a mean step, and how near the step came to its
bound.

    bound = the larger of: the seconds that the bytes take at the best rate seen, the seconds that
    this rank computes

Owns the arithmetic; explain.py makes sentences of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.meter import AWAY, Meter
from ..tiers.tier import Tier, Tiers, TransferMeter

NAMES = {Tier.HOST: "host", Tier.NVME: "disk"}


@dataclass(frozen=True)
class MemoryLink:
    """One memory's link on this rank; all but resting_bytes per step, and 0 before there were two
    steps.

    busy_seconds: a transfer was under way.  waited_seconds: this rank waited for one.  best_rate:
    bytes a second over
    the fastest stretch.  working_seconds: the step without all waits, for links and for other
    ranks.
    """

    name: str
    resting_bytes: int
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    best_rate: float = 0.0
    working_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    @property
    def rate(self) -> float:
        """Bytes a second while a transfer was under way."""
        return self.moved_bytes / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def hidden(self) -> float:
        """The share of the busy time in which this rank did not wait; 0 to 1."""
        return max(0.0, 1 - self.waited_seconds / self.busy_seconds) if self.busy_seconds else 0.0

    @property
    def needed_seconds(self) -> float:
        """Seconds that the bytes take at the best rate seen."""
        return self.moved_bytes / self.best_rate if self.best_rate else 0.0

    @property
    def bound_seconds(self) -> float:
        """No step over this link and with this work is shorter."""
        return max(self.needed_seconds, self.working_seconds)

    @property
    def reached(self) -> float:
        """The bound's share of the step: 1.0 is as good as it gets."""
        return min(1.0, self.bound_seconds / self.step_seconds) if self.step_seconds else 0.0


def links_of(tiers: Tiers, meter: Meter) -> list[MemoryLink]:
    """The links of this rank, one for each memory beside the device."""
    return [
        _link(NAMES[tier], each.reserved_bytes, each.traffic, meter)
        for tier, each in tiers.memories.items()
    ]


def _link(name: str, resting_bytes: int, moved: TransferMeter, meter: Meter) -> MemoryLink:
    steps = meter.clock.steps
    if steps <= 0:
        return MemoryLink(name, resting_bytes)
    passed = sum(meter.clock.seconds.values())
    waited = sum(meter.wait_seconds.values()) + meter.clock.seconds.get(AWAY, 0.0)
    mean = (moved.read_bytes + moved.written_bytes) / moved.seconds if moved.seconds else 0.0
    return MemoryLink(
        name,
        resting_bytes,
        read_bytes=moved.read_bytes / steps,
        written_bytes=moved.written_bytes / steps,
        busy_seconds=moved.seconds / steps,
        waited_seconds=moved.waited_seconds / steps,
        best_rate=max(moved.best_rate, mean),  # a short run has no stretch that is long enough
        working_seconds=max(0.0, passed - waited) / steps,
        step_seconds=passed / steps,
    )
