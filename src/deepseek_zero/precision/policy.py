"""The number format of each state, and the one cast from master to weight.

Owns dtypes and casts; knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base.device import PerDevice

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Policy:
    """Dtypes of one engine.

    compute: dtype of weights in forward and backward, None = each parameter keeps its own. reduce: dtype that
    gradients travel in, None = the dtype they have (no rounding on the way). accumulate: dtype of a gradient that
    sums micro-batches. autocast: dtype of a torch.autocast region around forward, None = no region. auto_cast: cast
    floating inputs to compute. master: how a bf16 weight's master is kept: "fp32" whole, "split" only what the weight
    lacks (split.py), "none" not at all (compact.py rounds the weight by chance). moments: bits they are kept in,
    "fp32", "bf16" or "8bit".
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    auto_cast: bool = True
    master: str = "split"
    moments: str = "fp32"

    def weight_dtype(self, own: torch.dtype) -> torch.dtype:
        """Dtype a parameter of dtype `own` has in use; integers and quantised storage stay what they are."""
        return self.compute if self.compute is not None and own.is_floating_point else own

    def master_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Dtype the optimizer works in: fp32 above 16-bit weights, the weight's own otherwise."""
        return torch.float32 if weight in LOW_PRECISION else weight

    def stored_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Dtype a master is stored in: 16 more bits beside a bf16 weight, the whole master otherwise."""
        whole = self.master_dtype(weight)
        return {"split": torch.int16, "fp32": whole, "none": weight}[self.master] if weight == torch.bfloat16 else whole

    def grad_dtype(self, weight: torch.dtype, accumulation: int) -> torch.dtype:
        """Dtype of a reduced gradient: the weight's at accumulation 1 (summed in fp32, rounded once), `accumulate`
        above.
        """
        return weight if accumulation == 1 or weight not in LOW_PRECISION else self.accumulate

    def lifted(self) -> Policy:
        """Return the same policy with full-precision compute, for a unit that precision "auto" promotes to fp32."""
        return replace(self, compute=torch.float32)


# Elements that are cast at once: on the CPU what fits a core's own cache with its scratch.
CAST_TILE = PerDevice(cpu=1 << 17, accelerator=1 << 24)
# Tensors, since torch makes one of a Python number in each call.
HALF, SIXTEEN = torch.tensor(0x8000, dtype=torch.int32), torch.tensor(16, dtype=torch.int32)


def cast_master(master: Tensor, weight: Tensor) -> None:
    """Write an fp32 master into the weight (any floating dtype), elementwise; both flat and of one length.

    bf16 rounds half up in magnitude: add half of the last kept bit to the magnitude and cut. It differs from
    round-to-nearest-even only on exact ties, and it is what makes fp32 = bf16 + 16 bits lossless (split.py).
    """
    if weight.dtype != torch.bfloat16 or master.dtype != torch.float32:
        weight.copy_(master)
        return
    tile = CAST_TILE.on(master.device)
    scratch = torch.empty(min(tile, master.numel()), dtype=torch.int32, device=master.device)
    for values, upper in zip(master.split(tile), weight.view(torch.int16).split(tile), strict=True):
        bits, rounded = values.view(torch.int32), scratch[: values.numel()]
        if has_nan(values):
            bits = rounded.copy_(bits)
            settle_nan(bits)
        # Adding 0x8000 to the magnitude carries into the kept half exactly when the lower half is >= one half.
        # Infinity, whose lower half is zero, stays what it is.
        torch.add(bits, HALF, out=rounded)
        upper.copy_(rounded.bitwise_right_shift_(SIXTEEN))


def has_nan(values: Tensor) -> bool:
    """Return whether there may be a NaN, in one pass without a mask. On an accelerator always True: asking would wait
    for it.
    """
    if values.device.type != "cpu":
        return True
    total = float(values.sum())
    return total != total


def settle_nan(bits: Tensor) -> None:
    """Make every NaN (bits of fp32, changed in place) a quiet one whose low half is zero, so that rounding keeps it."""
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits.copy_(torch.where(is_nan, (bits & -0x10000) | 0x00400000, bits))


def cast_inputs(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating tensor in it cast to dtype; walk usual containers, keep others."""
    if dtype is None:
        return value

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_inputs(value, cast)


def map_inputs(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with change(tensor) for every tensor in it, in new containers: the caller's stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_inputs(item, change) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, (list, tuple)):
        changed = [map_inputs(item, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: map_inputs(getattr(value, f.name), change) for f in fields(value) if f.init}
        return replace(value, **changes)
    return value


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
