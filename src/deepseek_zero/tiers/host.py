"""Host memory as a tier: exactly as many bytes as a state has, page-locked where the training device is a GPU.

torch's own page-locked tensors take the next power of two; these take whole pages.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from ..base.capabilities import Capability
from ..base.device import default_device
from ..base.errors import OutOfMemoryError
from ..base.memory import PAGE, private_pages
from ..base.quantities import format_bytes
from .tier import Extent, Traffic

_CGROUP = Path("/sys/fs/cgroup")


class HostMemory:
    """The host tier of one rank."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned, self.reserved_bytes, self.traffic = pinned, 0, Traffic()

    def capabilities(self) -> list[Capability]:
        name = "states on the host"
        if self.pinned or default_device().type != "cuda":
            return [Capability(name, "page-locked" if self.pinned else "in place")]
        return [Capability(name, "pageable", '"pin_memory": true lets copies to and from the GPU run beside it')]

    def check_room(self, nbytes: int, sharers: int) -> None:
        """Raise `OutOfMemoryError` if `sharers` ranks cannot have so many bytes each."""
        free = free_host_bytes()
        if nbytes * sharers > free:
            raise OutOfMemoryError(
                f"offloaded states need {format_bytes(nbytes * sharers)} of host memory "
                f"({format_bytes(nbytes)} for each of {sharers} ranks), {format_bytes(free)} are free.",
                "Checked before anything is allocated, so nothing is lost.",
                f'put them on a disk ("device": "nvme"), or train a model of {free / (nbytes * sharers):.0%} of this '
                "size.",
            )

    def reserve(self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str) -> Extent:
        """Return a zeroed extent; raise `OutOfMemoryError` if the system or CUDA refuses the pages."""
        if not numel:
            return Extent(torch.empty(0, dtype=dtype))
        pages = -(-numel * dtype.itemsize // PAGE)
        memory = private_pages(pages * PAGE // dtype.itemsize, dtype, locked=self.pinned)
        self.reserved_bytes += memory.nbytes
        return Extent(memory[:numel])

    def close(self) -> None:
        """Return at once: memory goes with its tensors."""


def free_host_bytes() -> int:
    """Return the bytes this process can have: what the machine has free, or what its control group allows."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
