"""`deepspeed.utils`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.utils": (
            "get_z3_leaf_modules log_dist logger RepeatingLoader safe_get_full_fp32_param safe_get_full_grad "
            "safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
            "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
            "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
            "safe_set_local_optimizer_state safe_update_full_grad_vectorized see_memory_usage "
            "set_log_level_from_string set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
        ),
        "deepseek_zero.compat.deepspeed.constants": "fragment_address",
        "deepseek_zero.compat.deepspeed.utils": (
            "OnDevice instrument_w_nvtx log_dist_once recursive_getattr recursive_setattr"
        ),
    },
    rooms=("groups init_on_device logging module_utils numa nvtx tensor_fragment timer torch zero_to_fp32"),
)
