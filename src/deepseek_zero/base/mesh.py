"""Start torch.distributed and name the data-parallel axis.

A process without a launcher is a world of one: it joins no group and runs the same code with smaller data.  Called by
the doors and by engine/assemble.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .device import default_device
from .errors import UsageError
from .log import log_first

# Evidence ends a wait (comm/board.py), never patience: a rank that loads data for an hour is late, not dead.
PATIENCE = timedelta(days=7)
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands.  `dp` is the only axis so far; pp and tp come with later parts."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_distributed(self) -> bool:
        return self.size > 1


def shares_gpu() -> bool:
    """Whether this host runs more ranks than it has GPUs, so that some share one."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return torch.cuda.is_available() and local > torch.cuda.device_count()


def default_backend(device: torch.device) -> str:
    """gloo on the host; on GPUs NCCL beside it, unless ranks share one, which NCCL refuses."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shares_gpu() else "gloo"


def init_distributed(backend: str | None = None, timeout: timedelta = PATIENCE) -> bool:
    """Join the group a launcher describes in the environment; True if this process belongs to one afterwards.

    Without a launcher nothing is started (a world of one).  Collective under a launcher.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return False
    missing = [name for name in LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set.",
            "A world of several processes is described by these four variables.",
            "start the script with `deepseek-zero run --nproc N script.py` (or torchrun).",
        )
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend or default_backend(device), timeout=timeout)
    return True


def current_mesh(device: torch.device | None = None) -> Mesh:
    """The mesh of this process; starts torch.distributed if a launcher's variables are there."""
    device = device or default_device()
    if init_distributed() and dist.get_world_size() > 1:
        return Mesh(dist.get_rank(), dist.get_world_size(), device)
    log_first("no launcher: a world of one process (`deepseek-zero run --nproc 2 script.py` starts two)")
    return Mesh(0, 1, device)
