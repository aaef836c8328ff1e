"""`deepspeed.runtime.zero.stage3`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.estimators": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live model_to_params"
        ),
        "deepseek_zero.compat.deepspeed.utils": "unwrap_model_for_generation",
    },
)
