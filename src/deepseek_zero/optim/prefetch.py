"""Fetches the states of the next tiles while one is updated, and stores those of the last ones behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from ..tiers.copy_engine import StagedTile
from ..tiers.tier import Extent, Work

T = TypeVar("T")


@dataclass(frozen=True)
class ExtentRange:
    """Elements [low, high) of one state.  changes: the update writes them."""

    extent: Extent
    low: int
    high: int
    changes: bool = True

    def fetch(self) -> Work:
        return self.extent.fetch(self.low, self.high)

    def release(self) -> Work | None:
        if self.changes:
            return self.extent.store(self.low, self.high)
        self.extent.evict(self.low, self.high)
        return None


@dataclass(frozen=True)
class StagedRange:
    """Elements [low, high) of a weight that the training device has and the host updates."""

    mirror: StagedTile
    low: int
    high: int

    def fetch(self) -> Work:
        return self.mirror.fetch(self.low, self.high)

    def release(self) -> Work:
        return self.mirror.store(self.low, self.high)


StagedState = ExtentRange | StagedRange  # what comes before a tile's turn, and leaves behind it


@dataclass(frozen=True)
class PrefetchSettings:
    """ahead: tiles that are fetched before their turn. behind: tiles that may still be stored when the next is
    updated.
    """

    ahead: int = 2
    behind: int = 2


class TilePrefetcher(Generic[T]):
    """Yields tiles in order, each with its states in place: `next` returns one to update, `release` stores it.

    Stores of the last tiles may still be under way after the end.
    """

    def __init__(
        self, tiles: Sequence[T], touched: Callable[[T], Iterable[StagedState]], settings: PrefetchSettings
    ) -> None:
        self._touched, self._settings = touched, settings
        self._upcoming = iter(tiles)
        self._coming: deque[tuple[T, list[Work]]] = deque()
        self._going: deque[list[Work | None]] = deque()

    def next(self) -> T | None:
        """Return the next tile with its states fetched; None after the last."""
        for early in islice(self._upcoming, self._settings.ahead + 1 - len(self._coming)):
            self._coming.append((early, [stretch.fetch() for stretch in self._touched(early)]))
        if not self._coming:
            return None
        tile, tickets = self._coming.popleft()
        for ticket in tickets:
            ticket.wait()
        return tile

    def release(self, tile: T) -> None:
        """Store what the update of a tile has changed."""
        self._going.append([stretch.release() for stretch in self._touched(tile)])
        while len(self._going) > self._settings.behind:
            for left in self._going.popleft():
                if left is not None:
                    left.wait()
