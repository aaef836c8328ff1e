"""Vectors of fp32 numbers in a function that LLVM compiles, and how they are stored.

LLVM splits a vector to the width of the machine. Importing this module imports llvmlite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from .jit import F16, F32, I16, I32, address_of
from .rules import Operations

Emit = Callable[[Any, Any], Any]  # of LLVM's builder and a vector; returns a vector


def _operation(name: str) -> Callable[[Floats, Floats], Floats]:
    """Return an operator that emits an instruction of LLVM."""

    def operator(self: Floats, other: Floats) -> Floats:
        return Floats(self.builder, getattr(self.builder, name)(self.value, other.value))

    return operator


@dataclass(frozen=True)
class Floats:
    """A vector of fp32 numbers. Operators emit instructions.

    Attributes:
        builder: LLVM's builder.
        value: LLVM's name of the vector.
    """

    builder: Any
    value: Any

    @property
    def width(self) -> int:
        """The number of elements."""
        return int(self.value.type.count)

    def __neg__(self) -> Floats:
        return Floats(self.builder, self.builder.fneg(self.value))

    __add__ = _operation("fadd")
    __sub__ = _operation("fsub")
    __mul__ = _operation("fmul")
    __truediv__ = _operation("fdiv")

    def bits(self) -> Any:
        """Return the bits of the numbers, a vector of int32."""
        return self.builder.bitcast(self.value, ir.VectorType(I32, self.width))

    def settled(self) -> Floats:
        """Return the numbers with the canonical NaN for each NaN."""
        bits = self.bits()
        canonical = filled(I32, 0x7FC00000, self.width)
        chosen = self.builder.select(is_nan(self.builder, bits), canonical, bits)
        return Floats(self.builder, self.builder.bitcast(chosen, self.value.type))


def filled(element: Any, value: int | float, width: int) -> Any:
    """Return a constant vector.

    Args:
        element: LLVM's type of an element.
        value: The value of each element.
        width: The number of elements.
    """
    return ir.Constant(ir.VectorType(element, width), [value] * width)


def spread(builder: Any, number: Any, width: int) -> Floats:
    """Return a vector with one fp32 number in each place.

    Args:
        builder: LLVM's builder.
        number: The number.
        width: The number of elements.
    """
    empty = ir.Constant(ir.VectorType(F32, width), ir.Undefined)
    first = builder.insert_element(empty, number, I32(0))
    return Floats(builder, builder.shuffle_vector(first, empty, filled(I32, 0, width)))


def is_nan(builder: Any, bits: Any) -> Any:
    """Return which fp32 numbers are NaN.

    Args:
        builder: LLVM's builder.
        bits: The bits of the numbers, a vector of int32.
    """
    width = bits.type.count
    magnitude = builder.and_(bits, filled(I32, 0x7FFFFFFF, width))
    return builder.icmp_signed(">", magnitude, filled(I32, 0x7F800000, width))


def load(builder: Any, address: Any, element: Any, nbytes: int, width: int) -> Any:
    """Return a vector that is read from memory.

    Args:
        builder: LLVM's builder.
        address: The address, int64.
        element: LLVM's type of an element.
        nbytes: The bytes of an element.
        width: The number of elements.
    """
    pointer = builder.inttoptr(address, ir.VectorType(element, width).as_pointer())
    return builder.load(pointer, align=nbytes)


def store(builder: Any, values: Any, address: Any, nbytes: int) -> None:
    """Write a vector to memory.

    Args:
        builder: LLVM's builder.
        values: The vector.
        address: The address, int64.
        nbytes: The bytes of an element.
    """
    pointer = builder.inttoptr(address, values.type.as_pointer())
    builder.store(values, pointer, align=nbytes)


# -- operations of update formulas


def _fma(a: Floats, b: Floats, c: Floats) -> Floats:
    return Floats(a.builder, _intrinsic(a.builder, "fma", a.value, b.value, c.value))


def _sqrt(value: Floats) -> Floats:
    return Floats(value.builder, _intrinsic(value.builder, "sqrt", value.value))


def _intrinsic(builder: Any, name: str, *values: Any) -> Any:
    kind = values[0].type
    full_name = f"llvm.{name}.v{kind.count}f32"
    function = builder.module.globals.get(full_name)
    if function is None:
        signature = ir.FunctionType(kind, [kind] * len(values))
        function = ir.Function(builder.module, signature, full_name)
    return builder.call(function, values)


def _sign(value: Floats) -> Floats:
    builder = value.builder
    zero = filled(F32, 0.0, value.width)
    one = filled(F32, 1.0, value.width)
    above = builder.select(builder.fcmp_ordered(">", value.value, zero), one, zero)
    below = builder.select(builder.fcmp_ordered("<", value.value, zero), one, zero)
    return Floats(builder, builder.fsub(above, below))


OPERATIONS = Operations(_fma, _sqrt, _sign)


# -- stored numbers


def _upper(builder: Any, bits: Any) -> Any:
    """Return the upper halves of int32 numbers as int16."""
    width = bits.type.count
    shifted = builder.lshr(bits, filled(I32, 16, width))
    return builder.trunc(shifted, ir.VectorType(I16, width))


def _from_bf16(builder: Any, numbers: Any) -> Any:
    width = numbers.type.count
    wide = builder.zext(numbers, ir.VectorType(I32, width))
    return builder.bitcast(builder.shl(wide, filled(I32, 16, width)), ir.VectorType(F32, width))


def _to_bf16(builder: Any, values: Any) -> Any:
    """Round to the nearest bf16, ties to even. A NaN becomes the canonical one."""
    width = values.type.count
    bits = builder.bitcast(values, ir.VectorType(I32, width))
    is_odd = builder.and_(builder.lshr(bits, filled(I32, 16, width)), filled(I32, 1, width))
    rounded = builder.add(builder.add(bits, filled(I32, 0x7FFF, width)), is_odd)
    canonical = filled(I32, 0x7FC00000, width)
    return _upper(builder, builder.select(is_nan(builder, bits), canonical, rounded))


def _from_fp16(builder: Any, numbers: Any) -> Any:
    return builder.fpext(numbers, ir.VectorType(F32, numbers.type.count))


def _to_fp16(builder: Any, values: Any) -> Any:
    return builder.fptrunc(values, ir.VectorType(F16, values.type.count))


def _unchanged(builder: Any, values: Any) -> Any:
    return values


@dataclass(frozen=True)
class Format:
    """The stored type of a dtype, and the conversion of vectors to and from fp32.

    Attributes:
        element: LLVM's type of an element.
        nbytes: The bytes of an element.
        widen: Emits the conversion to fp32.
        narrow: Emits the conversion from fp32, to the nearest number, ties to even.
    """

    element: Any
    nbytes: int
    widen: Emit
    narrow: Emit

    def load(self, builder: Any, start: Any, index: Any, width: int) -> Floats:
        """Return elements of an array as fp32.

        Args:
            builder: LLVM's builder.
            start: The address of the array.
            index: The index of the first element.
            width: The number of elements.
        """
        address = address_of(builder, start, index, self.nbytes)
        numbers = load(builder, address, self.element, self.nbytes, width)
        return Floats(builder, self.widen(builder, numbers))

    def store(self, values: Floats, start: Any, index: Any) -> None:
        """Round fp32 numbers and write them to an array.

        Args:
            values: The numbers.
            start: The address of the array.
            index: The index of the first element.
        """
        self.store_bits(values.builder, self.narrow(values.builder, values.value), start, index)

    def store_bits(self, builder: Any, numbers: Any, start: Any, index: Any) -> None:
        """Write numbers that have the stored type already.

        Args:
            builder: LLVM's builder.
            numbers: The numbers, a vector of `element`.
            start: The address of the array.
            index: The index of the first element.
        """
        store(builder, numbers, address_of(builder, start, index, self.nbytes), self.nbytes)


FORMATS = {
    torch.float32: Format(F32, 4, _unchanged, _unchanged),
    torch.bfloat16: Format(I16, 2, _from_bf16, _to_bf16),
    torch.float16: Format(F16, 2, _from_fp16, _to_fp16),
}


def joined(builder: Any, upper: Any, lower: Any) -> Floats:
    """Return the fp32 numbers of bf16 numbers and their remainders (`precision/policy.py`).

    If a program changed a number without its remainder, their sum may be NaN although the number
    is not. The result is then the number.

    Args:
        builder: LLVM's builder.
        upper: bf16 numbers, a vector of int16.
        lower: Remainders of the numbers, a vector of int16.
    """
    width = upper.type.count
    integers = ir.VectorType(I32, width)
    number = builder.shl(builder.zext(upper, integers), filled(I32, 16, width))
    bits = builder.add(number, builder.sext(lower, integers))
    chosen = builder.select(is_nan(builder, bits), number, bits)
    return Floats(builder, builder.bitcast(chosen, ir.VectorType(F32, width)))


def upper_half(values: Floats) -> Any:
    """Return the bf16 numbers nearest to settled fp32 numbers, ties away from zero, as int16."""
    half = filled(I32, 0x8000, values.width)
    return _upper(values.builder, values.builder.add(values.bits(), half))


def lower_half(values: Floats) -> Any:
    """Return the remainders of fp32 numbers next to their bf16 numbers, as int16."""
    return values.builder.trunc(values.bits(), ir.VectorType(I16, values.width))


def rounded_by(values: Floats, random: Any) -> Any:
    """Return fp32 numbers as bf16 with stochastic rounding, as int16 (`precision/compact.py`).

    Args:
        values: Settled fp32 numbers.
        random: 16 random bits for each number, a vector of int16.
    """
    builder = values.builder
    wide = builder.zext(random, ir.VectorType(I32, values.width))
    return _upper(builder, builder.add(values.bits(), wide))
