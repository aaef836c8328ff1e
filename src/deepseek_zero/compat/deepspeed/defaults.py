"""What DeepSpeed's `initialize` presumes, and what it refuses, of a configuration and a model."""

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
from ...planner.auto_wrap_policy import full_precision_names
from ...sharding.sharded_parameter import owner_of
from . import cpu_adam

_SUMS = "grad_accum_dtype"
DEFAULT_CLIPPING = 1.0  # of DeepSpeed since 2026; this library's own is not to clip


def defaults_of(raw: RawConfig) -> dict[str, Any]:
    """Return the values of DeepSpeed's where they are other than this library's, for keys that are
    not stated.

    Gradients are clipped at 1.0; those of several micro-batches are summed in the dtype of the
    weights, where a stage shards anything.
    """
    values = raw.values
    found = dict[str, Any]()
    # OneBitAdam's ranks have no sum of gradients whose norm could be clipped.
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
    """Round fp32 values to the 16 bits that are computed in, as DeepSpeed casts a model before it
    copies masters of it.

    Local.  Parameters that stay in fp32 are left alone, and those that have no values yet.
    """
    name = low_precision(raw.values)
    if name is None:
        return
    dtype = DTYPES[name]
    whole = full_precision_names(model)
    with torch.no_grad():
        for key, param in model.named_parameters():
            owner = owner_of(param)
            values = (
                owner.slice
                if isinstance(owner, InitShard)
                else param.data
                if owner is None
                else None
            )
            if (
                values is not None
                and values.dtype is torch.float32
                and not values.is_meta
                and key not in whole
            ):
                values.copy_(values.to(dtype))


def refuse_unmanaged(raw: RawConfig, model: nn.Module) -> None:
    """Raise where DeepSpeed has no accumulation that the program manages: beside stages, and beside
    overlapped reductions of whole gradients.
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
    """Raise NotBuiltError where DeepSpeed does: at stage 0 it sums gradients in the dtype of the
    weights alone.
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
    """Raise, as DeepSpeed does at stages 1 and 2, where a gathered bucket would not start at an
    even element.
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
    """Raise, as DeepSpeed does, where an offloaded optimizer must be one of its own and another is
    given.
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
        # DeepSpeed raises ZeRORuntimeException, which is this class here
        raise CheckpointError(
            "zero_force_ds_cpu_optimizer is on, and the offloaded optimizer is a "
            f"{type(optimizer).__name__}.",
            "The key asks for an optimizer of DeepSpeed's for CPUs.",
            "pass deepspeed.ops.adam.DeepSpeedCPUAdam, or leave the key out: any optimizer is fast "
            "here.",
        )


def refuse_untested_optimizer(raw: RawConfig, optimizer: Any) -> None:
    """Raise, as DeepSpeed does, where a configuration that shards says that no optimizer may run
    that was not tested: here one whose class is neither torch's nor this library's.  Where it says
    nothing any may, unlike there.
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
    """Raise for what DeepSpeed's `initialize` refuses and this library's does not."""
    refuse_unmanaged(raw, model)
    refuse_other_sums(raw)
    refuse_odd_bucket(raw)
    refuse_slow_optimizer(raw, optimizer)
    refuse_untested_optimizer(raw, optimizer)
