"""`deepspeed.runtime.sequence_parallel.ulysses_sp`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.sequence_tiles": (
            "sequence_tiled_compute SequenceTiledCompute TiledFusedLogitsLoss TiledMLP"
        ),
        "deepseek_zero.compat.deepspeed.sequence_ulysses": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    },
)
