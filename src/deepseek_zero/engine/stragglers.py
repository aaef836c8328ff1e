"""Names a rank or a link on which the others wait, by the seconds of each in every seventh verdict
(optim/sharded.py).

own seconds of seven steps, by part, in the row of the verdict -> rank 0 compares each part, and all
together, with the median -> a line where one rank is above it three times in a row.  Seconds in
which a rank waits for others are nobody's own, so a slow rank is named and not those that stand
still because of it.

The row also says how long the rank waited in each of the seven steps.  Whoever is late in a step
waits least in it: what even that rank waited, all of them waited at once, and then not for a rank
but for bytes on their way between hosts.  Where that is more than half of the steps' time, three
times in a row, the link is named.

Nothing ends: a busy rank is late, not lost.
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

WINDOW = 7  # steps: three windows, and the rest of the one in which it begins, are within thirty
WINDOWS = 3  # after each other
SLOW = 1.2  # times the median
WORTH_SAYING = (
    0.1  # of the window's seconds; with a twentieth, what else runs on a core names somebody (0105)
)
MOSTLY = 0.5  # of the window's seconds
ALL = "all that it does itself"  # who has a part of a core is slow now in one part, now in another


class Stragglers:
    """Compares the ranks of one engine.  meter: this rank's. hosts: their names."""

    def __init__(self, meter: Meter, hosts: Sequence[str]) -> None:
        self._meter = meter
        self._hosts = hosts
        # in all, and in each step of this window
        self._waited = 0.0
        self._waits = [0.0] * WINDOW
        self._windows_on_the_link = 0
        self.link = ""  # what is to say of the link, as long as steps wait for it
        self._before: tuple[float, ...] = (0.0,) * len(OWN)
        self._since = time.perf_counter()
        self._in_a_row: Counter[tuple[int, str]] = Counter()

    def words(self, step: int) -> tuple[float, ...]:
        """Return what this rank adds to the verdict of a step: its seconds of each part since it
        last did, and those in which it waited, by step; or nothing.

        All ranks do so at the same steps. Called once for each step.
        """
        waited = sum(self._meter.wait_seconds.values())
        self._waits[(step - 1) % WINDOW], self._waited = max(0.0, waited - self._waited), waited
        if step % WINDOW:
            return ()
        parts = seconds_by_part(self._meter)
        now = tuple(parts.get(part, 0.0) for part in OWN)
        # Below zero where the meter began anew in between.
        found = tuple(
            max(0.0, after - before) for before, after in zip(self._before, now, strict=True)
        )
        self._before, waits, self._waits = now, self._waits, [0.0] * WINDOW
        return (*found, *waits)

    def hear(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        """Take the words of all ranks, and name those that are slow for the third time, or the
        link.
        """
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        columns = {part: [row[place] for row in rows] for place, part in enumerate(OWN)}
        columns[ALL] = [sum(row[: len(OWN)]) for row in rows]
        slow = {
            (rank, part): (own, middle)
            for part, column in columns.items()
            for middle in [statistics.median_low(column)]
            for rank, own in enumerate(column)
            if own > SLOW * middle and own - middle > WORTH_SAYING * seconds
        }
        self._in_a_row = Counter({each: self._in_a_row[each] + 1 for each in slow})
        in_a_part = {
            rank for rank, part in slow if part != ALL and self._in_a_row[rank, part] >= WINDOWS
        }
        for (rank, part), (own, middle) in slow.items():
            if self._in_a_row[rank, part] == WINDOWS and not (part == ALL and rank in in_a_part):
                log_once(
                    f"step {step}: rank {rank} is slow, and the others wait for it: {part} took "
                    f"{format_seconds(own)} of {WINDOW} steps, {format_seconds(middle)} on the "
                    "median rank, the third time in a row.",
                    logging.WARNING,
                )
        together = sum(min(row[len(OWN) + each] for row in rows) for each in range(WINDOW))
        self._windows_on_the_link = (
            self._windows_on_the_link + 1 if together > MOSTLY * seconds else 0
        )
        self.link = ""
        if self._windows_on_the_link >= WINDOWS:
            self.link = (
                f"steps wait for the link between {' and '.join(self._hosts)}: all ranks waited at "
                f"once for {together / seconds:.0%} of the time of {WINDOW} steps"
            )
        if self._windows_on_the_link == WINDOWS:
            log_once(f"step {step}: {self.link}, the third time in a row.", logging.WARNING)
