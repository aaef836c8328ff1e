"""Recomputation of activations, at the import path `deepspeed.checkpointing` (not saving models).
Re-exports only.
"""

from __future__ import annotations

from typing import Any

from .api.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
)
from .base.plugins import contributed_name, contributed_names

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
]
__all__ += contributed_names(__name__)


def __getattr__(name: str) -> Any:
    return contributed_name(__name__, name)
