"""Memory that every rank of a host sees: gathering what lies in it moves nothing."""

from __future__ import annotations

import torch

from .ids import CollectiveId
from .lanes import Lanes
from .pending import DONE, Pending
from .transports.base import SymmetricMemory, Wait


class InPlaceGathers:
    """The symmetric memory of one group of ranks, and gathers in it."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._size = len(lanes.ranks)
        self._barrier: Pending | None = None  # between `begin` and `end`, the barrier at the start

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> SymmetricMemory | None:
        """Return memory for `numel` elements, a slice for each rank, of which every rank sees all;
        None if there is none.

        Collective within "gather".
        """
        pages = self._lanes.transport.page_sharing
        if self._size == 1:
            own = self._lanes.transport.empty(numel, dtype).zero_()
            return SymmetricMemory(own, own)
        if pages is None or not numel:
            return None
        found: list[SymmetricMemory] = []

        def start(cid: CollectiveId) -> Wait:
            wait = pages.symmetric_memory(numel, dtype, cid)
            return lambda: found.append(wait())

        self._lanes.issue("gather", f"pages of {what}", start).wait()
        return found[0]

    def begin(self, what: str) -> None:
        """Announce that this rank has written its slices.

        Until `end`, `gather` waits only until every rank has announced it. Collective within
        "gather"; does not wait.
        """
        pages = self._lanes.transport.page_sharing
        if pages is not None:
            self._barrier = self._lanes.issue("gather", f"begin {what}", pages.barrier)

    def end(self) -> None:
        """Allow slices to be written again: each `gather` is a collective of its own from now
        on.
        """
        self._barrier = None

    def gather(self, memory: SymmetricMemory, what: str) -> Pending:
        """Gather what lies in symmetric memory: wait for the ranks that write their slices.

        Counts the bytes that another transport would send. Collective within "gather".
        """
        if self._size == 1:
            return DONE
        full = memory.whole
        pages = self._lanes.transport.page_sharing
        nbytes = full.numel() // self._size * (self._size - 1) * full.element_size()
        self._lanes.meter.count("all_gather", nbytes)
        if self._barrier is not None:
            return self._barrier
        assert pages is not None
        return self._lanes.issue("gather", f"gather {what}", pages.barrier)
