"""Start torch.distributed and name the data-parallel axis.

A process without a launcher is a world of one: it joins no group and runs the same code with smaller data.  Called by
the doors and by engine/assemble.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from . import world
from .device import default_device
from .errors import PeerError
from .log import log_first, speak
from .world import discover, meeting_place

# Evidence ends a wait (comm/flight_recorder.py), never patience: a rank that loads data for an hour is late, not dead.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands.  `dp` is the only axis so far; pp and tp come with later parts."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_distributed(self) -> bool:
        return self.size > 1


def shares_gpu(local_size: int | None) -> bool:
    """Whether a host that runs so many ranks has fewer GPUs, so that some share one.  None, unknown: taken for no."""
    return local_size is not None and torch.cuda.is_available() and local_size > torch.cuda.device_count()


def default_backend(device: torch.device) -> str:
    """gloo on the host; on GPUs NCCL beside it, unless the launcher says that ranks share one, which NCCL refuses."""
    is_shared = device.type != "cuda" or shares_gpu(world.local_size())
    return "gloo" if is_shared else "cpu:gloo,cuda:nccl"


def init_distributed(backend: str | None = None, timeout: timedelta = PATIENCE, port: int | None = None) -> bool:
    """Join the group a launcher describes in the environment; True if this process belongs to one afterwards.

    Without a launcher nothing is started (a world of one).  port: where ranks meet if the launcher does not say.
    UsageError where a launcher says of several processes and not how they meet (base/world.py), or says nonsense.
    Collective under a launcher.
    """
    speak()
    if dist.is_available() and dist.is_initialized():
        return True
    found = discover(os.environ)
    if found.port is None and port is not None:
        found = replace(found, port=port)
    found = meeting_place(os.environ, found)
    if found.size == 1:
        return False
    os.environ.update(found.variables())  # where torch looks, and scripts that ask for LOCAL_RANK
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend or default_backend(device), timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:  # torch adds a page of C++ frames to its first line
        raise PeerError(
            f"rank {found.rank} of {found.size} did not meet the others at {found.address}:{found.port}: "
            f"{str(error).splitlines()[0][:300]}",
            "Rank 0 listens there, and every rank connects to it before training begins.",
            "look at rank 0's output first; another job on that port needs another MASTER_PORT.",
        ) from None
    return True


def current_mesh(device: torch.device | None = None) -> Mesh:
    """The mesh of this process; starts torch.distributed if a launcher's variables are there."""
    device = device or default_device()
    if init_distributed() and dist.get_world_size() > 1:
        return Mesh(dist.get_rank(), dist.get_world_size(), device)
    log_first("no launcher: a world of one process (`deepseek-zero run --nproc 2 script.py` starts two)")
    return Mesh(0, 1, device)
