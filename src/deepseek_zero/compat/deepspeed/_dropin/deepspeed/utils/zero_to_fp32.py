"""`deepspeed.utils.zero_to_fp32`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.utils.zero_to_fp32": (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint main"
        ),
    },
)
