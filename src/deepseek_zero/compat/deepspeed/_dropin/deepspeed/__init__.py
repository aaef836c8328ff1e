"""deepseek_zero under DeepSpeed's name, for programs that import `deepspeed` (deepseek_zero's docs/how-to/clients.md).

The objects are deepseek_zero's own.  Nothing here does anything: each module says where its names live, they load on
first use, and any other name is an error that says what there is.
"""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import VERSION as __version__
from deepseek_zero.compat.deepspeed.module_stub import stand_in

__all__ = ["__version__"]

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero": (
            "add_config_arguments DeepSpeedConfigError DeepSpeedEngine dist init_distributed initialize log_dist logger"
        ),
        "deepseek_zero.compat.deepspeed.accelerator": "get_accelerator",
        "deepseek_zero.compat.deepspeed.utils": "OnDevice",
        "deepseek_zero.compat.deepspeed.constants": (
            "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER DeepSpeedOptimizer HAS_TRITON LAMB_OPTIMIZER "
            "LION_OPTIMIZER MUON_OPTIMIZER TORCH_DISTRIBUTED_DEFAULT_PORT ZeROOptimizer"
        ),
        "deepseek_zero.compat.deepspeed.arguments": "add_tuning_arguments",
        "deepseek_zero.compat.deepspeed.pipe": "PipelineModule",
        "deepseek_zero.compat.deepspeed.pipe_engine": "PipelineEngine",
        "deepseek_zero.compat.deepspeed.before_initialize": "tp_model_init",
    },
    rooms=(
        "accelerator checkpoint checkpointing comm constants elasticity launcher monitor ops pipe profiling "
        "runtime sequence utils zero"
    ),
)
