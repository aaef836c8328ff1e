"""DeepSpeed's `deepspeed.ops`: optimizer classes and op builders.

Each optimizer rule has one class for CPU and GPU, which the registry (optimizers/registry.py)
creates from DeepSpeed's arguments. No op is compiled. A builder returns whether torch or this
library provides the function of the op (OPS), and its `load()` raises, because there is no C++
module.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import isroutine
from itertools import takewhile
from typing import Any, NoReturn

from torch.optim import AdamW

from ...base.errors import NotBuiltError, UsageError
from ...optim.sharded import ShardedOptimizer
from ...optimizers import cpu_adam
from ...optimizers.registry import resolve_optimizer


class _Made(type):
    """Metaclass of DeepSpeed's optimizer classes.

    Calling such a class returns an optimizer of torch or of this library, and isinstance()
    recognizes it.
    """

    rule: str
    lr: float
    # DeepSpeed's positional arguments after the parameters
    order: str

    def __call__(cls, *params: Any, **options: Any) -> Any:
        derived = list(takewhile(lambda kind: "rule" not in vars(kind), cls.__mro__))
        if any(isroutine(value) for kind in derived for value in vars(kind).values()):
            raise NotBuiltError(
                f"{cls.__name__} adds methods to DeepSpeed's {cls.__mro__[len(derived)].__name__}.",
                "A call of that class returns an optimizer of another class, without the methods "
                "of a derived one.",
                "derive the class from one of torch.optim, for example AdamW.",
            )
        given = params[0] if params else options.pop("model_params", options.pop("params", None))
        named = dict(zip(cls.order.split(), params[1:], strict=False))
        settings = {"lr": cls.lr, **named, **options}
        if settings.get("max_grad_norm") == 0:  # DeepSpeed's default: no clipping
            del settings["max_grad_norm"]
        return cls.made(given, settings)

    def made(cls, params: Any, options: dict[str, Any]) -> Any:
        """Create the optimizer.

        Args:
            params: Parameters or parameter groups.
            options: Keyword arguments of DeepSpeed's class.
        """
        return resolve_optimizer(cls.rule, options).build(params)

    def __instancecheck__(cls, instance: object) -> bool:
        found = instance.inner if isinstance(instance, ShardedOptimizer) else instance
        return any(kind.__name__.removesuffix("W") == cls.rule for kind in found.__class__.__mro__)


class _MadeOnCpu(_Made):
    """Metaclass of DeepSpeedCPUAdam, whose optimizers have more methods than torch's."""

    def made(cls, params: Any, options: dict[str, Any]) -> Any:
        """Create the optimizer.

        Args:
            params: Parameters or parameter groups.
            options: Keyword arguments of DeepSpeed's class.

        Raises:
            UsageError: `amsgrad` is true.
        """
        if options.pop("amsgrad", False):
            raise UsageError(
                "DeepSpeedCPUAdam does not support the AMSGrad variant.",
                fix="use torch.optim.AdamW.",
            )
        own: dict[str, Any] = {
            name: options.pop(name)
            for name in ("fp32_optimizer_states", "bias_correction")
            if name in options
        }
        spec = resolve_optimizer(cls.rule, options)
        kind = cpu_adam.AdamW if issubclass(spec.cls, AdamW) else cpu_adam.Adam
        made = replace(spec, cls=kind).build(params)
        vars(made).update(own)
        if not own.get("bias_correction", True):
            for group in made.param_groups:
                group["bias_correction"] = False
        return made


class DeepSpeedCPUAdam(metaclass=_MadeOnCpu):
    """DeepSpeed's Adam class for the CPU; a call returns AdamW, or Adam without `adamw_mode`.

    The default weight decay is 0.
    """

    rule = "Adam"
    lr = 1e-3
    order = "lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states"


class FusedAdam(metaclass=_Made):
    """DeepSpeed's Adam class for the GPU; a call returns AdamW, or Adam without `adam_w_mode`.

    The default weight decay is 0.
    """

    rule = "Adam"
    lr = 1e-3
    order = "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"


class DeepSpeedCPUAdagrad(metaclass=_Made):
    """DeepSpeed's Adagrad class; a call returns Adagrad for CPU or GPU."""

    rule = "Adagrad"
    lr = 1e-2
    order = "lr eps weight_decay amsgrad fp32_optimizer_states"


class DeepSpeedCPULion(metaclass=_Made):
    """DeepSpeed's Lion class for the CPU; a call returns Lion for CPU or GPU."""

    rule = "Lion"
    lr = 1e-3
    order = "lr betas weight_decay fp32_optimizer_states"


class FusedLion(metaclass=_Made):
    """DeepSpeed's Lion class for the GPU; a call returns Lion for CPU or GPU."""

    rule = "Lion"
    lr = 1e-4
    order = "lr betas weight_decay set_grad_none"


class FusedLamb(metaclass=_Made):
    """DeepSpeed's LAMB class; a call returns LAMB for CPU or GPU."""

    rule = "Lamb"
    lr = 1e-3
    order = (
        "lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff "
        "min_coeff amsgrad"
    )


# builder -> (DeepSpeed's name of the op, its replacement or "")
OPS: dict[str, tuple[str, str]] = {
    "CPUAdamBuilder": ("cpu_adam", "torch's fused Adam"),
    "FusedAdamBuilder": ("fused_adam", "torch's fused Adam"),
    "CPUAdagradBuilder": ("cpu_adagrad", "torch's Adagrad"),
    "CPULionBuilder": ("cpu_lion", "optimizers/lion.py"),
    "FusedLionBuilder": ("fused_lion", "optimizers/lion.py"),
    "FusedLambBuilder": ("fused_lamb", "optimizers/lamb.py"),
    "AsyncIOBuilder": ("async_io", "the disk tier (offload device nvme): threads, no libaio"),
    "UtilsBuilder": ("utils", "torch"),
    "PinMemoryBuilder": ("pin_memory", "torch"),
    "GDSBuilder": ("gds", ""),
    "QuantizerBuilder": ("quantizer", ""),
    "FPQuantizerBuilder": ("fp_quantizer", ""),
    "SparseAttnBuilder": ("sparse_attn", "attention/: torch's attention kernels, tile by tile"),
    "EvoformerAttnBuilder": ("evoformer_attn", ""),
    "TransformerBuilder": ("transformer", ""),
    "StochasticTransformerBuilder": ("stochastic_transformer", ""),
    "InferenceBuilder": ("transformer_inference", ""),
    "RandomLTDBuilder": ("random_ltd", ""),
    "SpatialInferenceBuilder": ("spatial_inference", ""),
}


class OpBuilder:
    """Describe one of DeepSpeed's compiled ops and whether this library replaces it."""

    NAME = ""
    SERVED_BY = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether this library or torch provides the function of the op."""
        return bool(self.SERVED_BY)

    def builder_name(self) -> str:
        """Return the name of the builder's class."""
        return type(self).__name__

    def load(self, verbose: bool = True) -> NoReturn:
        """Raise NotBuiltError, because there is no compiled module."""
        served = (
            f"its use is served by {self.SERVED_BY}" if self.SERVED_BY else "its use is not built"
        )
        raise NotBuiltError(
            f"{type(self).__name__}.load() has no compiled module to return.",
            f"Nothing here needs a compiler; {served}.",
            "use the optimizer or tier itself; docs/reference/deepspeed-names.md lists what there "
            "is.",
        )


BUILDERS: dict[str, Any] = {
    builder: type(
        builder, (OpBuilder,), {"NAME": name, "SERVED_BY": served, "__module__": __name__}
    )
    for builder, (name, served) in OPS.items()
}
globals().update(BUILDERS)
ALL_OPS = {builder.NAME: builder for builder in BUILDERS.values()}
__compatible_ops__ = {name: builder().is_compatible() for name, builder in ALL_OPS.items()}
