"""`deepspeed.runtime.zero.stage3`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.facade.standin import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.facade.estimators": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live model_to_params"
        ),
        "deepseek_zero.facade.words": "unwrap_model_for_generation",
    },
)
