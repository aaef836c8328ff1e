"""Sums of rows and sums of squares as vector instructions, compiled by numba.

Importing this module imports numba. numba vectorizes a loop only if its arrays do not overlap, and
a sum over ranks often overwrites one of its rows. These loops are therefore built from explicit
loads and stores of vectors, at addresses. LLVM splits the vectors to the width of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from .compiler import compiled
from .primitives import unary
from .sums import BLOCK, COLUMNS

WIDTH = 64  # Elements that a sum of rows keeps in registers
_VECTOR = 8  # float64 numbers in a 512-bit register
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F16 = ir.HalfType()
_F32 = ir.FloatType()
_F64 = ir.DoubleType()


class _Floats(types.Type):  # type: ignore[misc]
    """The numba type of `WIDTH` float32 numbers."""

    def __init__(self) -> None:
        super().__init__("Floats")


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type_: Any) -> None:
        super().__init__(manager, type_, ir.VectorType(_F32, WIDTH))


_floats = _Floats()


def _filled(element: ir.Type, value: int, width: int = WIDTH) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, width), [value] * width)


def _load(builder: Any, address: Any, element: ir.Type, nbytes: int, width: int = WIDTH) -> Any:
    return builder.load(
        builder.inttoptr(address, ir.VectorType(element, width).as_pointer()), align=nbytes
    )


def _store(builder: Any, values: Any, address: Any, nbytes: int) -> None:
    builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=nbytes)


def _from_bf16(builder: Any, numbers: Any) -> Any:
    bits = builder.shl(builder.zext(numbers, ir.VectorType(_I32, WIDTH)), _filled(_I32, 16))
    return builder.bitcast(bits, ir.VectorType(_F32, WIDTH))


def _to_bf16(builder: Any, values: Any) -> Any:
    """Round to the nearest bf16, ties to even. A NaN becomes the canonical one."""
    bits = builder.bitcast(values, ir.VectorType(_I32, WIDTH))
    is_odd = builder.and_(builder.lshr(bits, _filled(_I32, 16)), _filled(_I32, 1))
    rounded = builder.add(builder.add(bits, _filled(_I32, 0x7FFF)), is_odd)
    is_nan = builder.fcmp_unordered("uno", values, values)
    upper = builder.select(is_nan, _filled(_I32, 0x7FC0), builder.lshr(rounded, _filled(_I32, 16)))
    return builder.trunc(upper, ir.VectorType(_I16, WIDTH))


def _from_fp16(builder: Any, numbers: Any) -> Any:
    return builder.fpext(numbers, ir.VectorType(_F32, WIDTH))


def _to_fp16(builder: Any, values: Any) -> Any:
    return builder.fptrunc(values, ir.VectorType(_F16, WIDTH))


def _unchanged(builder: Any, values: Any) -> Any:
    return values


@dataclass(frozen=True)
class _Format:
    """The stored type of a dtype, and the conversion of vectors to and from float32."""

    element: ir.Type
    nbytes: int
    widen: Callable[[Any, Any], Any]
    narrow: Callable[[Any, Any], Any]


_FORMATS = {
    torch.float32: _Format(_F32, 4, _unchanged, _unchanged),
    torch.bfloat16: _Format(_I16, 2, _from_bf16, _to_bf16),
    torch.float16: _Format(_F16, 2, _from_fp16, _to_fp16),
}


def _loader(format_: _Format) -> Any:
    return unary(
        _floats,
        types.int64,
        lambda builder, address: format_.widen(
            builder, _load(builder, address, format_.element, format_.nbytes)
        ),
    )


def _storer(format_: _Format) -> Any:
    @intrinsic
    def store(typing: Any, address: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _store(builder, format_.narrow(builder, args[1]), args[0], format_.nbytes)
            return context.get_dummy_value()

        return types.void(types.int64, _floats), generate

    return store


def _spread(builder: Any, number: Any) -> Any:
    """Return a vector with the number in each place."""
    empty = ir.Constant(ir.VectorType(_F32, WIDTH), ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, _filled(_I32, 0))


def _binary(second: Any, emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a function of `_Floats` and an argument of type `second`, as `unary`."""

    @intrinsic
    def operation(typing: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return _floats(_floats, second), generate

    return operation


_plus = _binary(_floats, lambda builder, left, right: builder.fadd(left, right))
_times = _binary(
    types.float32, lambda builder, values, factor: builder.fmul(values, _spread(builder, factor))
)
_over = _binary(
    types.float32, lambda builder, values, divisor: builder.fdiv(values, _spread(builder, divisor))
)
_rounded_to_bf16 = unary(
    _floats, _floats, lambda builder, values: _from_bf16(builder, _to_bf16(builder, values))
)


@cache
def sum_loop(row_dtype: torch.dtype, out_dtype: torch.dtype) -> Callable[..., None]:
    """Return the loop over elements [start, stop) of a sum of rows.

    The range must have at least `WIDTH` elements. The loop reads all rows at a place before it
    writes there, so the sum may overwrite a row. The last vector begins `WIDTH` elements before the
    end and overlaps the previous one, so it is computed before the previous one is stored.

    The arguments of the loop are the addresses of the rows (an int64 array), the address of the
    sum, start, stop, the factor (float32), and three flags: divide by the factor instead of
    multiplying, add to the old values of the sum, and round to bf16 before the factor is applied.

    Args:
        row_dtype: The dtype of the rows.
        out_dtype: The dtype of the sum.
    """
    load = _loader(_FORMATS[row_dtype])
    row_nbytes = _FORMATS[row_dtype].nbytes
    load_out = _loader(_FORMATS[out_dtype])
    store = _storer(_FORMATS[out_dtype])
    out_nbytes = _FORMATS[out_dtype].nbytes

    @compiled
    def total(
        rows: Any, out: Any, place: Any, factor: Any, divides: Any, adds: Any, rounds: Any
    ) -> Any:
        found = load(rows[0] + place * row_nbytes)
        for row in range(1, len(rows)):
            found = _plus(found, load(rows[row] + place * row_nbytes))
        if rounds:
            found = _rounded_to_bf16(found)
        found = _over(found, factor) if divides else _times(found, factor)
        if adds:
            found = _plus(load_out(out + place * out_nbytes), found)
        return found

    def loop(
        rows: Any,
        out: Any,
        start: Any,
        stop: Any,
        factor: Any,
        divides: Any,
        adds: Any,
        rounds: Any,
    ) -> None:
        end = stop - WIDTH
        last = total(rows, out, end, factor, divides, adds, rounds)
        for place in range(start, end, WIDTH):
            store(out + place * out_nbytes, total(rows, out, place, factor, divides, adds, rounds))
        store(out + end * out_nbytes, last)

    return compiled(loop)


def _wide(builder: Any, address: Any, dtype: torch.dtype) -> list[Any]:
    """Return 16 numbers as two vectors of float64.

    For bf16 these have the numbers at even and at odd places, otherwise the two halves.
    """

    def at(place: int, element: ir.Type) -> Any:
        nbytes = _FORMATS[dtype].nbytes
        there = builder.add(address, ir.Constant(_I64, place * nbytes))
        return _load(builder, there, element, nbytes, _VECTOR)

    floats = ir.VectorType(_F32, _VECTOR)
    doubles = ir.VectorType(_F64, _VECTOR)
    if dtype == torch.bfloat16:
        pairs = at(0, _I32)
        even = builder.shl(pairs, _filled(_I32, 16, _VECTOR))
        odd = builder.and_(pairs, _filled(_I32, -(1 << 16), _VECTOR))
        both = [builder.bitcast(bits, floats) for bits in (even, odd)]
    elif dtype == torch.float16:
        both = [builder.fpext(at(place, _F16), floats) for place in (0, _VECTOR)]
    else:
        both = [at(place, _F32) for place in (0, _VECTOR)]
    return [builder.fpext(each, doubles) for each in both]


def _in_order(builder: Any, even: Any, odd: Any) -> list[Any]:
    """Interleave the numbers at even and at odd places, and return two vectors."""
    found = []
    for first in (0, _VECTOR // 2):
        places = [
            place + which for place in range(first, first + _VECTOR // 2) for which in (0, _VECTOR)
        ]
        found.append(
            builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(_I32, _VECTOR), places))
        )
    return found


def _block_sum(dtype: torch.dtype) -> Any:
    """Return the function that sums the squares of one block at an address.

    The order of the sum is that of `sums.sum_of_squares`.
    """
    nbytes = _FORMATS[dtype].nbytes
    step = 2 * _VECTOR

    def emit(builder: Any, address: Any) -> Any:
        def row(number: int) -> list[Any]:
            found = []
            for place in range(number * COLUMNS, (number + 1) * COLUMNS, step):
                there = builder.add(address, ir.Constant(_I64, place * nbytes))
                found += _wide(builder, there, dtype)
            return found

        def plus_square(total: Any, value: Any) -> Any:
            # A square of float32 is exact in float64, so a fused multiply-add has the same
            # bits.
            square = builder.fmul(value, value, flags=["contract"])
            return builder.fadd(total, square, flags=["contract"])

        found = [builder.fmul(value, value) for value in row(0)]
        for number in range(1, BLOCK // COLUMNS):
            found = [plus_square(*each) for each in zip(found, row(number), strict=True)]
        if dtype == torch.bfloat16:
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [vector for pair in pairs for vector in _in_order(builder, *pair)]
        while len(found) > 1:
            middle = len(found) // 2
            found = [
                builder.fadd(*each) for each in zip(found[:middle], found[middle:], strict=True)
            ]
        total = found[0]
        width = _VECTOR
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    total,
                    total,
                    ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))),
                )
                for first in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return unary(types.float64, types.int64, emit)


@cache
def square_loop(dtype: torch.dtype) -> Callable[..., None]:
    """Return the loop that writes the sums of squares of blocks [start, stop)."""
    block_sum = _block_sum(dtype)
    nbytes = BLOCK * _FORMATS[dtype].nbytes

    def loop(address: Any, sums: Any, start: Any, stop: Any) -> None:
        for block in range(start, stop):
            sums[block] = block_sum(address + block * nbytes)

    return compiled(loop)
