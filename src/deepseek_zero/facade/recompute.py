"""DeepSpeed's `deepspeed.checkpointing`: recomputation of activations, on torch.utils.checkpoint.

Where recomputation keeps its inputs (partitioned, on the host, contiguous) is a later part; asking for it is an error.
Re-exported by `deepseek_zero.checkpointing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..base.errors import NotBuiltError, UsageError

PLACES = ("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu", "profile")
WITHOUT_EFFECT = (
    "mpu_",
    "deepspeed_config",
    "num_checkpoints",
    "synchronize",
)  # sizes and hints for what PLACES would do


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` and compute its activations again in backward instead of keeping them."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, **places: Any) -> None:
    """Accept DeepSpeed's arguments; the ones that would move activations elsewhere raise when they are set."""
    unknown = [name for name in places if name not in (*PLACES, *WITHOUT_EFFECT)]
    if unknown:
        raise UsageError(
            f"checkpointing.configure has no argument {', '.join(unknown)}.",
            fix=f"use {', '.join((*PLACES, *WITHOUT_EFFECT))}.",
        )
    wanted = [name for name in PLACES if places.get(name)]
    if wanted:
        raise NotBuiltError(
            f"checkpointing.configure({', '.join(f'{name}=True' for name in wanted)}) is not built yet.",
            "Recomputation works; moving or profiling its inputs is a later part.",
            "leave these arguments out.",
        )


def is_configured() -> bool:
    """True: recomputation needs no configuration here."""
    return True


def reset() -> None:
    """Nothing is kept between steps, so there is nothing to reset."""
