"""`init_distributed`: join the process group of a job."""

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
from ..base.mesh import PATIENCE, default_backend, device_of_group
from ..base.world import discover
from ..comm.net.store import launchers_store


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group that a launcher or the arguments describe.

    If neither a launcher nor the arguments describe several ranks, a group of one rank is created,
    so that `torch.distributed.get_rank()` also works in a single process. A process group that
    exists already is kept. If a group of several ranks is created without "file://", the call also
    sets the current CUDA device and torchrun's environment variables, such as RANK and MASTER_ADDR.

    Args:
        dist_backend: Backend of torch.distributed. None means "gloo" on a CPU or if ranks share a
            GPU, and otherwise "cpu:gloo,cuda:nccl".
        auto_mpi_discovery: Accepted and ignored.
        distributed_port: Port of the rendezvous, if neither a launcher nor `init_method` defines
            one.
        verbose: Accepted and ignored.
        timeout: Timeout of collectives of torch.distributed; None means 7 days.
        init_method: "env://", "tcp://host:port" or "file:///path"; None means "env://". Existing
            variables MASTER_ADDR and MASTER_PORT take precedence over the host and the port.
        dist_init_required: If False, raise unless the process group exists already.
        config: Accepted and ignored.
        rank: This process's rank, if neither a launcher nor `init_method` defines it; -1 means
            unknown.
        world_size: Number of ranks, if neither a launcher nor `init_method` defines it; -1 means
            unknown.

    Raises:
        UsageError: `dist_init_required` is False but there is no process group, `rank` or
            `world_size` is out of range, or the launcher's variables are invalid or incomplete.
        NotBuiltError: The scheme of `init_method` is none of the three above.
        PeerError: The ranks did not connect.

    Note:
        Collective if there are several ranks: every rank must call it.
    """
    if not join(
        dist_backend,
        timeout,
        distributed_port=distributed_port,
        init_method=init_method,
        dist_init_required=dist_init_required,
        rank=rank,
        world_size=world_size,
    ):
        backend = dist_backend or default_backend(default_device())
        store = dist.HashStore()  # type: ignore[attr-defined]
        place: dict[str, Any] = {
            "store": store,
            "rank": 0,
            "world_size": 1,
            "device_id": device_of_group(backend),
        }
        dist.init_process_group(backend, timeout=timeout or PATIENCE, **place)


def join(
    dist_backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    distributed_port: int | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> bool:
    """Join the described process group as `init_distributed` does, if there is one.

    Args:
        dist_backend: Backend of torch.distributed. By default it depends on the device.
        timeout: Timeout of collectives of torch.distributed.
        distributed_port: Port of the rendezvous, if neither a launcher nor `init_method` defines
            one.
        init_method: "env://", "tcp://host:port" or "file:///path".
        dist_init_required: If False, raise unless the process group exists already.
        rank: This process's rank, if neither a launcher nor `init_method` defines it.
        world_size: Number of ranks, if neither a launcher nor `init_method` defines it.

    Returns:
        Whether the process has a process group. False if neither a launcher nor the arguments
        describe one.

    Raises:
        UsageError: `dist_init_required` is False but there is no process group, or `rank` or
            `world_size` is out of range.
        NotBuiltError: `init_method` has another scheme.

    Note:
        Collective under a launcher: every rank must call it.
    """
    if not dist.is_initialized():
        if dist_init_required is False:
            raise UsageError(
                "Distributed backend is not initialized, and dist_init_required is False.",
                "The caller says that it has joined a group already.",
                "leave dist_init_required out, or call torch.distributed.init_process_group first.",
            )
        whole_number("init_distributed", "world_size", world_size, -1)
        last_rank = world_size - 1 if world_size > 0 else None
        whole_number("init_distributed", "rank", rank, -1, last_rank)
        if urlsplit(init_method or "").scheme == "file":
            backend = dist_backend or default_backend(default_device())
            device_id = device_of_group(backend)
            if rank < 0 and world_size < 0 and not urlsplit(init_method or "").query:
                found = discover(os.environ)
                if found.size > 1 or "WORLD_SIZE" in os.environ:  # else torch asks for them
                    rank = found.rank
                    world_size = found.size
            dist.init_process_group(
                backend, init_method, timeout or PATIENCE, world_size, rank, device_id=device_id
            )
        else:
            _describe(init_method or "env://", rank, world_size)
    return mesh.init_distributed(
        dist_backend, timeout or PATIENCE, distributed_port, store_of=launchers_store
    )


def _describe(method: str, rank: int, size: int) -> None:
    """Export the caller's group as launcher variables; existing variables take precedence."""
    address = urlsplit(method)
    if address.scheme not in ("env", "tcp"):
        raise NotBuiltError(
            f"init_method={method!r} is not built.",
            "Ranks meet at an address or over a file.",
            'use "tcp://host:port", "file:///path" or a launcher.',
        )
    if address.hostname:
        os.environ.setdefault("MASTER_ADDR", address.hostname)
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_PORT": address.port or -1,
    }.items():
        if value >= 0:
            os.environ.setdefault(name, str(value))
