"""Progress of operations that can take minutes, such as building an engine.

Only rank 0 shows it, and only if the operation takes longer than `QUIET_SECONDS`: on a terminal as
one line that is rewritten, elsewhere as a log line every `LOG_SECONDS`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from .log import logger
from .quantities import format_bytes, format_count, format_seconds
from .world import is_rank_zero

QUIET_SECONDS = 2.0
LOG_SECONDS = 10.0
REWRITE_SECONDS = 0.25
UNITS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "parameters": lambda count: f"{format_count(count)} parameters",
}


class LongWork:
    """Report the progress of one operation: amount, percentage, rate and remaining time.

    Args:
        what: The name of the operation in the log.
        total: The amount of work.
        unit: The unit of `total`, "bytes" or "parameters".

    Example:
        >>> with LongWork("writing weights", total=8_000_000_000) as work:
        ...     for block in blocks:
        ...         write(block)
        ...         work.advance(block.nbytes)
    """

    def __init__(self, what: str, total: int, unit: str = "bytes") -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._format = UNITS[unit]
        self._began = time.monotonic()
        self._next = self._began + QUIET_SECONDS
        self._shown = 0  # the value of `done` in the last line
        self._is_rewritten = False

    def __enter__(self) -> LongWork:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def advance(self, amount: int) -> None:
        """Add to the completed amount. Costs one clock reading unless a line is due."""
        self.done += amount
        now = time.monotonic()
        if now >= self._next:
            self._show(now)

    def finish(self) -> None:
        """Report the final amount if any progress was reported.

        A second call has no effect.
        """
        if self._shown and self._shown != self.done:
            self._show(time.monotonic())
        if self._is_rewritten:
            self._is_rewritten = False
            with suppress(OSError, ValueError):  # the terminal is gone
                sys.stderr.write("\n")

    def _show(self, now: float) -> None:
        is_terminal = _is_plain_terminal()
        self._next = now + (REWRITE_SECONDS if is_terminal else LOG_SECONDS)
        self._shown = self.done
        if not is_rank_zero() or not logger.isEnabledFor(logging.INFO):
            return
        line = self._line(now - self._began)
        if not is_terminal:
            logger.info(line)
            return
        with suppress(OSError, ValueError):  # the terminal is gone
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()
            self._is_rewritten = True

    def _line(self, seconds: float) -> str:
        rate = self.done / seconds
        parts = [f"{self.what}: {self._format(self.done)} of {self._format(self.total)}"]
        if self.total:
            parts[0] += f" ({min(self.done / self.total, 1.0):.0%})"
        parts.append(f"{self._format(rate)}/s")
        if self.done < self.total and rate:
            parts.append(f"{format_seconds((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{format_seconds(seconds)} in all")
        return ", ".join(parts)


class FirstWork:
    """Report the progress of an operation only the first time that it runs.

    Args:
        what: The name of the operation in the log.
        total: The amount of work of the first run.
        unit: The unit of `total`, "bytes" or "parameters".
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._work: LongWork | None = None

    def begin(self) -> None:
        """Begin a part of the work."""
        if self._work is None:
            self._work = LongWork(self._what, self._total, self._unit)

    def advance(self, amount: int) -> None:
        """Add to the completed amount of the first run, after `begin`."""
        work = self._work
        if work is not None and work.done < work.total:
            work.advance(amount)
            if work.done >= work.total:
                work.finish()


class FirstPasses:
    """Report the progress of the first pass of each name, which may be slow.

    Args:
        total: The parameters that a pass uses.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._names: set[str] = set()
        self._work: LongWork | None = None

    def begin(self, name: str) -> None:
        """End the previous pass and begin one, which is reported if it is the first of its name."""
        self.finish()
        if name not in self._names:
            self._names.add(name)
            self._work = LongWork(f"first {name} pass", self._total, "parameters")

    def advance(self, numel: int) -> None:
        """Add a number of parameters to the progress of a first pass."""
        if self._work is not None:
            self._work.advance(numel)

    def finish(self) -> None:
        """End the current pass, if there is one, and report its progress."""
        if self._work is not None:
            self._work.finish()
            self._work = None


def _is_plain_terminal() -> bool:
    """Return whether stderr is a terminal that no progress bar has replaced."""
    stream = sys.stderr
    if stream is not sys.__stderr__ or stream is None:
        return False
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False
