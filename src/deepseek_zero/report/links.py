"""Compute the traffic per step to each other memory, and a bound on the step time.

    bound = max(seconds of the transfers at the best observed rate, seconds of computation)

explain.py formats the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.meter import AWAY, Meter
from ..tiers.tier import Tier, Tiers, TransferMeter

NAMES = {Tier.HOST: "host", Tier.NVME: "disk"}


@dataclass(frozen=True)
class MemoryLink:
    """The traffic between the device and one other memory on this rank.

    All values except resting_bytes are per step, and 0 before there were two steps.

    Attributes:
        name: Name of the memory.
        resting_bytes: Bytes stored in the memory.
        read_bytes: Bytes read.
        written_bytes: Bytes written.
        busy_seconds: Time during which a transfer was in progress.
        waited_seconds: Time this rank waited for transfers.
        best_rate: Bytes per second over the fastest stretch.
        working_seconds: Time of the step without waiting for links or other ranks.
        step_seconds: Time of the step.
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
        """Return the bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def rate(self) -> float:
        """Return bytes per second while a transfer was in progress."""
        return self.moved_bytes / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def hidden(self) -> float:
        """Return the fraction of the busy time in which this rank did not wait, from 0 to 1."""
        return max(0.0, 1 - self.waited_seconds / self.busy_seconds) if self.busy_seconds else 0.0

    @property
    def needed_seconds(self) -> float:
        """Return the seconds of the transfers at the best observed rate."""
        return self.moved_bytes / self.best_rate if self.best_rate else 0.0

    @property
    def bound_seconds(self) -> float:
        """Return a lower bound on the step time with this link and this computation."""
        return max(self.needed_seconds, self.working_seconds)

    @property
    def reached(self) -> float:
        """Return the bound divided by the step time; 1.0 is optimal."""
        return min(1.0, self.bound_seconds / self.step_seconds) if self.step_seconds else 0.0


def links_of(tiers: Tiers, meter: Meter) -> list[MemoryLink]:
    """Return the traffic of this rank between the device and each other memory.

    Args:
        tiers: The memories outside the device, with the counts of their transfers.
        meter: Measurements of the steps on this rank.

    Returns:
        One `MemoryLink` for each memory in `tiers`. Its values per step are 0 until two steps have
        been taken.
    """
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
        best_rate=max(moved.best_rate, mean),  # a short run has no stretch of sufficient length
        working_seconds=max(0.0, passed - waited) / steps,
        step_seconds=passed / steps,
    )
