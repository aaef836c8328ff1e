"""Dtype of each state, and casts between main weights and weights.

An fp32 main weight may be stored as the nearest bf16 weight and a remainder of 16 bits, so that it
needs only 2 bytes in addition to its weight::

    weight    = the main weight rounded half up in magnitude (as `cast_master` does)
    remainder = the low 16 bits of the main weight, read as a signed integer
    master    = (bits of the weight << 16) + remainder

Rounding up carries into the upper half exactly if the lower half, read as signed, is negative. The
sum therefore restores the bits of every finite number and of infinity, even of the largest finite
numbers, whose weight is infinity. NaN stays NaN in both, but its payload is not kept. All functions
process tiles that stay in a core's cache, in few passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.device import CPU, PerDevice
from ..kernels.rules import known_rule

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Policy:
    """The dtypes in which one engine computes, sends, accumulates and stores.

    Attributes:
        compute: The dtype of weights in forward and backward. None: each parameter keeps its own.
        reduce: The dtype in which gradients are sent. None: their own, without rounding.
        accumulate: The dtype of a gradient that accumulates micro-batches.
        autocast: The dtype of the torch.autocast context around forward. None: no autocast.
        auto_cast: Whether to cast floating-point inputs to `compute`.
        master: Storage of a bf16 weight's main weight: "fp32", "split" (only the remainder, see
            `split`), or "none" (`compact.py` rounds the weight stochastically).
        moments: Storage of moments: "fp32", "bf16" or "8bit".
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    auto_cast: bool = True
    master: str = "split"
    moments: str = "fp32"

    def weight_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of dtype `own` computes.

        Integers and quantized storage keep their dtype.
        """
        return self.compute if self.compute is not None and own.is_floating_point else own

    def master_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype of the main weight: fp32 for 16-bit weights, else the weight's."""
        return torch.float32 if weight in LOW_PRECISION else weight

    def stored_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype in which a main weight is stored.

        For a bf16 weight it depends on `master`: int16 for a remainder.
        """
        whole = self.master_dtype(weight)
        return (
            {"split": torch.int16, "fp32": whole, "none": weight}[self.master]
            if weight == torch.bfloat16
            else whole
        )

    def grad_dtype(self, weight: torch.dtype, accumulation: int) -> torch.dtype:
        """Return the dtype of a reduced gradient.

        Without accumulation it is the weight's dtype (summed in fp32, rounded once). With
        accumulation, gradients of 16-bit weights have dtype `accumulate`.

        Args:
            weight: The dtype of the weight.
            accumulation: Number of micro-batches per step.
        """
        return weight if accumulation == 1 or weight not in LOW_PRECISION else self.accumulate

    def lifted(self) -> Policy:
        """Return a copy with fp32 compute, for a unit that precision "auto" promotes."""
        return replace(self, compute=torch.float32)


# Elements per tile; on the CPU, a tile and its scratch fit into a core's cache
CAST_TILE = PerDevice(cpu=1 << 17, accelerator=1 << 24)
# The bits of the only NaN in weights, main weights and optimizer states (docs/design/updates.md)
CANONICAL_NAN = 0x7FC00000
# Tensors, because torch creates one from a Python number in each call
HALF = torch.tensor(0x8000, dtype=torch.int32, device="cpu")
SIXTEEN = torch.tensor(16, dtype=torch.int32, device="cpu")


def cast_master(master: Tensor, weight: Tensor) -> None:
    """Cast an fp32 main weight to the weight's dtype.

    bf16 rounds half up in magnitude: half of the last kept bit is added to the magnitude, which is
    then truncated. This differs from round-to-nearest-even only on exact ties, and makes fp32 =
    bf16 + 16 bits lossless (`split`).

    Args:
        master: The main weight, flat.
        weight: Output, flat, of any floating-point dtype.
    """
    if weight.dtype != torch.bfloat16 or master.dtype != torch.float32:
        weight.copy_(master)
        return
    tile = CAST_TILE.on(master.device)
    scratch = torch.empty(min(tile, master.numel()), dtype=torch.int32, device=master.device)
    for values, upper in zip(master.split(tile), weight.view(torch.int16).split(tile), strict=True):
        bits = values.view(torch.int32)
        rounded = scratch[: values.numel()]
        if has_nan(values):
            bits = rounded.copy_(bits)
            settle_nan(bits)
        # Adding 0x8000 to the magnitude carries into the kept half exactly if the lower half is at
        # least one half. Infinity, whose lower half is zero, stays the same.
        torch.add(bits, HALF, out=rounded)
        upper.copy_(rounded.bitwise_right_shift_(SIXTEEN))


def has_nan(values: Tensor) -> bool:
    """Return whether there may be a NaN, in one pass without a mask.

    On an accelerator the result is always True, because a check would wait for the device.
    """
    if values.device.type != "cpu":
        return True
    total = float(values.sum())
    return total != total


def settle_nan(bits: Tensor) -> None:
    """Replace every NaN with the canonical NaN, in place.

    Its low half is zero, so rounding preserves it. `bits` are the bits of fp32 values as int32.
    """
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits.masked_fill_(is_nan, CANONICAL_NAN)


def settle_update(inner: Optimizer, hypers: Mapping[str, Any], param: Tensor) -> None:
    """Replace every NaN that PyTorch wrote in an update by the NaN that kernels write.

    Nothing changes if the device is not a CPU, or if no kernel has the formula of the update.

    Args:
        inner: The optimizer, which has updated `param`; its states are changed, too.
        hypers: The hyper-parameters of the update.
        param: A parameter of the optimizer. Without a gradient, it was not updated.
    """
    if param.grad is None or param.device != CPU or param.dtype != torch.float32:
        return
    rule = known_rule(inner, hypers)
    if rule is None:
        return
    state = inner.state.get(param, {})
    names = rule.variant(hypers, True).states
    values = [state[name] for name in names if state.get(name) is not None]
    if has_nan(param.data) or (rule.hides_nan and any(map(has_nan, values))):
        for each in (param.data, *values):
            settle_nan(each.view(torch.int32))


def scratch_numel(device: torch.device, numel: int) -> int:
    """Return the number of scratch elements (4 bytes each) that `join` uses.

    Args:
        device: The device of the main weight.
        numel: Number of elements to join.
    """
    return min(CAST_TILE.on(device), numel)


def join(
    weight: Tensor,
    remainder: Tensor,
    out: Tensor,
    scratch: Tensor | None = None,
    *,
    is_exposed: bool = True,
) -> None:
    """Restore an fp32 main weight from a bf16 weight and its remainder.

    All tensors are flat and of one length.

    Args:
        weight: Flat bf16 tensor: the rounded main weight.
        remainder: Flat int16 tensor: the remainder that `split` wrote.
        out: Output, fp32.
        scratch: Scratch of `scratch_numel` elements; None allocates it.
        is_exposed: Whether the program may have changed the weight without the remainder, for
            example by a mask. The sum can then be NaN although the weight is not; in that case the
            main weight is the weight.
    """
    tile = scratch_numel(out.device, out.numel())
    if scratch is None:
        scratch = torch.empty(tile, dtype=torch.int32, device=out.device)
    wide = scratch.view(torch.int32)[:tile]
    parts = (weight, weight.view(torch.int16), remainder, out, out.view(torch.int32))
    for values, upper, lower, master, bits in zip(
        *(part.split(max(tile, 1)) for part in parts), strict=True
    ):
        bits.copy_(lower)
        bits.add_(wide[: upper.numel()].copy_(upper), alpha=1 << 16)
        if is_exposed and has_nan(master):
            master.copy_(torch.where(master.isnan(), values.float(), master))


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split an fp32 main weight into a bf16 weight and an int16 remainder.

    All tensors are flat.

    Args:
        master: Flat fp32 main weight, which is overwritten.
        weight: Output, bf16.
        remainder: Output, int16.
    """
    tile = max(CAST_TILE.on(master.device), 1)
    parts = (master, master.view(torch.int32), weight.view(torch.int16), remainder)
    for values, bits, upper, lower in zip(*(part.split(tile) for part in parts), strict=True):
        if has_nan(values):
            settle_nan(bits)
        lower.copy_(bits)  # The conversion keeps the low half of an integer
        upper.copy_(bits.add_(HALF).bitwise_right_shift_(SIXTEEN))
