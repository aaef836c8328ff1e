"""Register what compatibility packages add to other packages (base/plugins.py)."""

from __future__ import annotations

from ..base.plugins import (
    CHECKPOINT_LAYOUTS,
    COMMANDS,
    DIALECT,
    EVERY_OTHER,
    contribute,
    contribute_names,
)

_DEEPSPEED = f"{__package__}.deepspeed"

contribute(CHECKPOINT_LAYOUTS, f"{_DEEPSPEED}.checkpoint")
contribute(COMMANDS, f"{_DEEPSPEED}.commands")
contribute(DIALECT, f"{_DEEPSPEED}.dialect")
contribute_names(
    "deepseek_zero",
    {
        "DeepSpeedEngine": f"{_DEEPSPEED}.engine",
        "add_config_arguments": f"{_DEEPSPEED}.arguments",
        "install_as_deepspeed": f"{_DEEPSPEED}.dropin",
        "is_dropin_active": f"{_DEEPSPEED}.dropin",
        "uninstall_as_deepspeed": f"{_DEEPSPEED}.dropin",
        EVERY_OTHER: f"{_DEEPSPEED}.package",
    },
)
contribute_names(
    "deepseek_zero.checkpointing",
    {
        "get_cuda_rng_tracker": f"{_DEEPSPEED}.random_streams",
        "model_parallel_cuda_manual_seed": f"{_DEEPSPEED}.random_streams",
        "model_parallel_reconfigure_tp_seed": f"{_DEEPSPEED}.random_streams",
    },
)
contribute_names(
    "deepseek_zero.utils.zero_to_fp32",
    {
        "convert_zero_checkpoint_to_fp32_state_dict": f"{_DEEPSPEED}.zero_to_fp32",
        "convert_zero_checkpoint_to_state_dict": f"{_DEEPSPEED}.zero_to_fp32",
        "get_fp32_state_dict_from_zero_checkpoint": f"{_DEEPSPEED}.zero_to_fp32",
        "get_model_state_file": f"{_DEEPSPEED}.zero_to_fp32",
        "get_optim_files": f"{_DEEPSPEED}.zero_to_fp32",
        "load_state_dict_from_zero_checkpoint": f"{_DEEPSPEED}.zero_to_fp32",
        EVERY_OTHER: f"{_DEEPSPEED}.zero_to_fp32",
    },
)
contribute_names("deepseek_zero.comm", {EVERY_OTHER: f"{_DEEPSPEED}.comm"})
