"""How values are written for their way between ranks: cast to a dtype, or in blocks of small
integers.

A block of B values has one fp32 scale and 8 or 4 bits for each value:

    int8   s = max|x| * fl(1/127)    code = round_half_even(x * fl(1/s))    value = code * s
    int4   s = max|x| * fl(1/7)      the same, and blocks 2k and 2k+1 share B bytes: low + 16 high

A scale below 2^-126 is zero, and so are its codes.  A block that holds a NaN or an infinity has the
scale NaN, so all of it comes back as NaN, which whoever looks for an overflow finds.  Codes are
symmetric, so a zero stays a zero, and use their full range, so nothing is clipped.

Scales of 17 bits (`EXACT_SCALE_BITS`) are for values that rest as codes: a code's 7 bits times such
a scale fit in fp32, so that what is decoded, in any dtype of `CODED`, encodes to the same codes and
scales again.

`Signs` has a bit for each value and one scale for a whole message, the root of the mean square of
what it holds.

A message is all codes, then all scales, in one flat tensor.  Every operation of the others is
elementwise IEEE fp32, a product is rounded before it is added to anything, and tiles are whole
blocks: devices, tiles and transports change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ..base.device import PerDevice

CODED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose every number is one of fp32
LARGEST = {8: 127, 4: 7}
SMALLEST_SCALE = 2.0**-126
# Values, in two passes, where no scratch says how many
DECODED_AT_ONCE = PerDevice(cpu=1 << 17, accelerator=1 << 24)
# Elements of fp32 for a codec to work in: a tile is a dozen calls of torch, 70 us, which no smaller
# one wins back by being in the cache.
WORK_NUMEL = PerDevice(cpu=1 << 20, accelerator=1 << 24)
# of a scale's significand
FP32_BITS = 24
EXACT_SCALE_BITS = 17
LEAST_SCRATCH = 3  # granules that every codec can work in


@dataclass(frozen=True)
class Cast:
    """The plain codec: every value is rounded to one dtype."""

    dtype: torch.dtype

    granule: ClassVar[int] = 1  # how many values are coded together
    message_numel: ClassVar[int] = 1 << 62  # most values of one message

    length = staticmethod(int)  # elements of `dtype` that so many values take on their way: as many

    def nbytes(self, numel: int) -> int:
        """Return how many bytes so many values take on their way."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, message: Tensor, scratch: Tensor, start: int = 0) -> None:
        """Write the values into a message, from its value `start` on.  Both are flat; Local."""
        message[start : start + values.numel()].copy_(values)

    def decode(self, message: Tensor, start: int, stop: int, out: Tensor, scratch: Tensor) -> None:
        """Write values [start, stop) of a message into `out`.  Local."""
        out.copy_(message[start:stop])

    def scale(self, message: Tensor, factor: float) -> None:
        """Multiply the values of a message.  Local."""
        message.mul_(factor)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Blocks:
    """The codec of blocks.  bits: of a code, 8 or 4.  block: values that share a scale, a power of
    two.  scale_bits: to which the significand of a scale is rounded.
    """

    bits: int
    block: int
    scale_bits: int = FP32_BITS

    dtype: ClassVar[torch.dtype] = torch.uint8  # of a message
    # Most values of one, so that others are coded and added up while it travels
    message_numel: ClassVar[int] = 1 << 20

    @property
    def granule(self) -> int:
        """Return how many values are coded together: a block, or the two that share bytes."""
        return self.block * 8 // self.bits

    def length(self, numel: int) -> int:
        """Return how many bytes so many values take on their way; numel: a multiple of
        `granule`.
        """
        return numel * self.bits // 8 + numel // self.block * torch.float32.itemsize

    def nbytes(self, numel: int) -> int:
        """Return how many bytes so many values take on their way."""
        return self.length(numel)

    def encode(self, values: Tensor, message: Tensor, scratch: Tensor, start: int = 0) -> None:
        """Write the values into a message, from its value `start` on.  Local.

        values: flat, of a dtype in `CODED`, a multiple of `granule` long.  message: uint8, of
        `length` of all its
        values, aligned to four bytes.  scratch: flat fp32, of at least `LEAST_SCRATCH` granules.
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
                # Their codes say nothing, and share bytes with others'
                quotients.masked_fill_(is_lost.unsqueeze(1), 0.0)
            quotients.round_()
            coded = codes[start * self.bits // 8 : stop * self.bits // 8]
            if packs:
                both = self._in_blocks(apart[: stop - start]).copy_(self._in_blocks(work))
                torch.add(both[:, 0], both[:, 1], alpha=16, out=coded.view(-1, self.block))
            else:
                coded.copy_(work)

    def _scale(self, rows: Tensor, scale: Tensor, small: Tensor) -> Tensor | None:
        """Write each row's scale, and its reciprocal at the front of `small`; return which rows are
        not finite, None if none is.

        On the CPU it asks first whether a row is out of the ordinary; on an accelerator asking
        would wait for it.
        """
        inverse = small[: scale.numel()]
        low = small[scale.numel() : 2 * scale.numel()]
        torch.amax(rows, 1, out=scale)
        torch.maximum(scale, torch.amin(rows, 1, out=low).neg_(), out=scale)
        scale.mul_(1.0 / LARGEST[self.bits])
        asks = scale.device.type == "cpu"
        is_lost = None
        if not asks or not isfinite(float(scale.sum())):
            # An infinity becomes a NaN; finite numbers stay
            scale.add_(torch.sub(scale, scale, out=low))
            is_lost = scale.isnan()
        if dropped := FP32_BITS - self.scale_bits:  # to nearest, upwards from the middle
            scale.view(torch.int32).add_(1 << (dropped - 1)).bitwise_and_(-1 << dropped)
            if is_lost is not None:
                # The bits of a NaN may be all ones, which were added to
                scale.masked_fill_(is_lost, float("nan"))
        torch.reciprocal(scale, out=inverse)
        if not asks or not float(scale.amin()) >= SMALLEST_SCALE:
            is_zero = scale < SMALLEST_SCALE
            scale.masked_fill_(is_zero, 0.0)
            inverse.masked_fill_(is_zero, 0.0)
        return is_lost

    def decode(self, message: Tensor, start: int, stop: int, out: Tensor, scratch: Tensor) -> None:
        """Write values [start, stop) of a message into `out`.  Local.

        start, stop: multiples of `granule`.  out: flat, of a dtype in `CODED`, to which values are
        rounded once.
        scratch: as for `encode`, but that for fp32 `decode_scratch` elements for each value are
        enough.
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
        """Return the elements of scratch for each value, in which codes lie apart: all that
        `decode` needs for fp32.
        """
        return 0.0 if self.bits == 8 else 1 / torch.float32.itemsize

    def _taken_apart(self, codes: Tensor, room: Tensor) -> Tensor:
        """Return the two codes of each byte, each in one of its own.  A lower one is at least -7,
        so adding 8 borrows nothing from the higher.
        """
        both = room[: len(codes)]
        high = torch.add(codes, 8, out=both[:, 1:]).bitwise_right_shift_(4)
        torch.sub(codes, high, alpha=16, out=both[:, :1])
        return both

    def _in_blocks(self, values: Tensor) -> Tensor:
        """Return flat values as (granules, blocks that share bytes, values of a block)."""
        return values.view(values.numel() // self.granule, 8 // self.bits, self.block)

    def _parts_in_blocks(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, (granules, 1, bytes of a block), and scales, (granules, blocks that share
        bytes, 1).
        """
        codes, scales = self._parts(message)
        granules = codes.numel() // self.block
        return codes.view(granules, 1, self.block), scales.view(granules, 8 // self.bits, 1)

    def scale(self, message: Tensor, factor: float) -> None:
        """Multiply the values of a message.  Local."""
        self._parts(message)[1].mul_(factor)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (int8) and scales (fp32) of a message."""
        count = message.numel() // self.length(self.block) * self.block * self.bits // 8
        return message[:count].view(torch.int8), message[count:].view(torch.float32)

    def _tiles(self, scratch: Tensor, *shares: float) -> list[Tensor]:
        """Cut a scratch into parts of so many elements for each value of one tile, the largest it
        has room for.
        """
        numel = int(scratch.numel() / sum(shares)) // self.granule * self.granule
        found = []
        reached = 0
        for share in shares:
            found.append(scratch[reached : reached + int(numel * share)])
            reached += int(numel * share)
        return found

    def __str__(self) -> str:
        return f"int{self.bits}/{self.block}"


class LeftOut(Protocol):
    """What codes have left out of the messages of one rank, to be added to its next ones."""

    def encode(
        self, wire: Codec, values: Tensor, message: Tensor, place: int, scratch: Tensor
    ) -> None:
        """Write values, with what was left out before, into a message; keep what it leaves out."""


def work_room(codec: Blocks, numel: int, device: torch.device) -> Tensor:
    """Return scratch in which a codec works on so many values at once, or on tiles of them."""
    tile = min(numel, WORK_NUMEL.on(device))
    return torch.empty(max(tile, LEAST_SCRATCH * codec.granule), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Signs:
    """The codec of signs: a value is s where x >= 0 and -s where it is not, s = sqrt(sum of x^2 /
    count).

    The sum is in float64, so that its order does not show in s.  A message that holds a NaN or an
    infinity comes back without a finite value.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8  # of a message

    def length(self, numel: int) -> int:
        """Return how many bytes so many values take on their way; numel: a multiple of 32."""
        return numel // 8 + torch.float32.itemsize

    def nbytes(self, numel: int) -> int:
        """Return how many bytes so many values take on their way."""
        return self.length(numel)

    def encode(self, values: Tensor, message: Tensor, count: int) -> None:
        """Write the values into a message.  Local.

        values: flat fp32.  message: uint8, of `length(len(values))`, aligned to four bytes.  count:
        of values that are no padding, which is zero.
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
        """Write values [start, stop) of a message, multiples of 8, into `out`, flat fp32.
        Local.
        """
        scale = message[-torch.float32.itemsize :].view(torch.float32)
        tile = DECODED_AT_ONCE.on(out.device)
        for low in range(start, stop, tile):
            high = min(low + tile, stop)
            into = out[low - start : high - start]
            into.copy_(_bits_of(message[low // 8 : high // 8])).mul_(2.0).sub_(1.0).mul_(scale)

    def __str__(self) -> str:
        return "signs"


# Of the bits of a byte, as numpy packs them
_PLACES = tuple(1 << place for place in range(7, -1, -1))


def _packed_bits(bits: Tensor) -> Tensor:
    """Return booleans, a multiple of 8, as bytes."""
    if bits.device.type == "cpu":  # several times as fast as torch's operations
        return torch.from_numpy(np.packbits(bits.numpy()))
    return _packed_there(bits)


def _packed_there(bits: Tensor) -> Tensor:
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * places).sum(1, dtype=torch.uint8)


def _bits_of(packed: Tensor) -> Tensor:
    """Return the bits of bytes, a number 0 or 1 for each."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy()))
    return _bits_there(packed)


def _bits_there(packed: Tensor) -> Tensor:
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(1).bitwise_and(places).ne(0).view(-1)


Codec = Cast | Blocks
