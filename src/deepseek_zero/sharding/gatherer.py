"""Weights on their way in and out: walks the schedule, on demand where a model strays from it.

Every rank walks the whole schedule, entries it skips included, so the gather lane carries the same sequence everywhere.
Called by runtime.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schedule import Pass, Schedule
from .unit import Unit, UnitState


class Gatherer:
    """The gather lane of one wrapped model."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self.units, self.schedule = list(units), schedule
        self._walk: Pass | None = None
        self._cursor = 0
        self._resident_before: frozenset[int] = frozenset()

    def begin(self, walk: Pass) -> None:
        """Start a walk; the one before must have ended."""
        self._walk, self._cursor = walk, 0
        self._resident_before = frozenset(unit.number for unit in self.units if unit.state is not UnitState.AT_REST)

    def need(self, unit: Unit) -> None:
        """Have the unit's weights in use when this returns.  Collective within the gather lane."""
        walk = self._walk
        if walk is not None:
            position = walk.position.get(unit.number, -1)
            if position >= self._cursor:
                self._issue_up_to(position)
        unit.start_gather()  # not in the walk, or released since: demand
        unit.finish_gather()

    def end(self, keep: frozenset[int]) -> None:
        """Walk to the end, then put to rest what neither `keep` nor an unfinished earlier walk holds."""
        if self._walk is None:
            return
        self._issue_up_to(len(self._walk.order) - 1)
        self._walk = None
        for unit in self.units:
            if unit.number not in keep and unit.number not in self._resident_before:
                unit.release()

    def release_all(self) -> None:
        """Put every unit to rest; gathers under way are waited for."""
        self._walk = None
        for unit in self.units:
            unit.release()

    def _issue_up_to(self, position: int) -> None:
        assert self._walk is not None
        for index in range(self._cursor, position + 1):
            for number in self._walk.issue[index]:
                self.units[number].start_gather()
        self._cursor = position + 1
