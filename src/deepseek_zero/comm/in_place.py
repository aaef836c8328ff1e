"""All-gathers in memory that every rank of a host maps, which copy nothing."""

from __future__ import annotations

import torch

from .ids import CollectiveId
from .lanes import Lanes
from .pending import DONE, Pending
from .transports.base import SymmetricMemory, Wait


class InPlaceGathers:
    """All-gathers in the symmetric memory of one group of ranks."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._size = len(lanes.ranks)
        self._barrier: Pending | None = None  # The barrier of `begin`, until `end`

    def allocate(self, numel: int, dtype: torch.dtype, what: str) -> SymmetricMemory | None:
        """Allocate memory with one slice per rank, which every rank maps (symmetric memory).

        Args:
            numel: Number of elements of all slices together.
            dtype: Dtype of the elements.
            what: The name of the memory, the same on all ranks.

        Returns:
            The memory, or None if the transport has no shared memory or `numel` is 0.

        Note:
            Collective: every rank of the group must call it.
        """
        transport = self._lanes.transport
        if self._size == 1:
            own = transport.empty(numel, dtype).zero_()
            return SymmetricMemory(own, own)
        if not transport.shares_pages or not numel:
            return None
        found: list[SymmetricMemory] = []

        def start(cid: CollectiveId) -> Wait:
            wait = transport.symmetric_memory(numel, dtype, cid)
            return lambda: found.append(wait())

        self._lanes.issue("gather", f"pages of {what}", start).wait()
        return found[0]

    def begin(self, what: str) -> None:
        """Announce that this rank has written its slices.

        Until `end`, `gather` waits only until every rank has announced it. The call does not wait.

        Args:
            what: The name of the announcement, the same on all ranks.

        Note:
            Collective: every rank of the group must call it.
        """
        transport = self._lanes.transport
        if transport.shares_pages:
            self._barrier = self._lanes.issue("gather", f"begin {what}", transport.barrier)

    def end(self) -> None:
        """Allow slices to be written again.

        From now on, each `gather` issues a collective.
        """
        self._barrier = None

    def gather(self, memory: SymmetricMemory, what: str) -> Pending:
        """Wait until every rank has written its slice of the memory.

        The meter counts the bytes that another transport would send.

        Args:
            memory: The memory to gather.
            what: The name of the memory, the same on all ranks.

        Returns:
            A handle; all slices may be read after its `wait()`.

        Note:
            Collective: every rank of the group must call it.
        """
        if self._size == 1:
            return DONE
        nbytes = memory.whole.nbytes // self._size * (self._size - 1)
        self._lanes.meter.count("all_gather", nbytes)
        if self._barrier is not None:
            return self._barrier
        return self._lanes.issue("gather", f"gather {what}", self._lanes.transport.barrier)
