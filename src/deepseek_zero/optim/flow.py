"""Tiles on their way to and from the memories their states rest in: the next ones come while one is updated, the last
ones leave behind it.

Called by sharded.py, which says what a tile touches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from ..tiers.tier import Extent, Ticket

T = TypeVar("T")


@dataclass(frozen=True)
class Stretch:
    """Elements [low, high) of one state.  changes: the update writes them."""

    extent: Extent
    low: int
    high: int
    changes: bool = True

    def fetch(self) -> Ticket:
        return self.extent.fetch(self.low, self.high)

    def leave(self) -> Ticket | None:
        if self.changes:
            return self.extent.store(self.low, self.high)
        self.extent.drop(self.low, self.high)
        return None


@dataclass(frozen=True)
class FlowSettings:
    """ahead: tiles that are fetched before their turn.  behind: tiles that may still be leaving when the next is
    updated.
    """

    ahead: int = 2
    behind: int = 2


def flow(tiles: Sequence[T], touched: Callable[[T], Iterable[Stretch]], settings: FlowSettings) -> Iterator[T]:
    """The tiles in turn, each with its states in place.  What the last ones changed may leave after the end."""
    upcoming, coming = iter(tiles), deque[list[Ticket]]()
    going = deque[list[Ticket | None]]()
    for tile in tiles:
        for early in islice(upcoming, settings.ahead + 1 - len(coming)):
            coming.append([stretch.fetch() for stretch in touched(early)])
        for ticket in coming.popleft():
            ticket.wait()
        yield tile
        going.append([stretch.leave() for stretch in touched(tile)])
        while len(going) > settings.behind:
            for left in going.popleft():
                if left is not None:
                    left.wait()
