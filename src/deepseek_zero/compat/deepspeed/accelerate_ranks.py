"""What accelerate says of this process, and how it counts CPU ranks.

`accelerate.PartialState` takes the number of processes from torch.distributed only if it has chosen
a backend, and it chooses none for CPU ranks that train with DeepSpeed: each counts itself as one
process of one. It chooses before it calls `deepspeed.comm`, and counts after that call. With
DEEPSEEK_ZERO_CPU_RANKS=1 the call fills the gap.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ...base.errors import UsageError
from ...base.mesh import axes_of
from ...engine.mesh_statements import MeshStatement

CPU_RANKS = "DEEPSEEK_ZERO_CPU_RANKS"


def let_accelerate_count() -> None:
    """Give accelerate's state this group's backend if it has none, and a user asked for it.
    Local.
    """
    if os.environ.get(CPU_RANKS) != "1" or not dist.is_initialized():
        return
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})  # what every PartialState has for its attributes
    is_unfinished = "backend" in shared and "num_processes" not in shared
    if is_unfinished and shared["backend"] is None and dist.get_world_size() > 1:
        shared["backend"] = dist.get_backend()


def refuse_miscount() -> None:
    """Raise where accelerate drives this process as DeepSpeed's launcher and counted another world.

    accelerate counts before DeepSpeed starts the group, and takes CPU ranks for one process each
    unless it is told how they talk.  Its batch sizes are then those of one process, and its loaders
    give every rank the same batches: an error, even where the sizes happen to fit.  Local, and the
    same on every rank.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    counted = counted_by_accelerate()
    if counted is None or counted == size:
        return
    raise UsageError(
        f"accelerate counted {counted} {'process' if counted == 1 else 'processes'}, and this "
        f"world has {size}.",
        "Its batch sizes would not fit, and every rank would be given the same batches.  On CPUs "
        "it counts 1 unless it is told how they talk.",
        f'set {CPU_RANKS}=1, pass kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to '
        "Accelerator, or start one process; docs/how-to/accelerate.md and trainer.md have programs "
        "that run.",
    )


def without_accelerates_wrapper(optimizer: Any) -> Any:
    """Return the optimizer in an AcceleratedOptimizer: accelerate wraps it before it calls
    `initialize` where its ParallelismConfig has tensor-parallel ranks, and wraps what comes back
    again.  accelerate is not imported for it.
    """
    kind: Any = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    return optimizer.optimizer if isinstance(optimizer, kind) else optimizer


def counted_by_accelerate() -> int | None:
    """Return accelerate's number of processes where it was started for DeepSpeed, else None;
    accelerate is not imported for it.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    if not isinstance(shared, Mapping) or "DEEPSPEED" not in str(shared.get("distributed_type")):
        return None
    count = shared.get("num_processes")
    return count if isinstance(count, int) else None


def accelerate_statements() -> tuple[MeshStatement, ...]:
    """What accelerate's ParallelismConfig says, where accelerate runs in this process.  It is not
    imported for it.

    Its data axes are left out: accelerate fills them in by itself.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    config = (getattr(state, "_shared_state", None) or {}).get("parallelism_config")
    if config is None:
        return ()
    axes = {axis: size for axis, size in axes_of(config).items() if axis in ("sp", "tp")}
    return (MeshStatement("accelerate's ParallelismConfig", axes),) if axes else ()
