"""Memory for updates of tiles: buffers that grow, and states that come from other memories.

Checkpoints read states through the same classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..base.nested import is_subclass
from ..base.work import Work
from ..tiers.tier import COMPLETED, CopyEvent, StagedTile, Storage
from .scratch import Scratch

T = TypeVar("T")


class TileScratch(Scratch):
    """Scratch buffers that grow with tiles, and that can be freed."""

    def grow(self, fullest: Mapping[torch.device, int]) -> None:
        """Enlarge the buffers for larger tiles.

        Buffers that are too small are freed, and allocated again on their next use.

        Args:
            fullest: Elements of the largest tile by device.
        """
        for home, numel in fullest.items():
            if numel <= self.numel.get(home, 0):
                continue
            self.numel[home] = numel
            for what, device in list(self.kept):
                # The placeholder and the undo log do not depend on the size of tiles.
                if device == home and what not in ("nothing", "undo"):
                    self.budgets[home].release(self.kept.pop((what, device)).nbytes)

    def drop(self, what: str) -> None:
        """Free all buffers with this name."""
        for key in [key for key in self.kept if key[0] == what]:
            self.budgets[key[1]].release(self.kept.pop(key).nbytes)

    def is_placeholder(self, value: object) -> bool:
        """Return whether a value is a placeholder for values that are stored elsewhere."""
        if not isinstance(value, Tensor) or is_subclass(value):
            return False
        nothing = self.kept.get(("nothing", value.device))
        return nothing is not None and value.data_ptr() == nothing.data_ptr()


@dataclass(frozen=True)
class StorageRange:
    """Elements [low, high) of a state that is in another memory between updates.

    Attributes:
        storage: The storage, or a `StagedTile`, which copies a tensor of the training device to the
            host for the update, and back.
        low: The first element of the range.
        high: The end of the range.
        changes: Whether the update writes the elements.
        after: Event of the training device that must have happened before the elements are read.
    """

    storage: Storage | StagedTile
    low: int
    high: int
    changes: bool = True
    after: CopyEvent = COMPLETED

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return self.storage.itemsize

    def fetch(self) -> Work:
        """Start to fetch the elements to the device of the update.

        Returns:
            A handle. `values` may be called after its `wait()` has returned.
        """
        if isinstance(self.storage, StagedTile):
            return self.storage.fetch(self.low, self.high, self.after)
        return self.storage.fetch(self.low, self.high)

    def values(self) -> Tensor:
        """Return the fetched elements as a read-only view."""
        return self.storage.read(self.low, self.high)

    def restore(self, values: Tensor) -> None:
        """Overwrite the elements with earlier values, and store them.

        Args:
            values: The bytes of the earlier values.
        """
        self.storage.write(self.low, self.high).view(torch.uint8).copy_(values)
        self.release()

    def release(self) -> Work | None:
        """Start to store the elements if the update changed them; otherwise free the fetched copy.

        Returns:
            A handle that is complete when the elements are stored; None if there is nothing to
            store.
        """
        if self.changes:
            return self.storage.store(self.low, self.high)
        self.storage.evict(self.low, self.high)
        return None


@dataclass(frozen=True)
class PrefetchSettings:
    """Limits of a `TilePrefetcher`.

    Attributes:
        ahead: The number of tiles that are fetched while earlier ones are updated.
        behind: The number of tiles that may still be in storing while the next one is updated.
    """

    ahead: int = 2
    behind: int = 2


class TilePrefetcher(Generic[T]):
    """Fetches offloaded states before they are updated, and stores them afterwards.

    It works on tiles, which are lists of shards that are updated together.

    `next` returns a tile to update, and `release` stores it. The last stores may still be in
    progress when `next` returns None.

    Args:
        tiles: The tiles, in the order of their updates.
        touched: A function that returns the states in other memory that the update of a tile reads
            or writes.
        settings: How many tiles may be in transfer at the same time.
    """

    def __init__(
        self,
        tiles: Sequence[T],
        touched: Callable[[T], Iterable[StorageRange]],
        settings: PrefetchSettings,
    ) -> None:
        self._touched = touched
        self._settings = settings
        self._upcoming = iter(tiles)
        self._fetching: deque[tuple[T, list[Work]]] = deque()
        self._storing: deque[list[Work | None]] = deque()

    def next(self) -> T | None:
        """Return the next tile with its states fetched, or None after the last tile."""
        for later in islice(self._upcoming, self._settings.ahead + 1 - len(self._fetching)):
            self._fetching.append((later, [each.fetch() for each in self._touched(later)]))
        if not self._fetching:
            return None
        tile, fetches = self._fetching.popleft()
        for fetch in fetches:
            fetch.wait()
        return tile

    def release(self, tile: T) -> None:
        """Start to store the changed states of a tile."""
        self._storing.append([each.release() for each in self._touched(tile)])
        while len(self._storing) > self._settings.behind:
            for store in self._storing.popleft():
                if store is not None:
                    store.wait()
