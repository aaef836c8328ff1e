"""An fp32 number as the bf16 number nearest to it and 16 more bits, so that a master needs 2 bytes beside its weight.

    weight    = the master rounded half up in magnitude (what cast_master writes)
    remainder = the low 16 bits of the master, read as a signed integer
    master    = (bits of the weight << 16) + remainder

Rounding up carries into the upper half exactly when the lower half, read as signed, is negative, so the sum gives the
bits back: of every finite number, and of infinity (the largest finite numbers round to it and come back).  NaN stays
NaN in both; which NaN is not kept.  Everything runs in tiles that stay in a core's cache, in few passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .policy import CAST_TILE, HALF, SIXTEEN, has_nan, settle_nan


def scratch_numel(device: torch.device, numel: int) -> int:
    """Return the elements of scratch (4 bytes each) that `join` of so many elements uses."""
    return min(CAST_TILE.on(device), numel)


def join(
    weight: Tensor, remainder: Tensor, out: Tensor, scratch: Tensor | None = None, *, is_exposed: bool = True
) -> None:
    """Write the fp32 master of a bf16 weight and its int16 remainder into `out`. All are flat and of one length.

    scratch: see `scratch_numel`. is_exposed: a program may have changed the weight without the remainder (a mask that
    zeroed it). That can make the sum NaN where the weight is not; then the master is the weight.
    """
    tile = scratch_numel(out.device, out.numel())
    if scratch is None:
        scratch = torch.empty(tile, dtype=torch.int32, device=out.device)
    wide = scratch.view(torch.int32)[:tile]
    parts = (weight, weight.view(torch.int16), remainder, out, out.view(torch.int32))
    for values, upper, lower, master, bits in zip(*(part.split(max(tile, 1)) for part in parts), strict=True):
        bits.copy_(lower)
        bits.add_(wide[: upper.numel()].copy_(upper), alpha=1 << 16)
        if is_exposed and has_nan(master):
            master.copy_(torch.where(master.isnan(), values.float(), master))


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write the bf16 weight and int16 remainder of an fp32 master, whose own contents are lost: it is the scratch. All
    are flat.
    """
    tile = max(CAST_TILE.on(master.device), 1)
    parts = (master, master.view(torch.int32), weight.view(torch.int16), remainder)
    for values, bits, upper, lower in zip(*(part.split(tile) for part in parts), strict=True):
        if has_nan(values):
            settle_nan(bits)
        lower.copy_(bits)  # an integer is cut to its low half
        upper.copy_(bits.add_(HALF).bitwise_right_shift_(SIXTEEN))
