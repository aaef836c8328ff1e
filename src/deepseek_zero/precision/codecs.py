"""Codecs for values sent between ranks: casts, blocks of integers, and signs.

A block of B values has one fp32 scale and 8 or 4 bits for each value::

    int8   s = max|x| * fl(1/127)    code = round_half_even(x * fl(1/s))    value = code * s
    int4   s = max|x| * fl(1/7)      the same, and blocks 2k and 2k+1 share B bytes: low + 16 high

A scale below 2^-126 becomes zero, and so do its codes. A block with a NaN or an infinity gets the
scale NaN, so all of it decodes to NaN, and an overflow check finds it. Codes are symmetric, so a
zero stays a zero, and they use their full range, so nothing is clipped.

Scales of 17 bits (`EXACT_SCALE_BITS`) are for values that are stored as codes. The 7 bits of a code
times such a scale fit into fp32, so decoded values, in any dtype of `CODED`, encode to the same
codes and scales again.

`Signs` has one bit per value and one scale for a whole message, the root mean square of its values.

A message is all codes, then all scales, in one flat tensor. Except for `Signs`, every operation is
elementwise IEEE fp32, a product is rounded before it is added to anything, and tiles are whole
blocks. The bits therefore do not depend on devices, tiles or transports.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ..base.device import PerDevice

CODED = (torch.float32, torch.bfloat16, torch.float16)  # Dtypes whose values are exact in fp32
LARGEST = {8: 127, 4: 7}
SMALLEST_SCALE = 2.0**-126
# Values per tile, in two passes, if no scratch limits the tile
DECODED_AT_ONCE = PerDevice(cpu=1 << 17, accelerator=1 << 24)
# fp32 elements of a codec's scratch. A tile costs a dozen torch calls, about 70 us, which a smaller
# tile does not gain back by fitting into the cache.
WORK_NUMEL = PerDevice(cpu=1 << 20, accelerator=1 << 24)
# Bits of a scale's significand
FP32_BITS = 24
EXACT_SCALE_BITS = 17
LEAST_SCRATCH = 3  # Granules of scratch with which every codec works


@dataclass(frozen=True)
class Cast:
    """The codec without compression, which rounds every value to one dtype.

    Attributes:
        dtype: The dtype of a message.
        granule: Number of values that are coded together.
        message_numel: Maximum number of values in one message.
    """

    dtype: torch.dtype

    granule: ClassVar[int] = 1
    message_numel: ClassVar[int] = 1 << 62

    length = staticmethod(int)  # Elements of `dtype` in a message of `numel` values: `numel`

    def nbytes(self, numel: int) -> int:
        """Return the size of a message of `numel` values, in bytes."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, message: Tensor, scratch: Tensor, start: int = 0) -> None:
        """Write values into a message.

        Args:
            values: Flat tensor of the values to send.
            message: Output, flat, of dtype `dtype`.
            scratch: Ignored; `Blocks` needs it.
            start: The index in the message of the first value.
        """
        message[start : start + values.numel()].copy_(values)

    def decode(self, message: Tensor, start: int, stop: int, out: Tensor, scratch: Tensor) -> None:
        """Read values [start, stop) of a message into `out`.

        Args:
            message: Flat tensor that `encode` wrote.
            start: The index of the first value.
            stop: The index after the last value.
            out: Output, flat.
            scratch: Ignored; `Blocks` needs it.
        """
        out.copy_(message[start:stop])

    def scale(self, message: Tensor, factor: float) -> None:
        """Multiply the values of a message by a factor.

        Args:
            message: Message that `encode` wrote, changed in place.
            factor: Number by which each value is multiplied.
        """
        message.mul_(factor)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Blocks:
    """The codec that stores blocks of values as small integers with one scale per block.

    Attributes:
        bits: Bits of a code, 8 or 4.
        block: Number of values that have one scale; it is a power of two.
        scale_bits: Bits to which the significand of a scale is rounded.
        dtype: The dtype of a message.
        message_numel: Maximum number of values in one message. It is limited so that a rank codes
            and adds other messages while one is in flight.
    """

    bits: int
    block: int
    scale_bits: int = FP32_BITS

    dtype: ClassVar[torch.dtype] = torch.uint8
    message_numel: ClassVar[int] = 1 << 20

    @property
    def granule(self) -> int:
        """Return the number of values that are coded together, which is one or two blocks."""
        return self.block * 8 // self.bits

    def length(self, numel: int) -> int:
        """Return the number of bytes of a message.

        `numel`, the number of values, must be a multiple of `granule`.
        """
        return numel * self.bits // 8 + numel // self.block * torch.float32.itemsize

    nbytes = length  # an element of a message is a byte

    def encode(self, values: Tensor, message: Tensor, scratch: Tensor, start: int = 0) -> None:
        """Write values into a message.

        Args:
            values: The values, flat, of a dtype in `CODED`; their number is a multiple of
                `granule`.
            message: The message, uint8, of the `length` of all its values, aligned to four bytes.
            scratch: Flat fp32 scratch of at least `LEAST_SCRATCH` granules.
            start: The index in the message of the first value, a multiple of `granule`.
        """
        codes, scales = self._parts(message)
        codes = codes[start * self.bits // 8 :]
        scales = scales[start // self.block :]
        widens = values.dtype != torch.float32
        packs = self.bits == 4
        rounded, room, small = self._tiles(scratch, 1, self.decode_scratch, 2 / self.block)
        apart = room.view(torch.int8)
        for start in range(0, values.numel(), rounded.numel()):
            stop = min(start + rounded.numel(), values.numel())
            tile = values[start:stop]
            work = rounded[: stop - start]
            rows = (work.copy_(tile) if widens else tile).view(-1, self.block)
            scale = scales[start // self.block : stop // self.block]
            is_lost = self._scale(rows, scale, small)
            quotients = torch.mul(rows, small[: scale.numel()].unsqueeze(1), out=work.view_as(rows))
            if is_lost is not None:
                # Zeros: arbitrary codes would change other blocks' codes in shared bytes
                quotients.masked_fill_(is_lost.unsqueeze(1), 0.0)
            quotients.round_()
            coded = codes[start * self.bits // 8 : stop * self.bits // 8]
            if packs:
                both = self._in_blocks(apart[: stop - start]).copy_(self._in_blocks(work))
                torch.add(both[:, 0], both[:, 1], alpha=16, out=coded.view(-1, self.block))
            else:
                coded.copy_(work)

    def _scale(self, rows: Tensor, scale: Tensor, small: Tensor) -> Tensor | None:
        """Write each row's scale, and its reciprocal to the front of `small`.

        Return a mask of the rows that are not finite, or None if all are finite. On the CPU,
        unusual rows are handled only if there are any; on an accelerator this check would wait for
        the device.
        """
        inverse = small[: scale.numel()]
        low = small[scale.numel() : 2 * scale.numel()]
        torch.amax(rows, 1, out=scale)
        torch.maximum(scale, torch.amin(rows, 1, out=low).neg_(), out=scale)
        scale.mul_(1.0 / LARGEST[self.bits])
        may_wait = scale.device.type == "cpu"
        is_lost = None
        if not may_wait or not isfinite(float(scale.sum())):
            # An infinity becomes a NaN; finite numbers stay the same
            scale.add_(torch.sub(scale, scale, out=low))
            is_lost = scale.isnan()
        if dropped := FP32_BITS - self.scale_bits:  # To nearest, ties up
            scale.view(torch.int32).add_(1 << (dropped - 1)).bitwise_and_(-1 << dropped)
            if is_lost is not None:
                # The bits of a NaN may be all ones, to which the rounding was added
                scale.masked_fill_(is_lost, float("nan"))
        torch.reciprocal(scale, out=inverse)
        if not may_wait or not float(scale.amin()) >= SMALLEST_SCALE:
            is_zero = scale < SMALLEST_SCALE
            scale.masked_fill_(is_zero, 0.0)
            inverse.masked_fill_(is_zero, 0.0)
        return is_lost

    def decode(self, message: Tensor, start: int, stop: int, out: Tensor, scratch: Tensor) -> None:
        """Read values [start, stop) of a message into `out`.

        Args:
            message: The message, as written by `encode`.
            start: The index of the first value, a multiple of `granule`.
            stop: The index after the last value, a multiple of `granule`.
            out: Output, flat, of a dtype in `CODED`; values are rounded to it once.
            scratch: Scratch as for `encode`. For fp32 output, `decode_scratch` elements per value
                suffice.
        """
        codes, scales = (
            part[start // self.granule : stop // self.granule]
            for part in self._parts_in_blocks(message)
        )
        widens = out.dtype != torch.float32
        packs = self.bits == 4
        tile = DECODED_AT_ONCE.on(out.device)
        wide = scratch[:0]
        room = scratch[:0]
        if widens or packs:
            wide, room = self._tiles(scratch, widens, self.decode_scratch)
            tile = max(wide.numel(), room.nbytes)
        apart = self._in_blocks(room.view(torch.int8))
        cuts = (each.split(tile // self.granule) for each in (self._in_blocks(out), codes, scales))
        for into, coded, scale in zip(*cuts, strict=True):
            exact = self._in_blocks(wide[: into.numel()]) if widens else into
            exact.copy_(self._taken_apart(coded, apart) if packs else coded).mul_(scale)
            if widens:
                into.copy_(exact)

    @property
    def decode_scratch(self) -> float:
        """Return the fp32 scratch elements per value that `decode` needs for fp32 output."""
        return 0.0 if self.bits == 8 else 1 / torch.float32.itemsize

    def _taken_apart(self, codes: Tensor, room: Tensor) -> Tensor:
        """Return the two codes of each byte in separate bytes.

        A lower code is at least -7, so adding 8 avoids a borrow from the higher one.
        """
        both = room[: len(codes)]
        high = torch.add(codes, 8, out=both[:, 1:]).bitwise_right_shift_(4)
        torch.sub(codes, high, alpha=16, out=both[:, :1])
        return both

    def _in_blocks(self, values: Tensor) -> Tensor:
        """Return flat values with shape (granules, blocks that share bytes, block)."""
        return values.view(values.numel() // self.granule, 8 // self.bits, self.block)

    def _parts_in_blocks(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a message, by granule.

        The shapes are (granules, 1, bytes of a block) and (granules, blocks that share bytes, 1).
        """
        codes, scales = self._parts(message)
        granules = codes.numel() // self.block
        return codes.view(granules, 1, self.block), scales.view(granules, 8 // self.bits, 1)

    def scale(self, message: Tensor, factor: float) -> None:
        """Multiply the values of a message by a factor.

        Args:
            message: Message that `encode` wrote, changed in place.
            factor: Number by which each value is multiplied.
        """
        self._parts(message)[1].mul_(factor)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (int8) and scales (fp32) of a message."""
        count = message.numel() // self.length(self.block) * self.block * self.bits // 8
        return message[:count].view(torch.int8), message[count:].view(torch.float32)

    def _tiles(self, scratch: Tensor, *shares: float) -> list[Tensor]:
        """Divide scratch into parts for one tile, the largest that fits.

        `shares` are the elements of each part per value of the tile.
        """
        numel = int(scratch.numel() / sum(shares)) // self.granule * self.granule
        sizes = [int(numel * share) for share in shares]
        return list(scratch[: sum(sizes)].split(sizes))

    def __str__(self) -> str:
        return f"int{self.bits}/{self.block}"


class LeftOut(Protocol):
    """Interface of the error-feedback buffer of one rank."""

    def encode(
        self, wire: Codec, values: Tensor, message: Tensor, place: int, scratch: Tensor
    ) -> None:
        """Add the stored errors to values, encode the sums, and store the new errors.

        Args:
            wire: The codec of the message.
            values: Flat tensor of the values to send.
            message: Output, which `wire` encodes.
            place: The index of the first value in the error-feedback buffer.
            scratch: Flat fp32 scratch.
        """


def codec_scratch(codec: Blocks, numel: int, device: torch.device) -> Tensor:
    """Return an fp32 scratch buffer for a codec, for all values or for one tile at a time.

    Args:
        codec: Codec that will encode or decode the values.
        numel: Number of values.
        device: The device of the scratch.
    """
    tile = min(numel, WORK_NUMEL.on(device))
    return torch.empty(max(tile, LEAST_SCRATCH * codec.granule), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Signs:
    """The codec that stores one bit per value, with one scale for a whole message.

    A value decodes to s if x >= 0 and to -s otherwise, with s = sqrt(sum of x^2 / count). The sum
    is formed in float64, so its order does not affect s. A message with a NaN or an infinity
    decodes to values that are all not finite.

    Attributes:
        dtype: The dtype of a message.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8

    def length(self, numel: int) -> int:
        """Return the bytes of a message of `numel` values, a multiple of 32."""
        return numel // 8 + torch.float32.itemsize

    nbytes = length  # an element of a message is a byte

    def encode(self, values: Tensor, message: Tensor, count: int) -> None:
        """Write values into a message.

        Args:
            values: The values, flat fp32; padding is zero.
            message: The message, uint8, of ``length(len(values))``, aligned to four bytes.
            count: Number of values without padding.
        """
        tile = DECODED_AT_ONCE.on(values.device)
        squares = values.new_zeros((), dtype=torch.float64)
        for low in range(0, values.numel(), tile):
            part = values[low : low + tile]
            message[low // 8 : (low + part.numel()) // 8].copy_(_packed_bits(part >= 0))
            wide = part.double()
            squares += torch.dot(wide, wide)
        message[-torch.float32.itemsize :].view(torch.float32).copy_(
            (squares / max(count, 1)).sqrt()
        )

    def decode(self, message: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Read values [start, stop) of a message into `out`.

        Args:
            message: The message, as written by `encode`.
            start: The index of the first value, a multiple of 8.
            stop: The index after the last value, a multiple of 8.
            out: Output, flat fp32.
        """
        scale = message[-torch.float32.itemsize :].view(torch.float32)
        tile = DECODED_AT_ONCE.on(out.device)
        for low in range(start, stop, tile):
            high = min(low + tile, stop)
            into = out[low - start : high - start]
            into.copy_(_bits_of(message[low // 8 : high // 8])).mul_(2.0).sub_(1.0).mul_(scale)

    def __str__(self) -> str:
        return "signs"


# Bits of a byte in numpy's packing order
_PLACES = tuple(1 << place for place in range(7, -1, -1))


def _packed_bits(bits: Tensor) -> Tensor:
    """Return booleans, a multiple of 8, packed into bytes."""
    if bits.device.type == "cpu":  # Several times as fast as torch's operations
        return torch.from_numpy(np.packbits(bits.numpy()))
    return _packed_there(bits)


def _packed_there(bits: Tensor) -> Tensor:
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * places).sum(1, dtype=torch.uint8)


def _bits_of(packed: Tensor) -> Tensor:
    """Return the bits of packed bytes, one number 0 or 1 each."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy()))
    return _bits_there(packed)


def _bits_there(packed: Tensor) -> Tensor:
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(1).bitwise_and(places).ne(0).view(-1)


Codec = Cast | Blocks
