"""Random bits of stochastic rounding: 16 per element, from NumPy's Philox4x64-10.

`precision/compact.py` defines which bits an element gets. Importing this module imports llvmlite.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .jit import I64, address_of, counting

PER_COUNT = 16  # 16-bit numbers per count of the generator
_I128 = ir.IntType(128)
_NBYTES = 2


def emit_fill(
    builder: Any, out: Any, first: Any, count: Any, step: Any, seed: Any, key: Any
) -> Any:
    """Emit a loop that writes the random bits of consecutive elements.

    Args:
        builder: LLVM's builder.
        out: The address of the output, int16, with room for ``count + 2 * PER_COUNT`` numbers.
        first: The index of the first element.
        count: The number of elements.
        step: The number of the update.
        seed: The seed of the run.
        key: The key of the tensor.

    Returns:
        The address of the first element's bits.
    """
    skipped = builder.and_(first, I64(PER_COUNT - 1))
    begin = builder.lshr(first, I64(4))
    with counting(builder, I64(0), builder.add(skipped, count), PER_COUNT) as place:
        # NumPy counts up before it draws.
        block = builder.add(builder.add(begin, I64(1)), builder.lshr(place, I64(4)))
        there = address_of(builder, out, place, _NBYTES)
        for number, word in enumerate(_philox(builder, block, step, seed, key)):
            address = builder.add(there, I64(8 * number))
            builder.store(word, builder.inttoptr(address, I64.as_pointer()), align=_NBYTES)
    return address_of(builder, out, skipped, _NBYTES)


def _philox(builder: Any, block: Any, step: Any, seed: Any, key: Any) -> tuple[Any, ...]:
    """Return the four words of one count, each with four 16-bit numbers, the lowest first."""
    a, b, c, d = block, step, I64(0), I64(0)
    left, right = seed, key
    for number in range(10):
        if number > 0:
            left = builder.add(left, I64(0x9E3779B97F4A7C15))
            right = builder.add(right, I64(0xBB67AE8584CAA73B))
        high_a, low_a = _product(builder, 0xD2E7470EE14C6C93, a)
        high_c, low_c = _product(builder, 0xCA5A826395121157, c)
        a = builder.xor(builder.xor(high_c, b), left)
        c = builder.xor(builder.xor(high_a, d), right)
        b, d = low_c, low_a
    return a, b, c, d


def _product(builder: Any, factor: int, number: Any) -> tuple[Any, Any]:
    """Return the upper and the lower 64 bits of a product."""
    wide = builder.mul(_I128(factor), builder.zext(number, _I128))
    upper = builder.trunc(builder.lshr(wide, _I128(64)), I64)
    return upper, builder.trunc(wide, I64)
