"""What the link to each other memory carried in a mean step, and how near the step came to what bounds it.

    bound = the larger of: what the link needs for its bytes at the best speed seen, what this rank does beside waiting

Owns the arithmetic; the sentences are explain.py's.  Called by the engine's `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.clock import AWAY
from ..comm.meter import Meter
from ..tiers.tier import Tier, Tiers
from ..tiers.traffic import Traffic

NAMES = {Tier.HOST: "host", Tier.NVME: "disk"}


@dataclass(frozen=True)
class Link:
    """One memory's link on this rank; all but resting_bytes per step, and 0 before there were two steps.

    busy_seconds: something was under way.  waited_seconds: this rank stood and waited for it.  best_rate: bytes a
    second over the fastest stretch.  working_seconds: what a step takes less all waits, for links and for ranks.
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
        """Bytes a second while something was under way."""
        return self.moved_bytes / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def hidden(self) -> float:
        """Of the time in which something was under way, the part that nobody stood still for."""
        return max(0.0, 1 - self.waited_seconds / self.busy_seconds) if self.busy_seconds else 0.0

    @property
    def needed_seconds(self) -> float:
        """What its bytes take at the best speed seen."""
        return self.moved_bytes / self.best_rate if self.best_rate else 0.0

    @property
    def bound_seconds(self) -> float:
        """No step over this link and with this work is shorter."""
        return max(self.needed_seconds, self.working_seconds)

    @property
    def reached(self) -> float:
        """The bound's share of the step: 1.0 is as good as it gets."""
        return min(1.0, self.bound_seconds / self.step_seconds) if self.step_seconds else 0.0


def links_of(tiers: Tiers, meter: Meter) -> list[Link]:
    """Every link of this rank."""
    return [_link(NAMES[tier], each.reserved_bytes, each.traffic, meter) for tier, each in tiers.memories.items()]


def _link(name: str, resting_bytes: int, moved: Traffic, meter: Meter) -> Link:
    steps = meter.clock.steps
    if steps <= 0:
        return Link(name, resting_bytes)
    passed = sum(meter.clock.seconds.values())
    waited = sum(meter.wait_seconds.values()) + meter.clock.seconds.get(AWAY, 0.0)
    mean = (moved.read_bytes + moved.written_bytes) / moved.seconds if moved.seconds else 0.0
    return Link(
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
