"""deepseek_zero under DeepSpeed's name, for programs that import `deepspeed` (deepseek_zero's docs/how-to/clients.md).

The objects are deepseek_zero's own.  Nothing here does anything: each module says where its names live, they load on
first use, and any other name is an error that says what there is.
"""

from __future__ import annotations

from deepseek_zero.facade.standin import VERSION as __version__
from deepseek_zero.facade.standin import stand_in

__all__ = ["__version__"]

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero": (
            "DeepSpeedConfigError DeepSpeedEngine add_config_arguments dist init_distributed initialize log_dist logger"
        ),
        "deepseek_zero.facade.accelerator": "get_accelerator",
        "deepseek_zero.facade.words": "DeepSpeedOptimizer ZeROOptimizer",
        "deepseek_zero.optim.lr_schedules": "add_tuning_arguments",
    },
    rooms="accelerator checkpoint checkpointing comm launcher ops runtime utils zero",
)
