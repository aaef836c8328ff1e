"""`deepspeed.zero`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.facade.standin import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.zero": (
            "GatheredParameters Init register_external_parameter TiledLinear unregister_external_parameter"
        ),
        "deepseek_zero.facade.views": "ZeroParamStatus ZeroParamType",
        "deepseek_zero.facade.words": "unwrap_model_for_generation",
    },
)
