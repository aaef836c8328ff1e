"""Operations on single numbers that numba compiles into a few instructions.

Importing this module imports numba. numba lacks a fused multiply-add, a view of a number's bits,
and 16-bit floats. bf16 and fp16 numbers are passed as int16. All integers are int32: numba widens
the sum of two int32 to int64, which halves the width of vectors, so each result is cast back.
"""

from __future__ import annotations

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
        a: A float32 factor.
        b: A float32 factor.
        c: A float32 summand.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """Return the bits of a float32 as int32.

    Args:
        typing: The typing context that numba passes.
        value: The float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """Return the float32 with the given bits.

    Args:
        typing: The typing context that numba passes.
        bits: The bits as int32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


@intrinsic
def from_fp16(typing: Any, half: Any) -> Any:
    """Convert fp16 to float32.

    Args:
        typing: The typing context that numba passes.
        half: The bits of the fp16 number as int16.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], _F16), _F32)

    return types.float32(types.int16), generate


@intrinsic
def to_fp16(typing: Any, value: Any) -> Any:
    """Convert float32 to the nearest fp16, ties to even.

    Args:
        typing: The typing context that numba passes.
        value: The float32.

    Returns:
        The bits of the fp16 number as int16.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)

    return types.int16(types.float32), generate


@njit
def settled(value: Any) -> Any:
    """Return a float32 unchanged, or the canonical NaN for any NaN."""
    bits = bits_of(value)
    is_nan = (bits & int32(0x7FFFFFFF)) > int32(0x7F800000)
    canonical = int32(0x7FC00000) if is_nan else bits
    return float_of(canonical)


@njit
def from_bf16(upper: Any) -> Any:
    """Convert bf16 to float32."""
    return float_of(int32(upper) << int32(16))


@njit
def to_bf16(value: Any) -> Any:
    """Convert float32 to the nearest bf16, ties away from zero.

    A NaN must be the canonical one.
    """
    return int16((bits_of(value) + int32(0x8000)) >> int32(16))


@njit
def joined(upper: Any, lower: Any) -> Any:
    """Return the float32 of a bf16 number and its remainder (`precision/policy.py`).

    If a program changed the number without its remainder, their sum may be NaN although the number
    is not. The result is then the number.

    Args:
        upper: The bf16 number.
        lower: The remainder.
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
    """Convert float32 to bf16 with stochastic rounding (`precision/compact.py`).

    Args:
        value: The number.
        random: 16 random bits, as int16.
    """
    return int16((bits_of(value) + (int32(random) & int32(0xFFFF))) >> int32(16))
