"""How many processes a client counted, against how many there are.

accelerate counts before DeepSpeed starts the group, and takes CPU ranks for one process each unless it is told how they
talk.  Its batch sizes are then those of one process, and its loaders give every rank the same batches: an error, even
where the sizes happen to fit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..base.errors import UsageError


def refuse_miscount() -> None:
    """Raise where accelerate drives this process as DeepSpeed's launcher and counted another world.  Local, and the
    same on every rank.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    counted = _counted_by_accelerate()
    if counted is None or counted == size:
        return
    raise UsageError(
        f"accelerate counted {counted} {'process' if counted == 1 else 'processes'}, and this world has {size}.",
        "Its batch sizes would not fit, and every rank would be given the same batches.  On CPUs it counts 1 unless it "
        "is told how they talk.",
        'pass kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to Accelerator, or start one process; '
        "docs/how-to/accelerate.md and trainer.md have programs that run.",
    )


def _counted_by_accelerate() -> int | None:
    """Its number of processes, where it was started for DeepSpeed; asked of a module that others have imported."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    if not isinstance(shared, Mapping) or "DEEPSPEED" not in str(shared.get("distributed_type")):
        return None
    count = shared.get("num_processes")
    return count if isinstance(count, int) else None
