"""What one rank measures: bytes and calls per kind of collective, seconds of waiting, and the phase
it is in.

Bytes are counted where they leave.  `PhaseClock` knows one phase at a time, so that the parts add
up to the whole; it costs a clock reading at each change.  On a GPU it tells what the host did,
which runs ahead of the device.  `events`, a list while one is recorded, has one entry per
collective.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

BETWEEN = "outside"  # batches, losses, the caller's own code
AWAY = "waiting for states"  # that rest in other memories


class PhaseClock:
    """Seconds by phase since the first step, which is left out: it warms up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = -1  # counted without the first
        self._phase = BETWEEN
        self._since = time.perf_counter()

    @property
    def phase(self) -> str:
        """Return the phase that is under way."""
        return self._phase

    def enter(self, phase: str) -> str:
        """Begin a phase; return the one that was under way."""
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        before = self._phase
        self._phase = phase
        self._since = now
        return before

    def end_step(self) -> bool:
        """End a step; return True after the first, when counting begins."""
        self.enter(BETWEEN)
        self.steps += 1
        if self.steps == 0:
            self.seconds.clear()
        return self.steps == 0


class Event(NamedTuple):
    """One collective on this rank, in seconds of time.perf_counter. lane: "gather", "reduce" or
    "rows".

    arrived: when its data was here. waited: the interval in which this rank did nothing but wait
    for it.
    """

    lane: str
    what: str
    issued: float
    arrived: float
    waited: tuple[float, float]

    @property
    def under_way(self) -> tuple[float, float]:
        """Return the interval from the call that started it until its data was here."""
        return self.issued, self.arrived


@dataclass
class Meter:
    """Counts since the last reset.

    sent_bytes[kind]: bytes this rank sent, by any transport; far_bytes[kind]: those of them that
    went to other hosts.
    calls[kind]: collectives. wait_seconds[lane]: seconds of waiting. sum_seconds: seconds of adding
    up what other ranks
    sent. clock: the phases in which that happened. inter_node_rate: the bytes a second that a rank
    sent to other hosts while all ranks did, if that was measured (comm/measure.py).
    """

    sent_bytes: Counter[str] = field(default_factory=Counter)
    far_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    wait_seconds: dict[str, float] = field(default_factory=dict)
    sum_seconds: float = 0.0
    clock: PhaseClock = field(default_factory=PhaseClock)
    events: list[Event] | None = None
    inter_node_rate: float | None = None
    # Bytes sent, bytes sent far and steps before `counted_bytes` begin
    _uncounted: tuple[int, int, int] = (0, 0, 0)

    def count(self, kind: str, sent_bytes: int, far_bytes: int = 0) -> None:
        self.sent_bytes[kind] += sent_bytes
        self.far_bytes[kind] += far_bytes
        self.calls[kind] += 1

    def waited(self, lane: str, seconds: float) -> None:
        self.wait_seconds[lane] = self.wait_seconds.get(lane, 0.0) + seconds

    def total_bytes(self) -> int:
        """Return the bytes this rank sent, of all kinds."""
        return sum(self.sent_bytes.values())

    @property
    def counted_steps(self) -> int:
        """Return the steps in which `counted_bytes` were sent."""
        return self.clock.steps - self._uncounted[2]

    @property
    def counted_bytes(self) -> tuple[int, int]:
        """Return the bytes this rank sent, of all kinds, and those of them to other hosts: since
        the first step ended, or the last reset.
        """
        sent, far, _ = self._uncounted
        return self.total_bytes() - sent, sum(self.far_bytes.values()) - far

    def reset(self) -> None:
        self._uncounted = (0, 0, max(0, self.clock.steps))
        self.sent_bytes.clear()
        self.far_bytes.clear()
        self.calls.clear()
        self.reset_seconds()

    def end_step(self) -> bool:
        """End an optimizer step; return whether seconds count from here on."""
        begins = self.clock.end_step()
        if begins:
            self._uncounted = (self.total_bytes(), sum(self.far_bytes.values()), self.clock.steps)
            self.reset_seconds()
        return begins

    def reset_seconds(self) -> None:
        """Reset the seconds of waits and sums."""
        self.wait_seconds.clear()
        self.sum_seconds = 0.0
