"""DeepSpeed's `init_distributed` with all its arguments, in front of base/mesh.py's."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from ..base import mesh
from ..base.device import default_device
from ..base.errors import NotBuiltError, UsageError
from ..base.given import whole_number
from ..base.mesh import PATIENCE, default_backend

# Accepted and without effect: what they say is found from the environment, or is for DeepSpeed's own engine.
WITHOUT_EFFECT = frozenset({"auto_mpi_discovery", "verbose", "dist_init_required", "config"})
EFFECTIVE = frozenset({"distributed_port", "init_method", "rank", "world_size"})


def init_distributed(dist_backend: str | None = None, timeout: timedelta | None = None, **options: Any) -> None:
    """Join the group a launcher describes, or the one that rank, world_size and init_method describe.

    Collective under a launcher; without one it starts a group of one, so that a script may ask torch.distributed for
    its rank.  DeepSpeed's other arguments (auto_mpi_discovery, verbose, dist_init_required, config) are accepted and
    change nothing.
    """
    if not join(dist_backend, timeout, **options):
        backend = dist_backend or default_backend(default_device())
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout or PATIENCE)


def join(dist_backend: str | None = None, timeout: timedelta | None = None, **options: Any) -> bool:
    """As `init_distributed`, but a process that nobody described to stays without a group; whether it has one."""
    unknown = sorted(options.keys() - WITHOUT_EFFECT - EFFECTIVE)
    if unknown:
        raise UsageError(
            f"init_distributed has no argument {', '.join(unknown)}.",
            fix=f"use dist_backend, timeout, {', '.join(sorted(EFFECTIVE | WITHOUT_EFFECT))}.",
        )
    _describe(options)
    return mesh.init_distributed(dist_backend, timeout or PATIENCE, options.get("distributed_port"))


def _describe(options: dict[str, Any]) -> None:
    """Put what the caller says of the group where launchers put it; a launcher's own word stands."""
    method = options.get("init_method") or "env://"
    address = urlsplit(method)
    if address.scheme not in ("env", "tcp"):
        raise NotBuiltError(
            f"init_method={method!r} is not built.", "Ranks meet at an address.", 'use "tcp://host:port" or a launcher.'
        )
    rank, size = options.get("rank", -1), options.get("world_size", -1)
    whole_number("init_distributed", "world_size", size, -1)
    whole_number("init_distributed", "rank", rank, -1, size - 1 if size > 0 else None)
    said = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_PORT": address.port or -1,
    }
    if address.hostname:
        os.environ.setdefault("MASTER_ADDR", address.hostname)
    for name, value in said.items():
        if isinstance(value, int) and value >= 0:
            os.environ.setdefault(name, str(value))
