"""Activation checkpointing, under the import path of `deepspeed.checkpointing`.

This module only re-exports. To save and load models, see `ZeroEngine.save_checkpoint`.
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
