"""`deepspeed.profiling.flops_profiler`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.facade.standin import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.facade.flops": (
            "duration_to_string flops_to_string FlopsProfiler get_model_profile macs_to_string params_to_string"
        ),
    },
    rooms="profiler",
)
