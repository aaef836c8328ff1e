"""Issue the collectives of one group of ranks in the order of their lanes."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..base.meter import Event, Meter
from .context import Lane, WorldContext
from .ids import CollectiveId, lane_number
from .pending import DONE, Pending
from .transports.base import Transport, Wait
from .waits import IssuedCollective, Waits


@dataclass
class Lanes:
    """Issue the collectives of one group of ranks in a fixed order per lane.

    Attributes:
        world: The connections of this rank; None for a group of one rank, which sends nothing.
        transport: The transport of the group's tensors.
        ranks: The group's members as world ranks.
        waits: Ends waits with data or with an error.
        meter: Counts the seconds of waits.
        name: The name of the group, a prefix of the names of its lanes.
        number: The number of the group, the same on all ranks.
        last: The collective that was issued last.
    """

    world: WorldContext | None
    transport: Transport
    ranks: tuple[int, ...]
    waits: Waits
    meter: Meter
    name: str = "engine"
    number: int = 0
    last: IssuedCollective | None = None
    _lanes: dict[str, Lane] = field(default_factory=dict)  # By kind: "gather", "reduce" or "rows"

    def issue(self, kind: str, what: str, start: Callable[[CollectiveId], Wait]) -> Pending:
        """Issue a collective in the lane of that kind.

        Args:
            kind: "gather", "reduce" or "rows".
            what: The name of the collective, the same on all ranks.
            start: Passes the collective to a transport, and returns a function that waits for it.

        Returns:
            A handle whose `wait()` returns when the data may be used.

        Note:
            Collective: all ranks of the group must issue it in the same order within the lane.
        """
        world = self.world
        if world is None:  # Every slice is already here
            return DONE
        # A wait that ended in an error left its line for the other ranks
        if world.recorder.is_waiting:
            world.recorder.withdraw("waiting")
        lane = self._lanes.get(kind)
        if lane is None:
            lane = world.lane(f"{self.name}/{kind}", lane_number(self.number, kind))
            self._lanes[kind] = lane
        issued = IssuedCollective(lane, kind, lane.issued, what, self.ranks, time.perf_counter())
        self.last = issued
        lane.log.append((lane.issued, what))
        lane.issued += 1
        cid = CollectiveId(
            lane.name,
            lane.number,
            issued.sequence,
            zlib.crc32(what.encode()),
            issued.arrived,
            self.waits.poll_interval,
        )
        wait = self.waits.wait_or_raise(world, self.transport, issued, lambda: start(cid))
        is_here = None
        if self.transport.reports_arrival:
            is_here = functools.partial(bool, issued.arrived)
        return Pending(lambda: self._wait(world, wait, issued), is_here=is_here)

    def wait_again(self, wait: Wait) -> None:
        """Wait until other ranks have finished with the buffers of the last collective."""
        if self.world is not None and self.last is not None:
            self._wait(self.world, wait, replace(self.last, arrived=[]))

    def _wait(self, world: WorldContext, wait: Wait, issued: IssuedCollective) -> None:
        began = time.perf_counter()
        summed = self.meter.sum_seconds
        self.waits.wait_or_raise(world, self.transport, issued, wait)
        ended = time.perf_counter()
        self.meter.waited(issued.kind, ended - began - (self.meter.sum_seconds - summed))
        if self.meter.events is not None and issued.arrived:
            self.meter.events.append(
                Event(issued.kind, issued.what, issued.issued, issued.arrived[0], (began, ended))
            )
        if world.recorder.is_waiting:
            world.recorder.withdraw("waiting")
        # Log the recovery now: no later wait may be long enough to check
        if world.recorder.logged_silent:
            world.recorder.log_silences()
