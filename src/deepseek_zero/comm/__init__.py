"""DeepSpeed's `deepspeed.comm`: torch.distributed's names, which answer as a world of one where no group is joined.

The engine's own transport is collectives.py; nothing in the house calls this mirror.  Scripts do, as
`import deepseek_zero.comm as dist`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as _dist

from ..base.errors import UnknownNameError
from .coalesced import ASKED, COLLECTIVES, initialize_mesh_device
from .context import local_rank as get_local_rank
from .start import init_distributed

__all__ = [
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_world_group",
    "init_distributed",
    "initialize_mesh_device",
]


def _first(value: Any = None, *args: Any, **kwargs: Any) -> None:
    """An in-place collective of one rank leaves its tensor as it is."""


def _into(output: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    output.view(-1).copy_(value.reshape(-1))


def _into_list(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    outputs[0].copy_(value)


def _object_into_list(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    outputs[0] = value


# What a script may call before, or without, joining a group.
ALONE: dict[str, Callable[..., Any]] = {
    "get_rank": lambda group=None: 0,
    "get_world_size": lambda group=None: 1,
    "barrier": _first,
    "monitored_barrier": _first,
    "all_reduce": _first,
    "broadcast": _first,
    "broadcast_object_list": _first,
    "reduce": _first,
    "all_gather_into_tensor": _into,
    "all_gather_single": _into,
    "reduce_scatter_tensor": _into,
    "all_to_all_single": _into,
    "all_gather": _into_list,
    "all_gather_object": _object_into_list,
    "destroy_process_group": _first,
}
ALONE |= {name: alone for name, (_, alone) in COLLECTIVES.items()}
# Why a name of DeepSpeed's is not here.
LOGGED = "engine.explain() and the records say what was sent"
LATER = {
    "log_summary": LOGGED,
    "configure": LOGGED,
    "reset_log": LOGGED,
    "has_comm_data": LOGGED,
    "get_comm_operation_count": LOGGED,
    "get_logged_comm_ops": LOGGED,
    "mpi_discovery": "ranks are found in the variables that every launcher sets",
    "init_deepspeed_backend": "torch.distributed's backends serve",
    "set_backend": "torch.distributed's backends serve",
    "enable_symm_mem_for_group": "same-host ranks share memory already",
}


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global number of a group's rank."""
    return _dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_world_group() -> Any:
    """The group of all ranks, None in a world of one."""
    return _dist.group.WORLD if _dist.is_initialized() else None


def get_all_ranks_from_group(group: Any = None) -> Sequence[int]:
    """The global numbers of a group's ranks."""
    return _dist.get_process_group_ranks(group) if _dist.is_initialized() else [0]


def __getattr__(name: str) -> Any:
    if name in ALONE:
        return _either(name)
    if name in ASKED:
        return lambda: True
    if name in LATER:
        raise UnknownNameError(
            f"deepseek_zero.comm.{name} is not built: {LATER[name]}.",
            fix="what is there: every name of torch.distributed, and init_distributed.",
        )
    if name.startswith("_") or not hasattr(_dist, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_dist, name)


def _either(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        together = COLLECTIVES[name][0] if name in COLLECTIVES else getattr(_dist, name)
        return (together if _dist.is_initialized() else ALONE[name])(*args, **kwargs)

    call.__name__ = name
    return call
