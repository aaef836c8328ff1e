"""Host memory as a tier, page-locked for the copies of a GPU.

A state takes its size in whole pages, while PyTorch's own page-locked tensors take the next power
of two. All planned states are mapped in two slabs, and one of them is locked. Several threads touch
the pages at the end of building an engine (`HostMemory.commit`), so no step waits for pages or for
locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from ..base import host
from ..base.capabilities import Capability
from ..base.device import default_device
from ..base.errors import OutOfMemoryError
from ..base.memory import PAGE, Slab, private_pages
from ..base.progress import LongWork
from ..base.quantities import format_bytes, rounded_up
from ..kernels.threads import bind_update_thread, threads_for
from .tier import HostStorage, TierMemory

MOST_THREADS = 8  # threads that populate pages; more gain little


@dataclass(frozen=True)
class HostPiece:
    """Host memory that a plan reserves for one state of one group.

    Attributes:
        nbytes: Size in bytes, in whole pages.
        is_copied: Whether the training device copies the memory, in either direction.
    """

    nbytes: int
    is_copied: bool


class HostMemory(TierMemory):
    """The host tier of one rank.

    Args:
        pinned: Whether to page-lock memory that the training device copies.
        pieces: Memory that the plan reserves. Other reservations get separate memory.
    """

    def __init__(self, *, pinned: bool = False, pieces: Sequence[HostPiece] = ()) -> None:
        super().__init__()
        self.pinned = pinned
        self._pieces = pieces
        # By whether the pages are locked; None before the memory is mapped
        self._slabs: dict[bool, Slab] | None = None

    def capabilities(self) -> list[Capability]:
        name = "states on the host"
        if self.pinned or default_device().type != "cuda":
            how = "page-locked" if self.pinned else "in place"
            return [Capability(name, how)]
        lacks = '"pin_memory": true lets copies to and from the GPU run beside it'
        return [Capability(name, "pageable", lacks)]

    def check_space(self, nbytes: int, sharers: int) -> None:
        """Raise `OutOfMemoryError` if the host has no space for the states of all ranks.

        Args:
            nbytes: Bytes for each rank.
            sharers: Number of ranks on this host.
        """
        free = free_host_bytes()
        if nbytes * sharers > free:
            raise OutOfMemoryError(
                f"offloaded states need {format_bytes(nbytes * sharers)} of host memory "
                f"({format_bytes(nbytes)} for each of {sharers} ranks), {format_bytes(free)} are "
                "free.",
                "Checked before anything is allocated, so nothing is lost.",
                'put them on a disk ("device": "nvme"), or train a model of '
                f"{free / (nbytes * sharers):.0%} of this size.",
            )

    def reserve(
        self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str, *, is_copied: bool = True
    ) -> HostStorage:
        """Return a zeroed storage.

        Args:
            numel: Number of elements.
            dtype: Data type.
            chunk_numel: Not used here.
            what: Not used here.
            is_copied: Whether the training device copies the storage, in either direction.

        Raises:
            OutOfMemoryError: The system or CUDA cannot provide the pages.
        """
        if not numel:
            return HostStorage(torch.empty(0, dtype=dtype, device="cpu"))
        nbytes = rounded_up(numel * dtype.itemsize, PAGE)
        is_locked = self.pinned and is_copied
        slab = self._mapped().get(is_locked)
        memory = slab.take(nbytes, dtype) if slab is not None else None
        if memory is None:
            memory = private_pages(nbytes // dtype.itemsize, dtype, locked=is_locked)
        self.reserved_bytes += memory.nbytes
        return HostStorage(memory[:numel])

    def add(self, memory: torch.Tensor) -> HostStorage:
        """Return a storage of memory that is allocated already, and count it as reserved."""
        self.reserved_bytes += rounded_up(memory.nbytes, PAGE)
        return HostStorage(memory)

    def _mapped(self) -> dict[bool, Slab]:
        """Return the slabs, which the first call maps. Call only after `check_space`."""
        if self._slabs is None:
            self._slabs = {}
            for is_locked in (False, True):
                sizes = [
                    each.nbytes
                    for each in self._pieces
                    if (self.pinned and each.is_copied) is is_locked
                ]
                if sizes:
                    self._slabs[is_locked] = Slab(sizes)
        return self._slabs

    def commit(self, sharers: int) -> None:
        """Touch the pages of all planned memory, and lock those that a GPU copies.

        Args:
            sharers: Number of ranks on this host that call this at the same time.

        Raises:
            OutOfMemoryError: CUDA cannot lock the pages.
        """
        slabs = self._mapped()
        threads = min(MOST_THREADS, threads_for(sharers))
        total = sum(slab.nbytes for slab in slabs.values())
        with LongWork("reserving host memory", total) as work:
            for slab in slabs.values():
                slab.touch(threads, work.advance, bind_update_thread)
        if True in slabs:
            with LongWork("page-locking host memory", slabs[True].nbytes) as work:
                slabs[True].lock(work.advance)


def free_host_bytes() -> int:
    """Return the bytes of host memory that this process can still allocate.

    This is the minimum of the machine's available memory and the unused part of the control groups'
    limit.
    """
    free = int(psutil.virtual_memory().available)
    group = host.THIS_HOST.cgroup_memory()
    return free if group is None else min(free, group.free)
