"""`deepspeed.zero`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.zero": (
            "GatheredParameters Init register_external_parameter TiledLinear unregister_external_parameter"
        ),
        "deepseek_zero.compat.deepspeed.parameters": "ZeroParamStatus ZeroParamType",
        "deepseek_zero.compat.deepspeed.utils": "unwrap_model_for_generation",
    },
)
