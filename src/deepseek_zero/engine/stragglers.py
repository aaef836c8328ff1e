"""Log the name of a straggler, or of a slow link between hosts.

In every seventh step, the step message (optim/step_message.py) carries the seconds that each rank
spent on its own work, by part. Rank 0 compares each part, and their sum, with the median of all
ranks. A rank that is slow three times in a row is logged. Time in which a rank waits for others is
not counted, so only the slow rank is named.

The message also carries the waiting time of each rank in each of the seven steps. The slowest rank
of a step waits least. If even that rank waits, all ranks wait for bytes between hosts. If this
takes more than half of the time, three times in a row, the link is logged.

No run is ended, because a slow rank has not failed.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.log import log_once
from ..base.mesh import Mesh
from ..base.meter import Meter
from ..base.quantities import format_seconds
from ..comm.collectives import Comm
from ..optim.step_message import Fields, StepMessage
from ..report.explain import OWN, seconds_by_part

WINDOW = 7  # steps; a new straggler is logged within 30 steps (a partial and three full windows)
WINDOWS = 3  # slow windows in a row before a line is logged
SLOW = 1.2  # multiple of the median
# Share of the window's seconds. A threshold of 5 % gives false positives from unrelated load
# (docs/design/failure-detection.md)
WORTH_SAYING = 0.1
MOSTLY = 0.5  # share of the window's seconds
# Fields of the step message
OWN_SECONDS = "own seconds"
WAITS = "seconds of waiting"
# The sum of all parts: a rank that shares its core is slow in different parts at different times
ALL = "its own work"


@dataclass
class Stragglers:
    """Finds ranks, or a link between hosts, that slow down the steps of one engine.

    Attributes:
        meter: Measures the time that this rank spends on each part of a step.
        hosts: The names of the hosts.
        link: The line about the link between hosts, while steps wait for it.
    """

    meter: Meter
    hosts: Sequence[str]
    link: str = ""
    # In total, and in each step of this window
    _waited: float = 0.0
    _waits: list[float] = field(default_factory=lambda: [0.0] * WINDOW)
    _windows_on_the_link: int = 0
    _before: list[float] = field(default_factory=lambda: [0.0] * len(OWN))
    _since: float = field(default_factory=lambda: time.perf_counter())
    _in_a_row: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add_to(self, message: StepMessage, step: int) -> None:
        """Add this rank's timings to the step message of every seventh step.

        The timings are the seconds of each part since the last such step, and the waiting time in
        each step of the window. Call it once in each step.

        Args:
            message: The fields that this rank sends with the norm of the gradients.
            step: The number of the step.
        """
        waited = sum(self.meter.wait_seconds.values())
        self._waits[(step - 1) % WINDOW] = max(0.0, waited - self._waited)
        self._waited = waited
        if step % WINDOW:
            return
        parts = seconds_by_part(self.meter)
        now = [parts.get(part, 0.0) for part in OWN]
        # Negative if the meter was reset in between.
        message.add(
            OWN_SECONDS,
            [max(0.0, after - before) for before, after in zip(self._before, now, strict=True)],
        )
        message.add(WAITS, self._waits)
        self._before = now
        self._waits = [0.0] * WINDOW

    def compare(self, step: int, fields: Fields) -> None:
        """Log the ranks, or the link between hosts, that are slow for the third consecutive time.

        Args:
            step: The number of the step.
            fields: The fields that all ranks sent with the norm of the gradients.
        """
        if OWN_SECONDS not in fields:
            return
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        by_rank = fields[OWN_SECONDS]
        columns = {part: [own[place] for own in by_rank] for place, part in enumerate(OWN)}
        columns[ALL] = [sum(own) for own in by_rank]
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
        together = sum(min(waits) for waits in zip(*fields[WAITS], strict=True))
        self._windows_on_the_link = (
            self._windows_on_the_link + 1 if together > MOSTLY * seconds else 0
        )
        self.link = ""
        if self._windows_on_the_link >= WINDOWS:
            self.link = (
                f"steps wait for the link between {' and '.join(self.hosts)}: all ranks waited at "
                f"once for {together / seconds:.0%} of the time of {WINDOW} steps"
            )
        if self._windows_on_the_link == WINDOWS:
            log_once(f"step {step}: {self.link}, the third time in a row.", logging.WARNING)


def stragglers_of(mesh: Mesh, comm: Comm) -> Stragglers | None:
    """Return the `Stragglers` of an engine, or None if its ranks cannot be compared.

    Only ranks that have all layers and all tokens compute the same amount. On a GPU, the host runs
    ahead of the device, so its times have no meaning.

    Args:
        mesh: The device mesh: the size of each axis and this rank's coordinates.
        comm: The communicator of the ranks that call this function.

    Returns:
        The object that compares the step times of ranks, or None.
    """
    if mesh.device.type != "cpu" or not mesh.pp == mesh.tp == mesh.sp == 1:
        return None
    if comm.hosts.is_one:
        return None
    return Stragglers(comm.meter, list(dict.fromkeys(comm.hosts.names)))
