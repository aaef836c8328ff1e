"""Read accelerate's state of this process and correct its count of CPU ranks.

`accelerate.PartialState` takes the number of processes from torch.distributed only if it has chosen
a backend. For CPU ranks that train with DeepSpeed it chooses none, so each rank counts itself as
the only process. It chooses the backend before it calls `deepspeed.comm`, and counts after that
call. With DEEPSEEK_ZERO_CPU_RANKS=1, the call sets the missing backend.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from ...base.errors import UsageError
from ...base.mesh import axes_of
from ...engine.mesh_statements import MeshStatement

CPU_RANKS = "DEEPSEEK_ZERO_CPU_RANKS"


def _shared_state(name: str) -> dict[str, Any]:
    """Return the attributes that all instances of one of accelerate's classes share."""
    kind = getattr(sys.modules.get("accelerate.state"), name, None)
    return getattr(kind, "_shared_state", None) or {}


def let_accelerate_count() -> None:
    """Set a missing backend in accelerate's state if `CPU_RANKS` is set."""
    if os.environ.get(CPU_RANKS) != "1" or not dist.is_initialized():
        return
    shared = _shared_state("PartialState")
    is_unfinished = "backend" in shared and "num_processes" not in shared
    if is_unfinished and shared["backend"] is None and dist.get_world_size() > 1:
        shared["backend"] = dist.get_backend()


def refuse_miscount() -> None:
    """Raise an error if accelerate uses DeepSpeed and counted a different world size.

    accelerate counts before DeepSpeed creates the process group, and counts each CPU rank as one
    process unless a backend is configured. Its batch sizes are then those of one process, and its
    data loaders give every rank the same batches. This is an error even if the sizes happen to fit.
    The check is local and has the same result on every rank.

    Raises:
        UsageError: accelerate's count differs from the world size.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    counted = counted_by_accelerate()
    if counted is None or counted == size:
        return
    noun = "process" if counted == 1 else "processes"
    raise UsageError(
        f"accelerate counted {counted} {noun}, and this world has {size}.",
        "Its batch sizes would not fit, and every rank would get the same batches. On CPUs it "
        "counts 1 unless a backend is set.",
        f'set {CPU_RANKS}=1, pass kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to '
        "Accelerator, or start one process; docs/how-to/accelerate.md and trainer.md have programs "
        "that run.",
    )


def without_accelerates_wrapper(optimizer: Any) -> Any:
    """Return the optimizer inside an AcceleratedOptimizer; others are returned as is.

    accelerate wraps the optimizer before it calls `initialize` if its ParallelismConfig has
    tensor-parallel ranks, and wraps the result again. This function does not import accelerate.
    """
    kind: Any = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    return optimizer.optimizer if isinstance(optimizer, kind) else optimizer


def counted_by_accelerate() -> int | None:
    """Return accelerate's number of processes, or None if it does not use DeepSpeed.

    This function does not import accelerate.
    """
    shared = _shared_state("PartialState")
    if "DEEPSPEED" not in str(shared.get("distributed_type")):
        return None
    count = shared.get("num_processes")
    return count if isinstance(count, int) else None


def accelerate_statements() -> tuple[MeshStatement, ...]:
    """Return the mesh axes of accelerate's ParallelismConfig, if there is one.

    This function does not import accelerate. The data axes are left out because accelerate infers
    them.
    """
    config = _shared_state("AcceleratorState").get("parallelism_config")
    if config is None:
        return ()
    axes = {axis: size for axis, size in axes_of(config).items() if axis in ("sp", "tp")}
    return (MeshStatement("accelerate's ParallelismConfig", axes),) if axes else ()
