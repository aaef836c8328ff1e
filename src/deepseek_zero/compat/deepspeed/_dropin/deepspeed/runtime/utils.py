"""`deepspeed.runtime.utils`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.utils": (
            "clone_tensors_for_torch_save ensure_directory_exists move_to_device noop_decorator "
            "see_memory_usage set_random_seed"
        ),
        "deepseek_zero.compat.deepspeed.pipe": "partition_balanced partition_uniform",
    },
)
