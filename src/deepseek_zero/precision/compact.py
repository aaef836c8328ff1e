"""Compact storage formats with stochastic rounding.

A running mean that moves by a thousandth of itself never changes if it is rounded to the nearest of
256 or 65,536 numbers. Rounded up or down at random, in proportion, it moves by the right amount on
average. The random bits are a function of (seed, step, name, element), so a run repeats bit for
bit, however elements are sharded. The formats are::

    bf16    the upper half of fp32
    8 bits  blocks of BLOCK elements share a power of two, the largest magnitude over which is in
            (1/2, 1]; signed: sign, 4 bits of exponent, 3 of mantissa; magnitudes: 5 bits of
            exponent, 3 of mantissa. Both have subnormals, so decoded values are encoded to the
            same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..base.errors import NotBuiltError
from .policy import CAST_TILE, cast_master, has_nan, settle_nan

BLOCK = 256  # Elements that share a power of two
_PER_COUNT = 16  # 16-bit numbers per count of the generator
_MANTISSA = 20  # Bits of an fp32 mantissa that are cut off
# Range of a block's power of two, up to 1.6e38; 127 means "not finite"
_LEAST = -120
_MOST = 126


@dataclass(frozen=True)
class StochasticRounding:
    """A source of 16 random bits per element.

    Attributes:
        step: The step of the optimizer.
        seed: The seed of the run.
    """

    step: int
    seed: int = 0

    def of(self, name: str, start: int, numel: int) -> Tensor:
        """Return the random bits of a range of a tensor's elements.

        Args:
            name: The name of the tensor.
            start: The index of the first element.
            numel: Number of elements.

        Returns:
            An int16 CPU tensor of shape ``(numel,)``.
        """
        first, skipped = divmod(start, _PER_COUNT)
        counter = [first, self.step, 0, 0]
        words = np.random.Philox(counter=counter, key=[self.seed, crc32(name.encode())])
        count = -(-(skipped + numel) // 4)
        return torch.from_numpy(words.random_raw(count).view(np.int16)[skipped : skipped + numel])


@dataclass(frozen=True)
class BFloat16Format:
    """Values stored as bf16, without scales.

    Attributes:
        dtype: The dtype of the codes.
        has_scales: Whether one power of two per block is stored as well.
    """

    dtype: torch.dtype = torch.bfloat16
    has_scales: bool = False

    def encode(
        self, values: Tensor, codes: Tensor, powers: Tensor | None, chance: Tensor | None
    ) -> None:
        """Convert fp32 values to codes; all tensors are flat.

        Args:
            values: Flat fp32 tensor to encode.
            codes: Output, of dtype `dtype`.
            powers: Ignored; this format has no scales.
            chance: 16 random bits per element for stochastic rounding; None rounds to nearest.
        """
        if chance is None:
            cast_master(values, codes)
        else:
            round_to_bf16(values, codes, chance)

    def decode(self, codes: Tensor, powers: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Convert codes to fp32 values.

        Args:
            codes: Flat tensor that `encode` wrote.
            powers: Ignored; this format has no scales.
            out: Output; None allocates it.

        Returns:
            The fp32 values: `out` if it was given.
        """
        return codes.float() if out is None else out.copy_(codes)


def round_to_bf16(values: Tensor, into: Tensor, chance: Tensor) -> None:
    """Round fp32 values to bf16, up or down at random; all tensors have one shape.

    Args:
        values: The fp32 values, flat.
        into: Output, bf16.
        chance: 16 random bits per element.
    """
    tile = CAST_TILE.on(values.device)
    parts = (values, into.view(torch.int16), chance.to(values.device, non_blocking=True))
    for exact, upper, random in zip(*(part.split(tile) for part in parts), strict=True):
        bits = exact.view(torch.int32).clone()
        if has_nan(exact):
            settle_nan(bits)
        # Add less than one unit of the last kept bit to the magnitude. Infinity, whose lower half
        # is zero, stays the same.
        upper.copy_(bits.add_(random.int().bitwise_and_(0xFFFF)).bitwise_right_shift_(16))


@dataclass(frozen=True)
class Float8Block:
    """Values stored as 8-bit floats in blocks, with one power of two per block.

    Attributes:
        is_signed: Whether there is a sign bit; otherwise values are magnitudes.
        least: The exponent of the smallest normal number, relative to the block's power of two.
        dtype: The dtype of the codes.
        has_scales: True.
    """

    is_signed: bool
    least: int
    dtype: torch.dtype = torch.uint8
    has_scales: bool = True

    @cached_property
    def values(self) -> list[float]:
        """Return the value of each code of a magnitude."""
        codes = range(128 if self.is_signed else 256)
        normal = [(1 + code % 8 / 8) * 2.0 ** (self.least + code // 8 - 1) for code in codes]
        return [code / 8 * 2.0**self.least if code < 8 else normal[code] for code in codes]

    @cached_property
    def table(self) -> Tensor:
        """Return the values of all 256 codes as a tensor."""
        negative = [-value for value in self.values] if self.is_signed else []
        return torch.tensor(self.values + negative, dtype=torch.float32, device="cpu")

    def encode(
        self, values: Tensor, codes: Tensor, powers: Tensor | None, chance: Tensor | None
    ) -> None:
        """Convert fp32 values to codes; all tensors are flat.

        Args:
            values: Flat fp32 tensor to encode.
            codes: Output, of dtype `dtype`.
            powers: Output, the power of two of each block.
            chance: 16 random bits per element for stochastic rounding; None rounds to nearest.
        """
        assert powers is not None
        tile = max(BLOCK, CAST_TILE.on(values.device) // BLOCK * BLOCK)
        for low in range(0, values.numel(), tile):
            exact = values[low : low + tile]
            random = None if chance is None else chance[low : low + tile].to(values.device)
            first = low // BLOCK
            self._encode(
                exact, codes[low : low + tile], powers[first : first + tile // BLOCK], random
            )

    def _encode(self, exact: Tensor, codes: Tensor, powers: Tensor, chance: Tensor | None) -> None:
        numel = exact.numel()
        magnitude = torch.zeros(powers.numel() * BLOCK, dtype=torch.float32, device=exact.device)
        torch.abs(exact, out=magnitude[:numel])
        blocks = magnitude.view(-1, BLOCK)
        largest = blocks.amax(dim=1)
        mantissa, exponent = torch.frexp(largest)
        power = (exponent - (mantissa == 0.5).int()).clamp_(_LEAST, _MOST)
        power[largest == 0] = _LEAST
        power[~largest.isfinite()] = 127
        powers.copy_(power)
        blocks.mul_(_power_of_two(-power.clamp(max=_MOST)).unsqueeze(1))
        is_small = magnitude < 2.0**self.least
        bits = magnitude.add_(is_small.float(), alpha=2.0**self.least).view(torch.int32)[:numel]
        cut = (
            1 << (_MANTISSA - 1)
            if chance is None
            else chance.int().bitwise_and_(0xFFFF).bitwise_left_shift_(4)
        )
        found = bits.add_(cut).bitwise_right_shift_(_MANTISSA).sub_((self.least + 127 - 1) * 8)
        found.sub_(is_small[:numel].int(), alpha=8)
        if self.is_signed:
            found.clamp_(0, 127).bitwise_or_(exact.signbit().int().bitwise_left_shift_(7))
        else:  # A nonzero magnitude never becomes zero: optimizers divide by it
            found.clamp_(0, 255).clamp_(min=(exact > 0).int())
        codes.copy_(found)

    def decode(self, codes: Tensor, powers: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Convert codes to fp32 values.

        Args:
            codes: Flat tensor that `encode` wrote.
            powers: The power of two of each block.
            out: Output; None allocates it.

        Returns:
            The fp32 values: `out` if it was given.
        """
        assert powers is not None
        if out is None:
            out = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        tile = max(BLOCK, CAST_TILE.on(out.device) // BLOCK * BLOCK)
        table = self.table.to(out.device)
        scales = _power_of_two(powers.int())
        for low in range(0, out.numel(), tile):
            part = out[low : low + tile]
            torch.index_select(table, 0, codes[low : low + tile].int(), out=part)
            whole = part.numel() // BLOCK * BLOCK
            first = low // BLOCK
            part[:whole].view(-1, BLOCK).mul_(scales[first : first + whole // BLOCK].unsqueeze(1))
            part[whole:].mul_(scales[-1])
        return out


StorageFormat = BFloat16Format | Float8Block

SIGNED = Float8Block(True, -14)
MAGNITUDES = Float8Block(False, -30)
_TABLES = (SIGNED.table, MAGNITUDES.table)  # Created at import: 2 KB that belong to no engine
# The 8-bit format of a moment, by its name in the optimizer's state
_TINY = {
    "exp_avg": SIGNED,
    "momentum_buffer": SIGNED,
    "exp_avg_sq": MAGNITUDES,
    "max_exp_avg_sq": MAGNITUDES,
    "exp_inf": MAGNITUDES,
    "square_avg": MAGNITUDES,
    "sum": MAGNITUDES,
}


def storage_dtype(bits: str, own: torch.dtype) -> torch.dtype:
    """Return the dtype in which the elements of a moment are stored.

    Args:
        bits: "fp32", "bf16" or "8bit".
        own: The dtype for "fp32".
    """
    return {"fp32": own, "bf16": torch.bfloat16, "8bit": torch.uint8}[bits]


def storage_format(bits: str, name: str) -> StorageFormat | None:
    """Return the format of a moment, or None if it is stored unchanged.

    Args:
        bits: "fp32" (unchanged), "bf16" or "8bit".
        name: The name of the moment in the optimizer's state.

    Raises:
        NotBuiltError: There is no 8-bit format for this moment.
    """
    if bits == "fp32":
        return None
    if bits == "bf16":
        return BFloat16Format()
    if name not in _TINY:
        raise NotBuiltError(
            f"8-bit moments are not built for the optimizer state '{name}'.",
            f"Their format depends on what a state is; known are {', '.join(_TINY)}.",
            'keep the moments in "bf16" or "fp32".',
        )
    return _TINY[name]


def _power_of_two(powers: Tensor) -> Tensor:
    """Return exact powers of two; NaN if the power means "not finite"."""
    bits = (powers + 127).clamp_(max=254).bitwise_left_shift_(23)
    return torch.where(powers == 127, float("nan"), bits.view(torch.float32))
