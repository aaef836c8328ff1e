"""Operations on single numbers that numba compiles into a few instructions.

Importing this module imports numba. numba lacks a fused multiply-add, a view of a number's bits,
and 16-bit floats. bf16 and fp16 numbers are passed as int16. All integers are int32: numba widens
the sum of two int32 to int64, which halves the width of vectors, so each result is cast back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int16, int32, njit, types
from numba.extending import intrinsic

_F16 = ir.HalfType()
_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once.

    Args:
        typing: The typing context that numba passes.
        a: First factor, float32.
        b: Second factor, float32.
        c: Number that is added to the product, float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


def unary(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """Return a function of one argument that numba compiles to given instructions.

    Args:
        result: The numba type of the result.
        argument: The numba type of the argument.
        emit: Called with LLVM's builder and the argument; returns the result.
    """

    @intrinsic
    def operation(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return result(argument), generate

    return operation


# A float32 and its bits as int32
bits_of = unary(types.int32, types.float32, lambda builder, value: builder.bitcast(value, _I32))
float_of = unary(types.float32, types.int32, lambda builder, bits: builder.bitcast(bits, _F32))
# A float32 and the bits of an fp16 number as int16; rounded to nearest, ties to even
from_fp16 = unary(
    types.float32,
    types.int16,
    lambda builder, half: builder.fpext(builder.bitcast(half, _F16), _F32),
)
to_fp16 = unary(
    types.int16,
    types.float32,
    lambda builder, value: builder.bitcast(builder.fptrunc(value, _F16), _I16),
)


@njit
def settled(value: Any) -> Any:
    """Return a float32 unchanged, or the canonical NaN for any NaN."""
    bits = bits_of(value)
    is_nan = (bits & int32(0x7FFFFFFF)) > int32(0x7F800000)
    canonical = int32(0x7FC00000) if is_nan else bits
    return float_of(canonical)


@njit
def from_bf16(upper: Any) -> Any:
    """Return a bf16 number as float32."""
    return float_of(int32(upper) << int32(16))


@njit
def to_bf16(value: Any) -> Any:
    """Return the bf16 number nearest to a float32, ties away from zero.

    A NaN must be the canonical one.
    """
    return int16((bits_of(value) + int32(0x8000)) >> int32(16))


@njit
def joined(upper: Any, lower: Any) -> Any:
    """Return the float32 of a bf16 number and its remainder (`precision/policy.py`).

    If a program changed the number without its remainder, their sum may be NaN although the number
    is not. The result is then the number.

    Args:
        upper: bf16 number, as int16.
        lower: Remainder of the number, as int16.
    """
    number = int32(int32(upper) << int32(16))
    bits = int32(number + int32(lower))
    is_nan = (bits & int32(0x7FFFFFFF)) > int32(0x7F800000)
    joined_bits = number if is_nan else bits
    return float_of(joined_bits)


@njit
def low_half(value: Any) -> Any:
    """Return the remainder of a float32 next to its bf16 number."""
    return int16(bits_of(value))


@njit
def round_by(value: Any, random: Any) -> Any:
    """Return a float32 as bf16 with stochastic rounding (`precision/compact.py`).

    Args:
        value: float32 number to round.
        random: 16 random bits, as int16.
    """
    return int16((bits_of(value) + (int32(random) & int32(0xFFFF))) >> int32(16))
