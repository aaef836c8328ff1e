"""Measurements of one rank: bytes and calls per collective, and seconds per phase.

Bytes are counted on the sending rank. `PhaseClock` is in exactly one phase at a time, so the phases
add up to the total; each change costs one clock reading. On a GPU the times are those of the host,
which runs ahead of the device. While `events` is a list, it receives one entry per collective.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

BETWEEN = "data loading and user code"
AWAY = "waiting for states"  # on other memory tiers


class PhaseClock:
    """Seconds by phase. The first step is excluded, because it warms up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = -1  # not counting the first one
        self._phase = BETWEEN
        self._since = time.perf_counter()

    @property
    def phase(self) -> str:
        """Return the name of the phase that is being timed."""
        return self._phase

    def enter(self, phase: str) -> str:
        """Start a phase and return the name of the previous one."""
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        before = self._phase
        self._phase = phase
        self._since = now
        return before

    def end_step(self) -> bool:
        """End a step; return True after the first one, when the measurement starts."""
        self.enter(BETWEEN)
        self.steps += 1
        if self.steps == 0:
            self.seconds.clear()
        return self.steps == 0


class Event(NamedTuple):
    """One collective on this rank, in seconds of `time.perf_counter`.

    Attributes:
        lane: "gather", "reduce" or "rows".
        what: The name of the collective.
        issued: Time of the call that started it.
        arrived: Time when its data was complete on this rank.
        waited: The interval in which this rank did nothing but wait for it.
    """

    lane: str
    what: str
    issued: float
    arrived: float
    waited: tuple[float, float]

    @property
    def under_way(self) -> tuple[float, float]:
        """Return the interval from its start until its data was complete."""
        return self.issued, self.arrived


@dataclass
class Meter:
    """Bytes, calls and seconds of one rank since the last reset.

    Attributes:
        sent_bytes: Bytes that this rank sent, by kind of collective and over any transport.
        far_bytes: The part of `sent_bytes` that was sent to other hosts.
        calls: Number of collectives, by kind.
        wait_seconds: Seconds of waiting, by lane.
        sum_seconds: Seconds of adding received data.
        clock: The phases.
        events: A list to record collectives in, or None.
        inter_node_rate: Bytes per second that a rank sent to other hosts while all ranks sent, if
            it was measured (comm/measure.py).
    """

    sent_bytes: Counter[str] = field(default_factory=Counter)
    far_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    wait_seconds: dict[str, float] = field(default_factory=dict)
    sum_seconds: float = 0.0
    clock: PhaseClock = field(default_factory=PhaseClock)
    events: list[Event] | None = None
    inter_node_rate: float | None = None
    # Bytes sent, bytes sent to other hosts, and steps at which `counted_bytes` starts
    _uncounted: tuple[int, int, int] = (0, 0, 0)

    def count(self, kind: str, sent_bytes: int, far_bytes: int = 0) -> None:
        """Count one collective.

        Args:
            kind: Kind of collective, such as "all_gather".
            sent_bytes: Bytes that this rank sent.
            far_bytes: The part that was sent to other hosts.
        """
        self.sent_bytes[kind] += sent_bytes
        self.far_bytes[kind] += far_bytes
        self.calls[kind] += 1

    def waited(self, lane: str, seconds: float) -> None:
        """Add to the waiting time of a lane.

        Args:
            lane: The sequence of collectives in which the rank waited: "gather", "reduce" or
                "rows".
            seconds: Duration of the wait.
        """
        self.wait_seconds[lane] = self.wait_seconds.get(lane, 0.0) + seconds

    def total_bytes(self) -> int:
        """Return the bytes that this rank sent, of all kinds."""
        return sum(self.sent_bytes.values())

    @property
    def counted_steps(self) -> int:
        """Return the number of steps that `counted_bytes` covers."""
        return self.clock.steps - self._uncounted[2]

    @property
    def counted_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sent in total and to other hosts.

        Counted from the end of the first step, or from the last reset.
        """
        sent, far, _ = self._uncounted
        return self.total_bytes() - sent, sum(self.far_bytes.values()) - far

    def reset(self) -> None:
        """Set all byte, call and time counts to zero."""
        self._uncounted = (0, 0, max(0, self.clock.steps))
        self.sent_bytes.clear()
        self.far_bytes.clear()
        self.calls.clear()
        self.reset_seconds()

    def end_step(self) -> bool:
        """End an optimizer step; return whether the measurement starts now."""
        begins = self.clock.end_step()
        if begins:
            self._uncounted = (self.total_bytes(), sum(self.far_bytes.values()), self.clock.steps)
            self.reset_seconds()
        return begins

    def reset_seconds(self) -> None:
        """Set the measured seconds of waits and sums to zero, and keep the byte counts."""
        self.wait_seconds.clear()
        self.sum_seconds = 0.0
