"""DeepSpeed's op builders: what asks whether a compiled kernel can be had gets the answer for what serves in its place.

Nothing here is compiled, so nothing is built: a builder says whether its use is served, by torch or by a tier.  The
table is OPS; a builder's `load()` would hand out a C++ module, and says why there is none.  Reached through the drop-in
(`deepspeed.ops.op_builder`, `deepspeed.ops.aio`).
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..base.errors import NotBuiltError

# Builder: (DeepSpeed's name of the op, what serves here or "")
OPS: dict[str, tuple[str, str]] = {
    "CPUAdamBuilder": ("cpu_adam", "torch's fused Adam"),
    "FusedAdamBuilder": ("fused_adam", "torch's fused Adam"),
    "CPUAdagradBuilder": ("cpu_adagrad", "torch's Adagrad"),
    "CPULionBuilder": ("cpu_lion", "optim/lion.py"),
    "FusedLionBuilder": ("fused_lion", "optim/lion.py"),
    "FusedLambBuilder": ("fused_lamb", "optim/lamb.py"),
    "AsyncIOBuilder": ("async_io", "the disk tier (offload device nvme): threads, no libaio"),
    "UtilsBuilder": ("utils", "torch"),
    "PinMemoryBuilder": ("pin_memory", "torch"),
    "GDSBuilder": ("gds", ""),
    "QuantizerBuilder": ("quantizer", ""),
    "FPQuantizerBuilder": ("fp_quantizer", ""),
    "SparseAttnBuilder": ("sparse_attn", ""),
    "EvoformerAttnBuilder": ("evoformer_attn", ""),
    "TransformerBuilder": ("transformer", ""),
    "StochasticTransformerBuilder": ("stochastic_transformer", ""),
    "InferenceBuilder": ("transformer_inference", ""),
    "RandomLTDBuilder": ("random_ltd", ""),
    "SpatialInferenceBuilder": ("spatial_inference", ""),
}


class OpBuilder:
    """One op of DeepSpeed's: whether its use is served here."""

    NAME = ""
    SERVED_BY = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return bool(self.SERVED_BY)

    def builder_name(self) -> str:
        return type(self).__name__

    def load(self, verbose: bool = True) -> NoReturn:
        """There is no compiled module to hand out."""
        served = f"its use is served by {self.SERVED_BY}" if self.SERVED_BY else "its use is not built"
        raise NotBuiltError(
            f"{type(self).__name__}.load() has no compiled module to return.",
            f"Nothing here needs a compiler; {served}.",
            "use the optimizer or tier itself; docs/reference/deepspeed-names.md lists what there is.",
        )


BUILDERS: dict[str, Any] = {
    builder: type(builder, (OpBuilder,), {"NAME": name, "SERVED_BY": served, "__module__": __name__})
    for builder, (name, served) in OPS.items()
}
ALL_OPS = {builder.NAME: builder for builder in BUILDERS.values()}
__compatible_ops__ = {name: builder().is_compatible() for name, builder in ALL_OPS.items()}


def __getattr__(name: str) -> Any:
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
