"""DeepSpeed's timers in its words, on report/timers.py's: milliseconds by name, and samples per second.

Reached through the drop-in (`deepspeed.utils.timer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..base.device import allocated_bytes, default_device, synchronize
from ..base.quantities import format_bytes
from ..report.timers import Timer as Watch
from .looking import log_dist


class Timer:
    """One name of SynchronizedWallClockTimer."""

    def __init__(self, name: str, watch: Watch) -> None:
        self.name_, self._watch, self.started_ = name, watch, False

    def start(self) -> None:
        self._watch.start()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End a call.  reset: forget the calls before it."""
        if reset:
            self._watch.seconds, self._watch.calls = 0.0, 0
        self._watch.stop()
        self.started_ = False

    def reset(self) -> None:
        self._watch.reset()
        self.started_ = False

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds in all calls since the last reset."""
        found = self._watch.seconds * 1000
        if reset:
            self._watch.reset()
        return found

    def mean(self) -> float:
        """Milliseconds of a call."""
        return self._watch.mean * 1000


class SynchronizedWallClockTimer:
    """Timers by name; on a GPU each waits for the kernels queued before it."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}
        self._wait = partial(synchronize, default_device())

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name, Watch(name, self._wait)))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    @staticmethod
    def memory_usage() -> str:
        """What this process holds, in words."""
        return f"allocated {format_bytes(allocated_bytes(default_device()))}"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log milliseconds by name, on rank 0 unless `ranks` says otherwise."""
        spans = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        memory = f" | {self.memory_usage()}" if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(spans)}{memory}", ranks=list(ranks or [0]))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds by name."""
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in found if reset else ():
            self.timers[name].reset()
        return found


class NoopTimer:
    """Takes the calls of SynchronizedWallClockTimer and times nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None: ...

    def stop(self, reset: bool = False, record: bool = False) -> None: ...

    def reset(self) -> None: ...

    def elapsed(self, reset: bool = True) -> float:
        return 0.0

    def mean(self) -> float:
        return 0.0

    def has_timer(self, name: str) -> bool:
        return True

    def log(self, *args: Any, **kwargs: Any) -> None: ...


class ThroughputTimer:
    """Samples per second over global steps, from step `start_step` on."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.enabled = bool(getattr(config, "enabled", True))
        self.batch_size, self.start_step = max(1, batch_size or 1), start_step
        self.steps_per_output, self.logging = steps_per_output, logging_fn or (lambda text: log_dist(text, ranks=[0]))
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._wait, self._began = partial(synchronize, default_device()), 0.0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if self.enabled:
            self._wait()
            self._began = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step.  global_step: it ends a step, too."""
        if not self.enabled or not self._began:
            return
        self._wait()
        elapsed, self._began = time.perf_counter() - self._began, 0.0
        counts = self.global_step_count >= self.start_step
        self.total_elapsed_time += elapsed if counts else 0.0
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        every = self.steps_per_output
        if global_step and report_speed and counts and every and self.global_step_count % every == 0:
            self.logging(f"step {self.global_step_count}: {self.avg_samples_per_sec():.3g} samples/s")

    def avg_samples_per_sec(self) -> float:
        """Samples per second; -inf before the steps that count, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        if steps > 0 and self.total_elapsed_time:
            return self.batch_size * steps / self.total_elapsed_time
        return float("-inf")
