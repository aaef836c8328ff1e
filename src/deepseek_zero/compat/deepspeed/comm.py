"""DeepSpeed's `deepspeed.comm`, which also works without a process group.

    init_distributed   that of api/distributed.py; accelerate counts the ranks after it
    COLLECTIVES        functions that torch.distributed does not have under these names
    ALONE              functions that work without a process group, as with one rank

Users import it as `deepseek_zero.comm`. Engines have their own collectives (comm/collectives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from operator import setitem
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...api import distributed
from ...base.device import default_device
from ...base.errors import NotBuiltError, UnknownNameError
from ...comm.context import local_rank as get_local_rank
from .accelerate_ranks import let_accelerate_count
from .missing import missing_names

MODULE = "deepseek_zero.comm"  # the public name of this module
__all__ = [
    "configure",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_world_group",
    "has_comm_data",
    "init_distributed",
    "initialize_mesh_device",
    "is_initialized",
    "log_summary",
    "reset_log",
]


@wraps(distributed.init_distributed)
def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Join the process group, with the arguments of `deepseek_zero.init_distributed`.

    If accelerate's state has no backend, it is set, so that accelerate counts all CPU ranks.
    """
    distributed.init_distributed(*args, **kwargs)
    let_accelerate_count()


def is_initialized() -> bool:
    """Return whether torch.distributed is initialized.

    If the environment variable DEEPSEEK_ZERO_CPU_RANKS is 1 and there are several ranks, the call
    also sets the backend in accelerate's shared state if accelerate has not set it.
    """
    let_accelerate_count()
    return dist.is_initialized()


# torch 2.13 renames these two functions and warns about the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """All-reduce several tensors, one after the other."""
    _refuse_async("all_reduce_coalesced", async_op)
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def _all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> None:
    """All-gather several tensors, one after the other."""
    _refuse_async("all_gather_coalesced", async_op)
    for output, value in zip(output_tensors, input_tensors, strict=True):
        _gather_into(output, value, group=group)


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Create a `torch.distributed.DeviceMesh` over all ranks.

    torch initializes the default process group if there is none.

    Args:
        mesh_shape: Number of ranks along each dimension.
        mesh_dim_names: Names of the dimensions.

    Returns:
        The device mesh, which has a process group for each of its dimensions.

    Raises:
        RuntimeError: The mesh has more ranks than the process group, or the two arguments have
            different lengths.

    Note:
        Collective: every rank must call it.
    """
    return init_device_mesh(default_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def _refuse_async(name: str, async_op: bool) -> None:
    if async_op:
        raise NotBuiltError(
            f"{name}(async_op=True) is not built.",
            "It is several collectives.",
            "leave async_op out.",
        )


# -- one rank without a process group


def _unchanged(value: Any = None, *args: Any, **kwargs: Any) -> None:
    """Do nothing: with one rank, an in-place collective leaves its tensor unchanged."""


def _into(output: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    output.view(-1).copy_(value.reshape(-1))


def _into_each(
    outputs: Sequence[Tensor], values: Sequence[Tensor], *args: Any, **kwargs: Any
) -> None:
    for output, value in zip(outputs, values, strict=True):
        _into(output, value)


# name -> (with a process group, without one)
COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allgather_fn": (_gather_into, _into),
    "all_gather_into_tensor": (_gather_into, _into),
    "reduce_scatter_tensor": (_scatter_from, _into),
    "reduce_scatter_fn": (_scatter_from, _into),
    "inference_all_reduce": (dist.all_reduce, _unchanged),
    "all_reduce_coalesced": (_all_reduce_coalesced, _unchanged),
    "all_gather_coalesced": (_all_gather_coalesced, _into_each),
}
# Functions with which DeepSpeed checks torch's version; all of them return True.
ASKED = frozenset(
    "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced "
    "has_coalescing_manager".split()
)

# Functions that a script may call without a process group
ALONE: dict[str, Callable[..., Any]] = {
    "get_rank": lambda group=None: 0,
    "get_world_size": lambda group=None: 1,
    "barrier": _unchanged,
    "monitored_barrier": _unchanged,
    "all_reduce": _unchanged,
    "broadcast": _unchanged,
    "broadcast_object_list": _unchanged,
    "reduce": _unchanged,
    "all_gather_single": _into,
    "all_to_all_single": _into,
    "all_gather": lambda outputs, value, *args, **kwargs: outputs[0].copy_(value),
    "all_gather_object": lambda outputs, value, *args, **kwargs: setitem(outputs, 0, value),
    "destroy_process_group": _unchanged,
}
ALONE |= {name: alone for name, (_, alone) in COLLECTIVES.items()}


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the world rank of a rank in a process group.

    Args:
        group: Process group; None for the group of all ranks.
        group_rank: Rank in the group.

    Returns:
        The rank in the group of all ranks. If `group` is None or the group of all ranks, it is
        `group_rank` itself, unchecked.

    Raises:
        ValueError: `group_rank` is not in `group`, or `group` is not a process group.
    """
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_world_group() -> Any:
    """Return the process group of all ranks; None if there is no process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_all_ranks_from_group(group: Any = None) -> Sequence[int]:
    """Return the world ranks of the members of a process group.

    If `group` is None, it is the group of all ranks. If torch.distributed is not initialized, the
    result is ``[0]``.
    """
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


# -- the log of collectives


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure which calls of this module the communication logger records.

    Arguments other than `deepspeed_config` override the configuration. An argument that is None
    keeps the current value. At first, nothing is recorded.

    Args:
        deepspeed_config: A DeepSpeedConfig. Its section `comms_logger` is used if that section is
            enabled.
        enabled: Whether calls are recorded, with their sizes and times. The device is synchronized
            before and after each recorded call.
        prof_all: Whether all operations are recorded.
        prof_ops: Names of the operations to record if `prof_all` is false.
        verbose: Whether rank 0 also writes a line to the library's log for each call.
        debug: Accepted and stored; it has no effect.
    """
    stated = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    section = getattr(deepspeed_config, "comms_config", None)
    if section is not None and section.comms_logger_enabled:
        _comms_logger().configure(section)
    for name, value in stated.items():
        if value is not None:
            setattr(_comms_logger(), name, value)


@cache
def _comms_logger() -> Any:
    """Return the CommsLogger of this process, which is created on first use."""
    return import_module(f"{__package__}.comms_logging").CommsLogger()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print a summary of the recorded calls on rank 0: number, sizes, times and bandwidths.

    Args:
        show_straggler: Whether to include the time that this rank has waited for slower ranks. All
            ranks must have recorded the same calls.
        return_dict: Whether to return the summary of this rank as a dictionary, on every rank.

    Returns:
        If `return_dict` is true, a dictionary with the keys "summary", "straggler_analysis" and
        "metadata", else None. "straggler_analysis" is None if `show_straggler` is false. Times are
        in milliseconds, and bandwidths in Gbit/s.

    Note:
        Collective if a process group is initialized: every rank must call it.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        dist.barrier()
    found: dict[str, Any] | None = _comms_logger().log_all(is_first, show_straggler, return_dict)
    return found


def reset_log() -> None:
    """Delete all records of the communication logger."""
    _comms_logger().reset_data()


def has_comm_data() -> bool:
    """Return whether the communication logger has recorded any communication call."""
    return bool(_comms_logger().has_data())


def get_comm_operation_count() -> int:
    """Return the number of calls that the communication logger has recorded."""
    return int(_comms_logger().get_total_operations())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the operations that the communication logger has recorded."""
    return list(_comms_logger().get_operation_names())


# Calls that move data. They accept DeepSpeed's logging arguments (prof, log_name, debug), which
# torch does not have.
LOGGED = frozenset(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv "
    "broadcast broadcast_object_list gather inference_all_reduce irecv isend monitored_barrier "
    "recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor scatter send".split()
)

# DeepSpeed's names of the first arguments, where torch has other names
_TENSORS = dict.fromkeys(
    ("allgather_fn", "all_gather_into_tensor", "reduce_scatter_fn", "reduce_scatter_tensor"),
    ("output_tensor", "tensor"),
) | {"all_to_all_single": ("output", "tensor")}


def __getattr__(name: str) -> Any:
    if name == "comms_logger":
        return _comms_logger()
    if name in LOGGED:
        return _recorded(name)
    if name in ALONE:
        return _with_or_without_group(name)
    if name in ASKED:
        return lambda: True
    if (missing := missing_names("deepspeed.comm").get(name)) is not None:
        raise UnknownNameError(
            f"deepspeed.comm.{name} is not built: {missing}.",
            fix="use a name of torch.distributed, or init_distributed.",
        )
    if name.startswith("_") or not hasattr(dist, name):
        raise AttributeError(f"module {MODULE!r} has no attribute {name!r}")
    return getattr(dist, name)


def _with_or_without_group(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        together = COLLECTIVES[name][0] if name in COLLECTIVES else getattr(dist, name)
        return (together if dist.is_initialized() or name not in ALONE else ALONE[name])(
            *args, **kwargs
        )

    call.__name__ = name
    return call


def _recorded(name: str) -> Callable[..., Any]:
    made = _with_or_without_group(name)

    def call(
        *args: Any,
        prof: bool = False,
        log_name: str | None = None,
        debug: Any = None,
        **kwargs: Any,
    ) -> Any:
        for word in _TENSORS.get(name, ())[len(args) :]:
            if word in kwargs:
                args = (*args, kwargs.pop(word))
        logger = _comms_logger()
        if not logger.wants(log_name or name, prof):
            return made(*args, **kwargs)
        return logger.timed(made, name, log_name or name, args, kwargs)

    call.__name__ = name
    return call
