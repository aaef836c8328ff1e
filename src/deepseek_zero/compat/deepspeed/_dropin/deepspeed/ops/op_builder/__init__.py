"""`deepspeed.ops.op_builder`, under DeepSpeed's path.  No logic: names and where they live."""

from __future__ import annotations

from deepseek_zero.compat.deepspeed.module_stub import stand_in

__getattr__, __dir__ = stand_in(
    __name__,
    {
        "deepseek_zero.compat.deepspeed.ops": (
            "ALL_OPS AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder EvoformerAttnBuilder "
            "FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder "
            "OpBuilder PinMemoryBuilder QuantizerBuilder RandomLTDBuilder SparseAttnBuilder "
            "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder"
        ),
    },
    rooms="all_ops",
)
