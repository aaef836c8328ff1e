"""Where the inputs of checkpoints wait for backward: one slab of a memory, instead of storages all over the heap.

Forward parks in one order, backward takes in the other, so the slab is a stack; first fit makes any other order right
too.  Its size is given, or learned: what the first forward needs is reserved piece by piece, and as one slab as soon as
nothing is parked.  On a disk the newest checkpoint stays (backward begins with it), the ones before it are written
while later ones compute, and the next ones backward wants are read while it recomputes one.  Whoever holds an
`OffloadHandle` may restore as often as it likes; its block is free when it is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from torch import Tensor

from ..base.device import backward_id, queue_backward_callback
from ..base.memory import PAGE, trim_heap
from ..base.quantities import format_bytes
from ..comm.context import ranks_of_this_host
from ..tiers.tier import Memory, Work
from .form import TensorMeta
from .passage import ALIGNMENT, ActivationCopy, OffloadedInputs, rounded
from .slab import Arena, ArenaBlock

CHUNKS = 16  # that the largest checkpoint's inputs are moved in: work for all threads of a disk, little to round up
AHEAD = 2  # checkpoints that are read before backward asks for them
BEHIND = 2  # checkpoints that may be on their way to the disk
HOLES_BYTES = 64 << 20  # of parked and taken tensors, after which the heap's holes are given back


class ActivationOffload:
    """The parked inputs of one process.  checkpoints: how many to reserve at first; None: learned.

    open_memory: makes the memory, again whenever the slab gets another size, so that nothing of the old one is kept.
    """

    def __init__(self, open_memory: Callable[[], Memory], checkpoints: int | None = None) -> None:
        self._open, self.checkpoints = open_memory, checkpoints
        self.memory = open_memory()
        self.slabs: list[Arena] = []
        self.used_bytes = self.peak_bytes = 0
        self._stays: dict[int, OffloadedInputs] = {}  # in the order they came
        self._dropped: deque[int] = deque()  # filled by finalizers, which may run anywhere and so do nothing else
        self._leaving: deque[Work] = deque()
        self._arrived = self._holes_bytes = 0
        self._chunk_bytes = self._largest_bytes = 0
        self._backward = -1  # the last one that will end with a sweep
        self._passage = ActivationCopy()

    @property
    def reserved_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def unused_bytes(self) -> int:
        """What is reserved and was never needed at the same time."""
        return self.reserved_bytes - self.peak_bytes

    def offload(self, tensors: Sequence[Tensor]) -> OffloadHandle:
        """Copy the inputs of one checkpoint; `take` gives them back."""
        self.sweep()
        self._store_newest()
        forms = [TensorMeta.of(tensor) for tensor in tensors]
        stay = OffloadedInputs(self._block_for(sum(rounded(form.nbytes, ALIGNMENT) for form in forms)), forms)
        self._passage.copy_out(tensors, stay)
        self._arrived += 1
        self._stays[self._arrived] = stay
        self._count_holes(stay)
        self.used_bytes += stay.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return OffloadHandle(self, self._arrived)

    def restore(self, number: int) -> list[Tensor]:
        """Copies of the tensors that were parked; the slab keeps its own, for another backward through this graph."""
        self.sweep()
        self._passage.synchronize()
        stay = self._stays[number]
        stay.place.fetch()
        wanted = self._before(number, AHEAD)
        tickets = [self._stays[other].place.fetch() for other in wanted]
        found = self._passage.copy_in(number, stay)
        if stay.is_stored:
            stay.place.drop()
        if wanted and tickets[0].is_done():
            self._passage.prefetch(wanted[0], self._stays[wanted[0]])
        self._count_holes(stay)
        self._sweep_after_backward()
        return found

    def _before(self, number: int, count: int) -> list[int]:
        """The checkpoints that came before this one, latest first: what backward wants next."""
        return list(islice((other for other in reversed(self._stays) if other < number), count))

    def _store_newest(self) -> None:
        """The newest checkpoint is about to be the last but one.  Waits where the disk is too slow to keep up."""
        newest = next(reversed(self._stays.values()), None)
        if newest is not None and not newest.is_stored:
            self._leaving.append(newest.place.store())
            newest.is_stored = True
        while len(self._leaving) > BEHIND:
            self._leaving.popleft().wait()

    def _count_holes(self, stay: OffloadedInputs) -> None:
        """Each storage that dies here, and each copy that is taken, is a hole in the heap before long."""
        self._holes_bytes += stay.nbytes
        if self._holes_bytes >= HOLES_BYTES:
            self._holes_bytes = 0
            trim_heap()

    # -- room

    def _block_for(self, nbytes: int) -> ArenaBlock:
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if not self._stays and len(self.slabs) > 1:
            self._join()
        self._chunk_bytes = self._chunk_bytes or self._best_chunk()
        whole = rounded(nbytes, self._chunk_bytes)
        for slab in self.slabs:
            if (place := slab.take(whole)) is not None:
                return place
        count = 1 if self.slabs or self.checkpoints is None else self.checkpoints
        place = self._reserve(whole * count).take(whole)
        assert place is not None
        return place

    def _join(self) -> None:
        """One slab instead of several, while nothing is parked."""
        self._chunk_bytes = self._best_chunk()
        nbytes = sum(rounded(slab.nbytes, self._chunk_bytes) for slab in self.slabs)
        self._release_memory()
        self.memory = self._open()
        self._reserve(nbytes)

    def _best_chunk(self) -> int:
        return rounded(-(-self._largest_bytes // CHUNKS), PAGE)

    def _reserve(self, nbytes: int) -> Arena:
        self.memory.check_room(nbytes, ranks_of_this_host())
        self.slabs.append(Arena(self.memory, nbytes, self._chunk_bytes))
        return self.slabs[-1]

    def _release_memory(self) -> None:
        self.slabs.clear()
        self._leaving.clear()
        self.memory.close()

    # -- ends

    def sweep(self) -> None:
        """Free the places of whatever was dropped."""
        while self._dropped:
            self._passage.discard(number := self._dropped.popleft())
            stay = self._stays.pop(number)
            self.used_bytes -= stay.nbytes
            stay.place.free()

    def _sweep_after_backward(self) -> None:
        """Its last checkpoints are dropped after the last `take`."""
        if self._backward != (now := backward_id()) and now != -1:
            self._backward = now
            queue_backward_callback(self.sweep)

    def close(self) -> None:
        """Give the memory up, unless a graph still needs it: then it goes with the graph."""
        if len(self._dropped) == len(self._stays):
            self._dropped.clear()
            self._stays.clear()
            self._passage.synchronize()
            self._passage = ActivationCopy()
            self._release_memory()

    def explain(self) -> str:
        """One line: what is reserved, and what of it was never needed."""
        slabs = "one slab" if len(self.slabs) == 1 else f"{len(self.slabs)} slabs"
        return (
            f"activations: {format_bytes(self.reserved_bytes)} in {slabs}, {format_bytes(self.peak_bytes)} used at "
            f"most, gap {format_bytes(self.unused_bytes)}"
        )


class OffloadHandle:
    """The inputs of one checkpoint, elsewhere.  Dropping it frees their place."""

    def __init__(self, parking: ActivationOffload, number: int) -> None:
        self.parking, self.number = parking, number

    def restore(self) -> list[Tensor]:
        """The tensors that were parked, as new ones with the same bytes."""
        return self.parking.restore(self.number)

    def __del__(self) -> None:
        self.parking._dropped.append(self.number)
