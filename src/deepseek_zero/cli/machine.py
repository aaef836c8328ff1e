"""What this machine offers a launch: CPU cores, GPUs, and the numbers that follow from them.

Reads, never changes.  Standard library only, so that a command line without GPUs to count needs no torch; the number of
GPUs comes from the caller.  Called by cli/nodes.py, cli/run.py and cli/doctor.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Machine:
    """cores: CPU cores this process may use; gpus: names of the visible GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    cores: int
    gpus: tuple[str, ...] = ()

    @property
    def default_nproc(self) -> int:
        """One process per GPU; without GPUs one per pair of cores, at least one."""
        return len(self.gpus) or max(1, self.cores // 2)

    def thread_environment(self, nproc: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Threads per rank so that `nproc` ranks share the cores; what the user has set stays."""
        threads = max(1, self.cores // nproc)
        return {name: str(threads) for name in THREAD_VARIABLES if name not in environment}


def allowed_cores(quota_file: Path = CPU_QUOTA) -> int:
    """CPU cores this process may use: its affinity, and the container's quota rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = quota_file.read_text().split()
        if quota != "max":
            return max(1, min(affinity, math.ceil(int(quota) / int(period))))
    return affinity


def visible_gpus(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the visible GPUs; count: as the driver reports it with CUDA_VISIBLE_DEVICES applied."""
    listed = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(listed[:count]) if listed else tuple(str(index) for index in range(count))
