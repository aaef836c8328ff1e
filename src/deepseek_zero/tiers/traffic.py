"""Counts of what one rank moves to and from one memory: bytes and seconds, and on demand each transfer.

Bytes are counted where they move (disk.py). `engine.timeline` returns the recorded transfers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..base.clock import AWAY, PhaseClock

STRETCH_BYTES = 256 << 20  # many times what is under way at once, so that a burst is not taken for the link's speed


@dataclass(eq=False, slots=True)
class TransferEvent:
    """One transfer on this rank, in seconds of time.perf_counter; 0.0: not yet, or never.

    issued: when it was asked for.  began, ended: when its bytes moved.  waited: from when to when this rank did nothing
    else than wait for it.
    """

    what: str
    nbytes: int
    is_read: bool
    issued: float
    began: float = 0.0
    ended: float = 0.0
    waited: tuple[float, float] = (0.0, 0.0)

    @property
    def under_way(self) -> tuple[float, float]:
        """Return the seconds during which the bytes moved."""
        return self.began, self.ended


class Traffic:
    """Counts since `reset`, and a list of transfers while one is recorded.

    seconds: time with a transfer under way. waited_seconds: time in which the rank stood and waited for one. best_rate:
    bytes a second over the fastest stretch; 0 before there was one. clock: is told of waits.
    """

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.events: list[TransferEvent] | None = None
        self._lock = threading.Lock()
        self._active, self._since = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.read_bytes = self.written_bytes = 0
            self.seconds = self.waited_seconds = self.best_rate = 0.0
            self._stretch = (0, 0.0)  # bytes and seconds counted when it began
            self._since = time.perf_counter()

    def request(self, what: str, nbytes: int, *, is_read: bool) -> TransferEvent:
        """Note that a transfer is asked for."""
        event = TransferEvent(what, nbytes, is_read, time.perf_counter())
        if self.events is not None:
            self.events.append(event)
        return event

    @contextmanager
    def transfer(self, event: TransferEvent) -> Iterator[None]:
        """Count a transfer whose bytes move in this block, in any thread."""
        with self._lock:
            event.began = self._pass()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                event.ended = self._pass()
                self._active -= 1
                self.read_bytes += event.nbytes * event.is_read
                self.written_bytes += event.nbytes * (not event.is_read)
                self._compare()

    @contextmanager
    def waiting(self, event: TransferEvent) -> Iterator[None]:
        """Count a block in which this rank does nothing but wait for the transfer."""
        before, began = self.clock.enter(AWAY), time.perf_counter()
        try:
            yield
        finally:
            event.waited = began, time.perf_counter()
            self.waited_seconds += event.waited[1] - began
            self.clock.enter(before)

    def _pass(self) -> float:
        """Advance to now: the time since the last call counts if a transfer was under way."""
        now = time.perf_counter()
        if self._active:
            self.seconds += now - self._since
        self._since = now
        return now

    def _compare(self) -> None:
        total, (moved, seconds) = self.read_bytes + self.written_bytes, self._stretch
        if total - moved >= STRETCH_BYTES and self.seconds > seconds:
            self.best_rate = max(self.best_rate, (total - moved) / (self.seconds - seconds))
            self._stretch = total, self.seconds
