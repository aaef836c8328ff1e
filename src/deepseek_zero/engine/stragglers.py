"""Names a rank on which the others wait.  Every tenth verdict (optim/sharded.py) carries each rank's own seconds.

own seconds of ten steps, by part, in the row of the verdict -> rank 0 compares them with the median -> a line where one
rank is above it three times in a row.  Seconds in which a rank waits for others are nobody's own, so a slow rank is
named and not those that stand still because of it.  Nothing ends: a busy rank is late, not lost.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from ..base.log import log_once
from ..base.meter import Meter
from ..base.quantities import format_seconds
from ..report.explain import OWN, seconds_by_part

WINDOW = 10  # steps
WINDOWS = 3  # after each other
SLOW = 1.2  # times the median
WORTH_SAYING = 0.05  # of the window's seconds


class Stragglers:
    """Compares the ranks of one engine.  meter: this rank's."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._before: tuple[float, ...] = (0.0,) * len(OWN)
        self._since = time.perf_counter()
        self._in_a_row: Counter[tuple[int, str]] = Counter()

    def words(self, step: int) -> tuple[float, ...]:
        """Return what this rank adds to the verdict of a step: its seconds of each part since it last did, or nothing.

        All ranks do so at the same steps.
        """
        if step % WINDOW:
            return ()
        parts = seconds_by_part(self._meter)
        now = tuple(parts.get(part, 0.0) for part in OWN)
        # Below zero where the meter began anew in between.
        found = tuple(max(0.0, after - before) for before, after in zip(self._before, now, strict=True))
        self._before = now
        return found

    def hear(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        """Take the words of all ranks, and name those that are slow for the third time."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        slow = {
            (rank, part): (own, middle)
            for place, part in enumerate(OWN)
            for middle in [statistics.median_low(row[place] for row in rows)]
            for rank, own in enumerate(row[place] for row in rows)
            if own > SLOW * middle and own - middle > WORTH_SAYING * seconds
        }
        self._in_a_row = Counter({each: self._in_a_row[each] + 1 for each in slow})
        for (rank, part), (own, middle) in slow.items():
            if self._in_a_row[rank, part] == WINDOWS:
                log_once(
                    f"step {step}: rank {rank} is slow, and the others wait for it: {part} took {format_seconds(own)} "
                    f"of {WINDOW} steps, {format_seconds(middle)} on the median rank, the third time in a row.",
                    logging.WARNING,
                )
