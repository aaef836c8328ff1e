"""`deepspeed.checkpointing`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.checkpointing": (
            "checkpoint configure is_configured non_reentrant_checkpoint partition_activations_in_checkpoint reset"
        ),
    },
)
