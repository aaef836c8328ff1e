"""A stand-in for the CUDA runtime that tracks page-locked ranges, refuses overlaps and keeps its
last error, as CUDA does.

cudart = install(monkeypatch)    # torch.cuda.cudart() returns it, and host tiers lock their pages
...
assert not cudart.ranges         # everything was unlocked before it was freed
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_zero.activations import recompute
from deepseek_zero.engine import memories
from deepseek_zero.planner import extras
from deepseek_zero.tiers import tier
from deepseek_zero.tiers.host import HostMemory
from deepseek_zero.tiers.tier import Tier

ALREADY, NOT_LOCKED, NO_MEMORY = 712, 713, 2
NAMES = {
    ALREADY: "part or all of the requested memory range is already mapped",
    NOT_LOCKED: "pointer does not correspond to a registered memory region",
    NO_MEMORY: "out of memory",
}


class Cudart:
    """The functions of torch.cuda.cudart() that lock memory.

    Attributes:
        ranges: Sizes of the locked ranges, by address.
        limit: Bytes that may be locked.
        last_error: The error that the next launch would report.
        most: The largest number of bytes that were locked at once.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.limit = 1 << 60
        self.most = 0
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert is_mapped(address, nbytes)
        if any(
            start < address + nbytes and address < start + size
            for start, size in self.ranges.items()
        ):
            return self._failed(ALREADY)
        if sum(self.ranges.values()) + nbytes > self.limit:
            return self._failed(NO_MEMORY)
        self.ranges[address] = nbytes
        self.most = max(self.most, sum(self.ranges.values()))
        return 0

    def is_locked(self, address: int, nbytes: int) -> bool:
        """Return whether a single locked range contains all of these bytes."""
        return any(
            start <= address and address + nbytes <= start + size
            for start, size in self.ranges.items()
        )

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.ranges:
            return self._failed(NOT_LOCKED)
        assert is_mapped(address, self.ranges.pop(address)), (
            "the memory was freed while it was locked"
        )
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return NAMES[error]

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    def _failed(self, error: int) -> int:
        self.last_error = error
        return error


def is_mapped(address: int, nbytes: int) -> bool:
    """Return whether this process has mapped all of these addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
        if low <= address < high:
            return address + nbytes <= high or is_mapped(high, address + nbytes - high)
    return False


class LockedHost(HostMemory):
    """The host tier of a run on a GPU."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "pinned": True})


def install(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """Replace the CUDA runtime for torch and the tiers."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    for module in (memories, recompute):
        monkeypatch.setattr(module, "HostMemory", LockedHost)
    monkeypatch.setattr(tier, "locks_pages", lambda device: device.type != "cpu")
    monkeypatch.setattr(extras, "MEMORY_OF_CPU", (Tier.DEVICE,))
    return cudart
