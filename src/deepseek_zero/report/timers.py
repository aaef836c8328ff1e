"""Measure phases of a step with named timers, for `wall_clock_breakdown`.

On a GPU, a timer waits for queued kernels at its start and end. This prevents overlap, so timers
are off by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ..base.device import CPU, synchronize
from ..base.errors import UsageError
from ..base.quantities import format_seconds

NAMES = ("forward", "backward", "reduce", "step")


@dataclass
class Timer:
    """Seconds between `start` and `stop`, summed over the calls since the last reset."""

    name: str
    wait: Callable[[], None]
    seconds: float = 0.0
    calls: int = 0
    _started: float | None = None

    def start(self) -> None:
        """Start a call; an earlier call that did not stop is discarded."""
        self.wait()
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Stop the call and return its seconds.

        Raises:
            UsageError: The timer was not started.
        """
        if self._started is None:
            raise UsageError(
                f"timer {self.name!r} was stopped before it was started.", fix="call start() first."
            )
        self.wait()
        elapsed = time.perf_counter() - self._started
        self._started = None
        self.seconds += elapsed
        self.calls += 1
        return elapsed

    @property
    def mean(self) -> float:
        """Return the mean seconds per call; 0 before the first call."""
        return self.seconds / self.calls if self.calls else 0.0

    def reset(self) -> None:
        """Discard all calls."""
        self.seconds = 0.0
        self.calls = 0
        self._started = None


class Timers:
    """The timers of one engine, in the order of NAMES, then of first use."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._wait = partial(synchronize, device or CPU)
        self._timers = {name: Timer(name, self._wait) for name in NAMES}

    def __getitem__(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer(name, self._wait))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a block; a block that raises is not counted."""
        timer = self[name]
        timer.start()
        yield
        timer.stop()

    def means(self) -> Mapping[str, float]:
        """Return the mean seconds per call of each timer used since the last reset."""
        return {name: timer.mean for name, timer in self._timers.items() if timer.calls}

    def report(self, *, reset: bool = True) -> str:
        """Return one line such as "mean time: forward 12.3 ms | backward 25.1 ms | ..."."""
        means = self.means()
        if reset:
            self.reset()
        spans = " | ".join(f"{name} {format_seconds(seconds)}" for name, seconds in means.items())
        return f"mean time: {spans or 'nothing timed yet'}"

    def reset(self) -> None:
        """Discard all calls of all timers."""
        for timer in self._timers.values():
            timer.reset()
