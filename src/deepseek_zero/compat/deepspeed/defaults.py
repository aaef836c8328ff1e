"""Defaults and checks of DeepSpeed's `initialize` that differ from this library's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from ... import optimizers
from ...api.precision import DTYPES, low_precision
from ...base.errors import CheckpointError, NotBuiltError, UsageError
from ...config.problems import lookup
from ...config.raw_config import RawConfig
from ...extensions.zero_init import InitShard
from ...optimizers import cpu_adam
from ...planner.auto_wrap_policy import full_precision_names
from ...sharding.sharded_parameter import owner_of

_SUMS = "grad_accum_dtype"
# DeepSpeed's default since 2026; this library's own default is no clipping.
DEFAULT_CLIPPING = 1.0


def defaults_of(raw: RawConfig) -> dict[str, Any]:
    """Return DeepSpeed's defaults for missing keys whose default is different here.

    Gradients are clipped at 1.0. At stages 1 to 3 the gradients of micro-batches are accumulated in
    the dtype of the weights.
    """
    values = raw.values
    found = dict[str, Any]()
    # OneBitAdam does not reduce gradients, so there is no global norm to clip.
    exchanges = str(lookup(values, "optimizer.type", "")).lower() == "onebitadam"
    if "gradient_clipping" not in values and "gradient_clipping" not in raw.autos and not exchanges:
        found["gradient_clipping"] = DEFAULT_CLIPPING
    types = values.get("data_types") or {}
    if (
        (name := low_precision(raw.values))
        and lookup(values, "zero_optimization.stage")
        and not types.get(_SUMS)
    ):
        found["data_types"] = {**types, _SUMS: name}
    return found


def round_values(model: nn.Module, raw: RawConfig) -> None:
    """Round a model's fp32 values to the 16-bit dtype of the computation.

    DeepSpeed casts the model before it copies the main weights. Parameters that stay in fp32 or
    have no values yet are not changed.

    Args:
        model: Model whose parameters are changed in place.
        raw: Configuration that defines the dtype of the computation.
    """
    name = low_precision(raw.values)
    if name is None:
        return
    dtype = DTYPES[name]
    whole = full_precision_names(model)
    with torch.no_grad():
        for key, param in model.named_parameters():
            owner = owner_of(param)
            if key in whole or not isinstance(owner, InitShard | None):
                continue
            values = param.data if owner is None else owner.slice
            if values.dtype is torch.float32 and not values.is_meta:
                values.copy_(values.to(dtype))


def cast_buffers(model: nn.Module, raw: RawConfig) -> None:
    """Cast a model's floating-point buffers to the 16-bit dtype of the computation.

    Unlike in DeepSpeed, the buffers of batch norms and those that a module declares
    (`_keep_in_fp32_modules`) stay in fp32, like the parameters of these modules.

    Args:
        model: Model whose buffers are changed in place.
        raw: Configuration that defines the dtype of the computation.
    """
    name = low_precision(raw.values)
    if name is None:
        return
    whole = full_precision_names(model, nn.Module.named_buffers)
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point() and key not in whole:
            buffer.data = buffer.data.to(DTYPES[name])


def refuse_unmanaged(raw: RawConfig, model: nn.Module) -> None:
    """Raise for managed_gradient_accumulation=false if DeepSpeed does not support it.

    It supports neither pipeline parallelism nor overlap_comm at stages 0 and 1 in this mode.

    Args:
        raw: Configuration to check.
        model: Model of `initialize`, which may be a `PipelineModule`.

    Raises:
        UsageError: The configuration has such a combination.
    """
    if raw.values.get("managed_gradient_accumulation", True):
        return
    zero = raw.values.get("zero_optimization", {})
    if hasattr(model, "mesh_statement"):
        what = "managed_gradient_accumulation=false is not supported with pipeline parallelism."
    elif zero.get("overlap_comm") is True and zero.get("stage", 0) < 2:
        what = (
            "managed_gradient_accumulation=false supports overlap_comm only with ZeRO stage 2 or 3."
        )
    else:
        return
    raise UsageError(what, fix="leave one of the two keys out.")


def refuse_other_sums(raw: RawConfig) -> None:
    """Raise an error if stage 0 would accumulate gradients in another dtype than the weights'.

    Raises:
        NotBuiltError: DeepSpeed does not support it, either.
    """
    asked = lookup(raw.values, "data_types.grad_accum_dtype")
    if asked is None or lookup(raw.values, "zero_optimization.stage", 0) != 0:
        return
    computes = low_precision(raw.values) or "fp32"
    if asked in ("fp16", "bf16", "fp32") and asked != computes:
        raise NotBuiltError(
            f"unsupported mix of model_dtype={computes} and grad_accum_dtype={asked} at stage 0.",
            "DeepSpeed refuses it, too.",
            "leave data_types.grad_accum_dtype out, or use stage 1.",
        )


def refuse_odd_bucket(raw: RawConfig) -> None:
    """Raise an error if allgather_bucket_size is odd at stage 1 or 2, as DeepSpeed does.

    Raises:
        UsageError: A gathered bucket would not start at an even element.
    """
    zero = raw.values.get("zero_optimization", {})
    size = zero.get("allgather_bucket_size", 0)
    if zero.get("stage") in (1, 2) and size % 2:
        raise UsageError(
            "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2; it is "
            f"{size:g}.",
            fix="choose an even number.",
        )


def refuse_slow_optimizer(raw: RawConfig, optimizer: Any) -> None:
    """Raise an error if `zero_force_ds_cpu_optimizer` is set and the optimizer is not DeepSpeed's.

    Only offloaded optimizers are checked.

    Args:
        raw: Configuration to check.
        optimizer: The optimizer that was passed to `initialize`.

    Raises:
        CheckpointError: The optimizer is not one of DeepSpeed's CPU optimizers. DeepSpeed raises
            ZeRORuntimeException, which is another name of this class.
    """
    is_offloaded = (
        lookup(raw.values, "zero_optimization.offload_optimizer.device", "none") != "none"
    )
    if (
        raw.get("zero_force_ds_cpu_optimizer") is not True
        or not is_offloaded
        or not isinstance(optimizer, Optimizer)
    ):
        return
    if not isinstance(optimizer, cpu_adam.Adam | cpu_adam.AdamW | Adagrad | optimizers.Lion):
        # DeepSpeed raises ZeRORuntimeException, which is this class here.
        raise CheckpointError(
            "zero_force_ds_cpu_optimizer is on, and the offloaded optimizer is a "
            f"{type(optimizer).__name__}.",
            "The key requires one of DeepSpeed's CPU optimizers.",
            "pass deepspeed.ops.adam.DeepSpeedCPUAdam, or leave the key out: any optimizer is fast "
            "here.",
        )


def refuse_untested_optimizer(raw: RawConfig, optimizer: Any) -> None:
    """Raise an error if untested optimizers are disallowed and the optimizer is untested.

    An optimizer is tested if its class is one of torch's or of this library's. Unlike in DeepSpeed,
    the check requires that zero_allow_untested_optimizer is set to false explicitly.

    Args:
        raw: Configuration to check.
        optimizer: The optimizer that was passed to `initialize`.

    Raises:
        UsageError: The optimizer is untested and the stage shards its states.
    """
    if raw.get("zero_allow_untested_optimizer") is not False or not lookup(
        raw.values, "zero_optimization.stage", 0
    ):
        return
    kind = type(optimizer)
    if isinstance(optimizer, Optimizer) and kind.__module__.partition(".")[0] not in _TESTED:
        raise UsageError(
            "zero_allow_untested_optimizer is false, and the optimizer is a "
            f"{kind.__module__}.{kind.__qualname__}.",
            f"Sharded states are tested with the optimizers of {' and '.join(_TESTED)}.",
            "set the key to true, or leave it out: any optimizer that updates element by element "
            "is right.",
        )


_TESTED = ("torch", __name__.partition(".")[0])


def refuse(raw: RawConfig, model: nn.Module, optimizer: Any) -> None:
    """Raise an error for arguments that only DeepSpeed's `initialize` rejects.

    Args:
        raw: Configuration to check.
        model: Model that was passed to `initialize`.
        optimizer: The optimizer that was passed to `initialize`.
    """
    refuse_unmanaged(raw, model)
    refuse_other_sums(raw)
    refuse_odd_bucket(raw)
    refuse_slow_optimizer(raw, optimizer)
    refuse_untested_optimizer(raw, optimizer)
