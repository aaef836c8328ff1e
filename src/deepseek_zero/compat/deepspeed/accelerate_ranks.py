"""Let accelerate count CPU ranks.

`accelerate.PartialState` takes the number of processes from torch.distributed only if it has chosen
a backend, and it chooses none for CPU ranks that train with DeepSpeed: each counts itself as one
process of one. It chooses before it calls `deepspeed.comm`, and counts after that call. With
DEEPSEEK_ZERO_CPU_RANKS=1 the call fills the gap.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

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
