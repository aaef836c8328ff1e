"""The numbers that gloo's messages carry: 31 bits, in which no two collectives under way are alike.

A collective is its lane and its place in that lane.  Sockets between near ranks carry both in full (`CollectiveId.tag`).  A tag
of torch's gloo is one positive int32, so an engine gets one of 63 slots while it lives, and places wrap around: a lane
has fewer collectives under way than places.  The bits that are left check the name, so that a rank that strayed finds
no partner, but for one chance in 8192 (docs/decisions/0053).
"""

from __future__ import annotations

import threading
from collections import Counter

from ..base.errors import UsageError
from . import transports
from .marks import LANES, WORLD_LANE, CollectiveId, engine_of, lane_of

SLOT_BITS, LANE_BITS, PLACE_BITS, CHECK_BITS = 6, 2, 10, 13  # 31 in all
SLOTS, WINDOW = 1 << SLOT_BITS, 1 << PLACE_BITS


class Tags:
    """Of one world; thread-safe, since gloo's waiting threads say what is over."""

    def __init__(self) -> None:
        self._slots = {WORLD_LANE: 0}
        self._left: set[str] = set()  # engines that have ended
        self._under_way: Counter[str] = Counter()  # by lane
        self._changed = threading.Condition()

    def free_slots(self) -> int:
        """As bits, slot 1 first: the slots in which this rank has nothing under way, and no engine."""
        with self._changed:
            for engine in [engine for engine in self._left if not self._is_busy(engine)]:
                self._left.discard(engine)
                self._slots.pop(engine, None)
            taken = set(self._slots.values())
        return sum(1 << slot - 1 for slot in range(1, SLOTS) if slot not in taken)

    def take(self, engine: str, free: int) -> None:
        """Give an engine the lowest slot that is free on every rank.  free: what all ranks' `free_slots` share."""
        if not free:
            raise UsageError(
                f"a world has room for {SLOTS - 1} engines, and they are alive or ended in the midst of a collective.",
                "Each needs numbers of its own for its messages.",
                "drop engines that are no longer used (`del engine`), or start the program again after such failures.",
            )
        with self._changed:
            self._slots[engine] = (free & -free).bit_length()

    def release(self, engine: str) -> None:
        """An engine is gone; its slot is free as soon as nothing of it is under way."""
        with self._changed:
            self._left.add(engine)

    def begin(self, mark: CollectiveId) -> int:
        """The tag of a collective that begins; TimeoutError after a while in which its lane had no room."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._under_way[mark.lane] < WINDOW, transports.POLL_SECONDS):
                raise TimeoutError
            self._under_way[mark.lane] += 1
            slot = self._slots[engine_of(mark.lane)]
        place = mark.sequence % WINDOW
        lane = slot << LANE_BITS | LANES.index(lane_of(mark.lane))
        return (lane << PLACE_BITS | place) << CHECK_BITS | mark.check % (1 << CHECK_BITS)

    def end(self, lane: str) -> None:
        """One of a lane's collectives is over on this rank: all it had to send and to receive."""
        with self._changed:
            self._under_way[lane] -= 1
            self._changed.notify_all()

    def _is_busy(self, engine: str) -> bool:
        return any(count for lane, count in self._under_way.items() if engine_of(lane) == engine)
