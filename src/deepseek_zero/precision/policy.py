"""The number format of each state, and the casts between master and weight.

Owns dtypes and casts; knows nothing of ranks.  An fp32 master may be kept as the bf16 number
nearest to it and 16 more bits, so that it needs 2 bytes beside its weight:

    weight    = the master rounded half up in magnitude (what cast_master writes)
    remainder = the low 16 bits of the master, read as a signed integer
    master    = (bits of the weight << 16) + remainder

Rounding up carries into the upper half exactly when the lower half, read as signed, is negative, so
the sum gives the
bits back: of every finite number, and of infinity (the largest finite numbers round to it and come
back).  NaN stays NaN in both; which NaN is not kept.  Everything runs in tiles that stay in a
core's cache, in few passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.device import PerDevice

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Policy:
    """Dtypes of one engine.

    compute: dtype of weights in forward and backward, None = each parameter keeps its own. reduce:
    dtype that gradients travel in, None = the dtype they have (no rounding on the way). accumulate:
    dtype of a gradient that sums micro-batches. autocast: dtype of a torch.autocast region around
    forward, None = no region. auto_cast: cast
    floating inputs to compute. master: how a bf16 weight's master is kept: "fp32" whole, "split"
    only what the weight lacks (`split`), "none" not at all (compact.py rounds the weight by
    chance). moments: bits they are kept in, "fp32", "bf16" or "8bit".
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    auto_cast: bool = True
    master: str = "split"
    moments: str = "fp32"

    def weight_dtype(self, own: torch.dtype) -> torch.dtype:
        """Dtype a parameter of dtype `own` has in use; integers and quantised storage stay what
        they are.
        """
        return self.compute if self.compute is not None and own.is_floating_point else own

    def master_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Dtype the optimizer works in: fp32 above 16-bit weights, the weight's own otherwise."""
        return torch.float32 if weight in LOW_PRECISION else weight

    def stored_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Dtype a master is stored in: 16 more bits beside a bf16 weight, the whole master
        otherwise.
        """
        whole = self.master_dtype(weight)
        return (
            {"split": torch.int16, "fp32": whole, "none": weight}[self.master]
            if weight == torch.bfloat16
            else whole
        )

    def grad_dtype(self, weight: torch.dtype, accumulation: int) -> torch.dtype:
        """Dtype of a reduced gradient: the weight's at accumulation 1 (summed in fp32, rounded
        once), `accumulate` above.
        """
        return weight if accumulation == 1 or weight not in LOW_PRECISION else self.accumulate

    def lifted(self) -> Policy:
        """Return the same policy with full-precision compute, for a unit that precision "auto"
        promotes to fp32.
        """
        return replace(self, compute=torch.float32)


# Elements that are cast at once: on the CPU what fits a core's own cache with its scratch.
CAST_TILE = PerDevice(cpu=1 << 17, accelerator=1 << 24)
# the bits of the only NaN in weights, main weights and optimizer states (docs/design/updates.md)
CANONICAL_NAN = 0x7FC00000
# Tensors, since torch makes one of a Python number in each call.
HALF = torch.tensor(0x8000, dtype=torch.int32)
SIXTEEN = torch.tensor(16, dtype=torch.int32)


def cast_master(master: Tensor, weight: Tensor) -> None:
    """Write an fp32 master into the weight (any floating dtype), elementwise; both flat and of one
    length.

    bf16 rounds half up in magnitude: add half of the last kept bit to the magnitude and cut. It
    differs from round-to-nearest-even only on exact ties, and it is what makes fp32 = bf16 + 16
    bits lossless (`split`).
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
        # Adding 0x8000 to the magnitude carries into the kept half exactly when the lower half is
        # >= one half. Infinity, whose lower half is zero, stays what it is.
        torch.add(bits, HALF, out=rounded)
        upper.copy_(rounded.bitwise_right_shift_(SIXTEEN))


def has_nan(values: Tensor) -> bool:
    """Return whether there may be a NaN, in one pass without a mask. On an accelerator always True:
    asking would wait for it.
    """
    if values.device.type != "cpu":
        return True
    total = float(values.sum())
    return total != total


def settle_nan(bits: Tensor) -> None:
    """Make every NaN (bits of fp32, changed in place) the canonical one, whose low half is zero:
    rounding keeps it.
    """
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits.masked_fill_(is_nan, CANONICAL_NAN)


def scratch_numel(device: torch.device, numel: int) -> int:
    """Return the elements of scratch (4 bytes each) that `join` of so many elements uses."""
    return min(CAST_TILE.on(device), numel)


def join(
    weight: Tensor,
    remainder: Tensor,
    out: Tensor,
    scratch: Tensor | None = None,
    *,
    is_exposed: bool = True,
) -> None:
    """Write the fp32 master of a bf16 weight and its int16 remainder into `out`. All are flat and
    of one length.

    scratch: see `scratch_numel`. is_exposed: a program may have changed the weight without the
    remainder (a mask that zeroed it). That can make the sum NaN where the weight is not; then the
    master is the weight.
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
    """Write the bf16 weight and int16 remainder of an fp32 master, whose own contents are lost: it
    is the scratch. All are flat.
    """
    tile = max(CAST_TILE.on(master.device), 1)
    parts = (master, master.view(torch.int32), weight.view(torch.int16), remainder)
    for values, bits, upper, lower in zip(*(part.split(tile) for part in parts), strict=True):
        if has_nan(values):
            settle_nan(bits)
        lower.copy_(bits)  # an integer is cut to its low half
        upper.copy_(bits.add_(HALF).bitwise_right_shift_(SIXTEEN))
