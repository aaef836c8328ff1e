"""Random bits of stochastic rounding: 16 per element, from NumPy's Philox4x64-10.

`precision/compact.py` defines which bits an element gets. Importing this module imports numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int16, njit, types, uint64
from numba.extending import intrinsic

_I128 = ir.IntType(128)
_I64 = ir.IntType(64)
PER_COUNT = 16  # 16-bit numbers per count of the generator


@intrinsic
def _high(typing: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of a product of two uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.mul(builder.zext(args[0], _I128), builder.zext(args[1], _I128))
        return builder.trunc(builder.lshr(wide, ir.Constant(_I128, 64)), _I64)

    return types.uint64(types.uint64, types.uint64), generate


@njit
def fill(out: Any, element: Any, step: Any, seed: Any, key: Any) -> None:
    """Write the random bits of consecutive elements.

    Args:
        out: Output, int16, one number per element.
        element: The index of the first element.
        step: The number of the update.
        seed: The seed of the run.
        key: The key of the tensor.
    """
    block = uint64(element // PER_COUNT)
    skipped = element % PER_COUNT
    place = -skipped
    while place < len(out):
        block += uint64(1)  # NumPy counts up before it draws
        a = block
        b = uint64(step)
        c = uint64(0)
        d = uint64(0)
        left = uint64(seed)
        right = uint64(key)
        for number in range(10):
            if number > 0:
                left += uint64(0x9E3779B97F4A7C15)
                right += uint64(0xBB67AE8584CAA73B)
            high_a = _high(uint64(0xD2E7470EE14C6C93), a)
            low_a = uint64(0xD2E7470EE14C6C93) * a
            high_c = _high(uint64(0xCA5A826395121157), c)
            low_c = uint64(0xCA5A826395121157) * c
            a = high_c ^ b ^ left
            b = low_c
            c = high_a ^ d ^ right
            d = low_a
        for number, word in enumerate((a, b, c, d)):
            at = place + 4 * number
            for part in range(4):
                if 0 <= at + part < len(out):
                    out[at + part] = int16(word >> uint64(16 * part))
        place += PER_COUNT
