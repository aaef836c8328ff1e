"""Sums of rows and sums of squares as vector instructions, compiled by LLVM.

Importing this module imports llvmlite. LLVM splits the vectors to the width of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from .jit import F16, F32, F64, I32, I64, address_of, compile_function, counting
from .sums import BLOCK, COLUMNS
from .vectors import FORMATS, Floats, filled, load, spread

WIDTH = 64  # Elements that a sum of rows keeps in registers
_VECTOR = 8  # float64 numbers in a 512-bit register


@cache
def sum_loop(
    row_dtype: torch.dtype,
    out_dtype: torch.dtype,
    rows: int,
    *,
    divides: bool,
    adds: bool,
    rounds: bool,
) -> Callable[..., None]:
    """Return the loop over elements [start, stop) of a sum of rows.

    The range must have at least `WIDTH` elements. The loop reads all rows at a place before it
    writes there, so the sum may overwrite a row. The last vector begins `WIDTH` elements before the
    end and overlaps the previous one, so it is computed before the previous one is stored.

    The arguments of the loop are start, stop, the factor, the address of the sum, and those of the
    rows.

    Args:
        row_dtype: The dtype of the rows.
        out_dtype: The dtype of the sum.
        rows: The number of rows.
        divides: Whether to divide by the factor instead of multiplying.
        adds: Whether to add the old values of the sum.
        rounds: Whether to round to bf16 before the factor is applied.
    """
    stored = FORMATS[out_dtype]
    bf16 = FORMATS[torch.bfloat16]

    def emit(builder: Any, arguments: Sequence[Any]) -> None:
        start, stop, factor, out, *addresses = arguments
        factors = spread(builder, factor, WIDTH)

        def total(place: Any) -> Floats:
            """Return the new values of the sum at `WIDTH` places."""
            first, *others = [
                FORMATS[row_dtype].load(builder, address, place, WIDTH) for address in addresses
            ]
            found = sum(others, first)
            if rounds:
                narrow = bf16.narrow(builder, found.value)
                found = Floats(builder, bf16.widen(builder, narrow))
            found = found / factors if divides else found * factors
            return stored.load(builder, out, place, WIDTH) + found if adds else found

        end = builder.sub(stop, I64(WIDTH))
        last = total(end)
        with counting(builder, start, end, WIDTH) as place:
            stored.store(total(place), out, place)
        stored.store(last, out, end)

    return compile_function([I64, I64, F32, I64, *[I64] * rows], emit)


def _wide(builder: Any, address: Any, dtype: torch.dtype) -> list[Any]:
    """Return 16 numbers as two vectors of float64.

    For bf16 these have the numbers at even and at odd places, otherwise the two halves.
    """

    def at(place: int, element: ir.Type) -> Any:
        """Load a vector that begins `place` numbers after the address."""
        nbytes = FORMATS[dtype].nbytes
        there = builder.add(address, ir.Constant(I64, place * nbytes))
        return load(builder, there, element, nbytes, _VECTOR)

    floats = ir.VectorType(F32, _VECTOR)
    doubles = ir.VectorType(F64, _VECTOR)
    if dtype == torch.bfloat16:
        pairs = at(0, I32)
        even = builder.shl(pairs, filled(I32, 16, _VECTOR))
        odd = builder.and_(pairs, filled(I32, -(1 << 16), _VECTOR))
        both = [builder.bitcast(bits, floats) for bits in (even, odd)]
    elif dtype == torch.float16:
        both = [builder.fpext(at(place, F16), floats) for place in (0, _VECTOR)]
    else:
        both = [at(place, F32) for place in (0, _VECTOR)]
    return [builder.fpext(each, doubles) for each in both]


def _in_order(builder: Any, even: Any, odd: Any) -> list[Any]:
    """Interleave the numbers at even and at odd places, and return two vectors."""
    found = []
    for first in (0, _VECTOR // 2):
        places = [
            place + which for place in range(first, first + _VECTOR // 2) for which in (0, _VECTOR)
        ]
        found.append(
            builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, _VECTOR), places))
        )
    return found


def _block_sum(builder: Any, address: Any, dtype: torch.dtype) -> Any:
    """Return the sum of the squares of one block at an address.

    The order of the sum is that of `sums.sum_of_squares`.
    """
    nbytes = FORMATS[dtype].nbytes
    step = 2 * _VECTOR

    def row(number: int) -> list[Any]:
        """Return the numbers of a row of the block as vectors of float64."""
        found = []
        for place in range(number * COLUMNS, (number + 1) * COLUMNS, step):
            there = builder.add(address, ir.Constant(I64, place * nbytes))
            found += _wide(builder, there, dtype)
        return found

    def plus_square(total: Any, value: Any) -> Any:
        # A square of float32 is exact in float64, so a fused multiply-add has the same bits
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
        found = [builder.fadd(*each) for each in zip(found[:middle], found[middle:], strict=True)]
    total = found[0]
    width = _VECTOR
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                total,
                total,
                ir.Constant(ir.VectorType(I32, width), list(range(first, first + width))),
            )
            for first in (0, width)
        ]
        total = builder.fadd(*halves)
    return builder.extract_element(total, ir.Constant(I32, 0))


@cache
def square_loop(dtype: torch.dtype) -> Callable[..., None]:
    """Return the loop that writes the sums of squares of blocks [start, stop).

    Its arguments are the address of the numbers, that of the sums (float64), start and stop.

    Args:
        dtype: The dtype of the numbers.
    """

    def emit(builder: Any, arguments: Sequence[Any]) -> None:
        numbers, sums, start, stop = arguments
        with counting(builder, start, stop, 1) as block:
            address = address_of(builder, numbers, block, BLOCK * FORMATS[dtype].nbytes)
            total = _block_sum(builder, address, dtype)
            there = address_of(builder, sums, block, 8)
            builder.store(total, builder.inttoptr(there, F64.as_pointer()))

    return compile_function([I64] * 4, emit)
