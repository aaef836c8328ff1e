"""Measures what this rank is busy with: one phase at a time, so that the parts add up to the whole.

Costs a clock reading at each change of phase. On a GPU it tells what the host did, which runs ahead of the device.
"""

from __future__ import annotations

import time

BETWEEN = "outside"  # batches, losses, the caller's own code
AWAY = "waiting for states"  # that rest in other memories


class PhaseClock:
    """Seconds by phase since the first step, which is left out: it warms up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = -1  # counted without the first
        self._phase, self._since = BETWEEN, time.perf_counter()

    def enter(self, phase: str) -> str:
        """Begin a phase; return the one that was under way."""
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before

    def end_step(self) -> bool:
        """End a step; return True after the first, when counting begins."""
        self.enter(BETWEEN)
        self.steps += 1
        if self.steps == 0:
            self.seconds.clear()
        return self.steps == 0
