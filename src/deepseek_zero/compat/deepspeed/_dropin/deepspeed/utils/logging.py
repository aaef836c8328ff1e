"""`deepspeed.utils.logging`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.utils.logging": "log_dist logger set_log_level_from_string",
        "deepseek_zero.compat.deepspeed.utils": "log_dist_once warning_once",
    },
)
