"""Host memory as a tier: exactly as many bytes as a state has, page-locked where copies of a GPU
go.

torch's own page-locked tensors take the next power of two; these take whole pages. What a plan
names is mapped in two slabs, one of which is locked. They get their pages at the end of building an
engine (`HostMemory.commit`), with several threads, so that no step waits for pages or for locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..base.capabilities import Capability
from ..base.device import default_device
from ..base.errors import OutOfMemoryError
from ..base.memory import PAGE, Slab, private_pages
from ..base.progress import LongWork
from ..base.quantities import format_bytes
from ..kernels.compiler import threads_for
from .tier import HostStorage, TransferMeter

_CGROUP = Path("/sys/fs/cgroup")


MOST_THREADS = 8  # that give memory its pages; more gain little


@dataclass(frozen=True)
class HostPiece:
    """What a plan reserves of host memory for one state of one group.

    nbytes: whole pages. is_copied: the training device copies it, from it or to it.
    """

    nbytes: int
    is_copied: bool


class HostMemory:
    """The host tier of one rank.

    Args:
        pinned: Page-lock what the training device copies.
        pieces: What the plan reserves. Other reservations get memory of their own.
    """

    def __init__(self, *, pinned: bool = False, pieces: Sequence[HostPiece] = ()) -> None:
        self.pinned = pinned
        self.reserved_bytes = 0
        self.traffic = TransferMeter()
        self._pieces = pieces
        self._slabs: dict[bool, Slab] | None = (
            None  # by whether they are locked; None: not mapped yet
        )

    def capabilities(self) -> list[Capability]:
        name = "states on the host"
        if self.pinned or default_device().type != "cuda":
            how = "page-locked" if self.pinned else "in place"
            return [Capability(name, how)]
        return [
            Capability(
                name, "pageable", '"pin_memory": true lets copies to and from the GPU run beside it'
            )
        ]

    def check_room(self, nbytes: int, sharers: int) -> None:
        """Raise `OutOfMemoryError` if `sharers` ranks cannot have so many bytes each."""
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
        """Return a zeroed storage; raise `OutOfMemoryError` if the system or CUDA refuses the
        pages.
        """
        if not numel:
            return HostStorage(torch.empty(0, dtype=dtype))
        nbytes = -(-numel * dtype.itemsize // PAGE) * PAGE
        is_locked = self.pinned and is_copied
        slab = self._mapped().get(is_locked)
        memory = slab.take(nbytes, dtype) if slab is not None else None
        if memory is None:
            memory = private_pages(nbytes // dtype.itemsize, dtype, locked=is_locked)
        self.reserved_bytes += memory.nbytes
        return HostStorage(memory[:numel])

    def _mapped(self) -> dict[bool, Slab]:
        """Return the slabs, mapped on first use: only after `check_room`."""
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
        """Give pages to everything that is planned, and lock what the training device copies.

        Args:
            sharers: The ranks of this host, which do so at the same time.

        Raises:
            OutOfMemoryError: CUDA refuses to lock the pages.
        """
        slabs = self._mapped()
        threads = min(MOST_THREADS, threads_for(sharers))
        total = sum(slab.nbytes for slab in slabs.values())
        with LongWork("reserving host memory", total) as work:
            for slab in slabs.values():
                slab.touch(threads, work.advance)
        if True in slabs:
            with LongWork("page-locking host memory", slabs[True].nbytes) as work:
                slabs[True].lock(work.advance)

    def close(self) -> None:
        """Return at once: memory goes with its tensors."""


def free_host_bytes() -> int:
    """Return the bytes this process can have: what the machine has free, or what its control group
    allows.
    """
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
