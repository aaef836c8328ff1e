"""`deepspeed.utils.tensor_fragment`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.parameters": (
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
            "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
            "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
            "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
        ),
        "deepseek_zero.compat.deepspeed.constants": "fragment_address",
    },
)
