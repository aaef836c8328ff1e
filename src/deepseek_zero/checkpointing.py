"""DeepSpeed's `deepspeed.checkpointing`: recomputing activations (not saving models).  Re-exports only."""

from __future__ import annotations

from .compat.deepspeed.activation_checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
)

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
]
