"""DeepSpeed's `deepspeed.comm`: torch.distributed's names, which answer as a world of one where no group is joined.

    init_distributed   DeepSpeed's arguments, in front of base/mesh.py's
    COLLECTIVES        what torch.distributed spells otherwise or not at all
    ALONE              what a script may call before it joins a group, or without one

Users import it as `deepseek_zero.comm`; engines have their own collectives (comm/collectives.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...base import mesh
from ...base.device import default_device
from ...base.errors import NotBuiltError, UnknownNameError, UsageError
from ...base.given import whole_number
from ...base.mesh import PATIENCE, default_backend
from ...comm.context import local_rank as get_local_rank
from ...comm.store import launchers_store
from .missing import missing_names

MODULE = "deepseek_zero.comm"  # where users find these names
__all__ = [
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_world_group",
    "init_distributed",
    "initialize_mesh_device",
]

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
    """Do as `init_distributed` does, but leave a process alone that nobody described a group to; return whether it has
    one.
    """
    unknown = sorted(options.keys() - WITHOUT_EFFECT - EFFECTIVE)
    if unknown:
        raise UsageError(
            f"init_distributed has no argument {', '.join(unknown)}.",
            fix=f"use dist_backend, timeout, {', '.join(sorted(EFFECTIVE | WITHOUT_EFFECT))}.",
        )
    _describe(options)
    port = options.get("distributed_port")
    return mesh.init_distributed(dist_backend, timeout or PATIENCE, port, store_of=launchers_store)


def _describe(options: dict[str, Any]) -> None:
    """Write the caller's group into the variables that launchers set; a launcher's own value stands."""
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


# torch 2.13 renames these two and warns of the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather every rank's tensor into one."""
    return _gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


def _reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Add up every rank's tensor; each rank keeps its slice."""
    return _scatter_from(output_tensor, tensor, op=op, group=group, async_op=async_op)


def _inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """Add up every rank's tensor, in place."""
    return dist.all_reduce(tensor, op=op, group=group)


def _all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """Add up several tensors, one after the other."""
    _refuse_async("all_reduce_coalesced", async_op)
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def _all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> None:
    """Gather several tensors, one after the other."""
    _refuse_async("all_gather_coalesced", async_op)
    for output, value in zip(output_tensors, input_tensors, strict=True):
        _gather_into(output, value, group=group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Return torch's DeviceMesh over all ranks.  Collective."""
    return init_device_mesh(default_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def _refuse_async(name: str, async_op: bool) -> None:
    if async_op:
        raise NotBuiltError(f"{name}(async_op=True) is not built.", "It is several collectives.", "leave async_op out.")


# -- a world of one, without a group


def _unchanged(value: Any = None, *args: Any, **kwargs: Any) -> None:
    """Leave the tensor of an in-place collective as it is: one rank sums up and sends nothing."""


def _into(output: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    output.view(-1).copy_(value.reshape(-1))


def _into_list(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    outputs[0].copy_(value)


def _object_into_list(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    outputs[0] = value


def _into_each(outputs: Sequence[Tensor], values: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
    for output, value in zip(outputs, values, strict=True):
        _into(output, value)


# name: (with a group, in a world of one)
COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allgather_fn": (_allgather_fn, _into),
    "reduce_scatter_fn": (_reduce_scatter_fn, _into),
    "inference_all_reduce": (_inference_all_reduce, _unchanged),
    "all_reduce_coalesced": (_all_reduce_coalesced, _unchanged),
    "all_gather_coalesced": (_all_gather_coalesced, _into_each),
}
# What DeepSpeed asks of torch's version; all of it is there.
ASKED = frozenset(
    "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager".split()
)

# What a script may call before, or without, joining a group.
ALONE: dict[str, Callable[..., Any]] = {
    "get_rank": lambda group=None: 0,
    "get_world_size": lambda group=None: 1,
    "barrier": _unchanged,
    "monitored_barrier": _unchanged,
    "all_reduce": _unchanged,
    "broadcast": _unchanged,
    "broadcast_object_list": _unchanged,
    "reduce": _unchanged,
    "all_gather_into_tensor": _into,
    "all_gather_single": _into,
    "reduce_scatter_tensor": _into,
    "all_to_all_single": _into,
    "all_gather": _into_list,
    "all_gather_object": _object_into_list,
    "destroy_process_group": _unchanged,
}
ALONE |= {name: alone for name, (_, alone) in COLLECTIVES.items()}


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global number of a group's rank."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_world_group() -> Any:
    """Return the group of all ranks, None in a world of one."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_all_ranks_from_group(group: Any = None) -> Sequence[int]:
    """Return the global numbers of a group's ranks."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def __getattr__(name: str) -> Any:
    if name in ALONE:
        return _with_or_without_group(name)
    if name in ASKED:
        return lambda: True
    if (missing := missing_names("deepspeed.comm").get(name)) is not None:
        raise UnknownNameError(
            f"deepspeed.comm.{name} is not built: {missing.reason}.",
            fix="what is there: every name of torch.distributed, and init_distributed.",
        )
    if name.startswith("_") or not hasattr(dist, name):
        raise AttributeError(f"module {MODULE!r} has no attribute {name!r}")
    return getattr(dist, name)


def _with_or_without_group(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        together = COLLECTIVES[name][0] if name in COLLECTIVES else getattr(dist, name)
        return (together if dist.is_initialized() else ALONE[name])(*args, **kwargs)

    call.__name__ = name
    return call
