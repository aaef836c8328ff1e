"""Page-locked host memory for tensors of an accelerator that the host updates."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.memory import LOCK_BYTES, private_pages
from ..base.quantities import rounded_up
from ..base.work import Work

ALIGNMENT = 256  # bytes; the ring is divided at multiples of it


@dataclass(eq=False)
class _UsedRange:
    """Bytes [start, stop) of the ring that are in use.

    Attributes:
        start: The first byte.
        stop: The end of the bytes.
        copy_event: The last copy from or to the range; None before `StagingRing.give`.
    """

    start: int
    stop: int
    copy_event: Work | None = None


class StagingRing:
    """A ring buffer for ranges that are released in about the order of their allocation.

    A released range can be reused when its last copy is complete. If the ring is full, `take` waits
    for the oldest copy. Requests that do not fit get spare memory outside the ring.
    """

    def __init__(self, *, is_locked: bool) -> None:
        self._is_locked = is_locked
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used: deque[_UsedRange] = deque()
        self._taken: dict[int, _UsedRange] = {}  # by address
        self._spare: dict[int, deque[tuple[Work, Tensor]]] = defaultdict(deque)  # by size
        weakref.finalize(self, _wait_for_all, self._used, self._spare).atexit = False

    @property
    def nbytes(self) -> int:
        """Return the size of the ring in bytes."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Enlarge the ring to at least this size, up to `LOCK_BYTES`.

        This waits for copies in progress, and must be called between updates only.

        Args:
            nbytes: Size in bytes.
        """
        nbytes = min(nbytes, LOCK_BYTES)
        if nbytes <= self.nbytes:
            return
        _wait_for_all(self._used, self._spare)
        self._used.clear()
        self._taken.clear()
        self._memory = private_pages(nbytes, torch.uint8, locked=self._is_locked)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor, valid until `give`.

        Args:
            numel: Number of elements.
            dtype: Data type.
        """
        nbytes = numel * dtype.itemsize
        size = rounded_up(nbytes, ALIGNMENT)
        while (start := self._place_for(size)) is None:
            oldest = self._used[0].copy_event if self._used else None
            if oldest is None:
                return self._spare_buffer(size)[:nbytes].view(dtype)
            oldest.wait()
            self._used.popleft()
        room = _UsedRange(start, start + size)
        self._used.append(room)
        found = self._memory[start : start + nbytes].view(dtype)
        self._taken[found.data_ptr()] = room
        return found

    def give(self, room: Tensor, copy_event: Work) -> None:
        """Release memory that `take` has returned.

        Args:
            room: Tensor that `take` returned.
            copy_event: The memory can be reused when this copy is complete.
        """
        known = self._taken.pop(room.data_ptr(), None)
        if known is not None:
            known.copy_event = copy_event
            return
        size = rounded_up(room.nbytes, ALIGNMENT)
        whole = torch.as_strided(room.view(torch.uint8), (size,), (1,))
        self._spare[size].append((copy_event, whole))

    def _spare_buffer(self, size: int) -> Tensor:
        if not self._spare[size]:
            return private_pages(size, torch.uint8, locked=self._is_locked)
        copy_event, room = self._spare[size].popleft()
        copy_event.wait()
        return room

    def _place_for(self, size: int) -> int | None:
        """Return the offset of a free range of this size, or None if there is none now."""
        while self._used and (done := self._used[0].copy_event) is not None and done.is_done():
            self._used.popleft()
        if not self._used:
            return 0 if size <= self.nbytes else None
        first = self._used[0].start
        last = self._used[-1].stop
        if self._used[-1].start < first:  # the newest ranges have wrapped around
            return last if last + size <= first else None
        if last + size <= self.nbytes:
            return last
        return 0 if size <= first else None


def _wait_for_all(
    rooms: Iterable[_UsedRange], spare: Mapping[int, Iterable[tuple[Work, Tensor]]]
) -> None:
    """Wait for every copy in progress, because memory must not be freed before."""
    copies = [room.copy_event for room in rooms]
    copies += [copy_event for given in spare.values() for copy_event, _ in given]
    for copy_event in copies:
        if copy_event is not None:
            copy_event.wait()
