"""Refuse further steps after an update that failed when some states had been updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from ..base.errors import UsageError
from .master_shard import Tile


class UpdateGuard:
    """Records whether an update failed after it had changed some states.

    Attributes:
        is_busy: Whether the update of a tile is in progress.
        ended_halfway: Whether an update failed when some states had been updated.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self.ended_halfway = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Return a context for the update of one tile."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def record_failure(self, tiles: Sequence[Tile], done: int) -> None:
        """Record that the update of tiles failed.

        If the first tile fails, split main weights are unchanged. Those that are updated in place
        may have changed.

        Args:
            tiles: The tiles of the update.
            done: The number of tiles that were updated.
        """
        in_place = any(
            shard.has_kernel or shard.master.is_updated_in_place
            for _, shard in chain.from_iterable(tiles)
        )
        self.ended_halfway = done > 0 or in_place

    def refuse_mixture(self) -> None:
        """Raise `UsageError` if an earlier update failed after it had updated some states."""
        if self.ended_halfway and not self.is_busy:
            raise UsageError(
                "an earlier step ended with an error while states were being updated.",
                "Some have taken that step and some have not, so going on would compute with a "
                "mixture.",
                "load the last checkpoint into a new engine.",
            )
