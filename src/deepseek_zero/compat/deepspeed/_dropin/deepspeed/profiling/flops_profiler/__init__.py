"""`deepspeed.profiling.flops_profiler`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.profiling": (
            "duration_to_string flops_to_string FlopsProfiler get_model_profile macs_to_string params_to_string"
        ),
    },
    rooms="profiler",
)
