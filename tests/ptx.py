"""Run compiled PTX with NumPy, to test the code of a GPU kernel on a machine without a GPU.

A register is an array with one element per thread. Of the threads that have not returned, those at
the earliest instruction run next, so diverged threads converge again. Only the instructions that
our kernels use are implemented; any other raises.

As on NVIDIA GPUs, each fp32 operation that results in a NaN gives 0x7FFFFFFF. Memory is one array.
An access outside of an allocation or at a misaligned address raises.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
GPU_NAN = np.uint32(0x7FFFFFFF)
DTYPES: dict[str, Any] = {"pred": np.bool_, "f16": np.float16, "f32": np.float32}
for bits in (8, 16, 32, 64):
    DTYPES[f"s{bits}"] = np.dtype(f"i{bits // 8}")
    DTYPES[f"u{bits}"] = DTYPES[f"b{bits}"] = np.dtype(f"u{bits // 8}")
REGISTERS = {"%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64, "%f": np.float32}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neu": lambda a, b: ~(a == b),  # unordered: true if one of them is a NaN
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}


def fused(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of fp32 numbers, rounded once.

    The product is exact in a long double, which has more than 2 * 24 + 2 bits. If the sum is not
    exact, its last bit is set (rounding to odd), so that rounding it to fp32 is rounding the exact
    sum.
    """
    product, addend = a.astype(np.longdouble) * b, c.astype(np.longdouble)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    mantissa, _ = np.frexp(total)
    is_even = np.ldexp(mantissa, np.finfo(np.longdouble).nmant + 1) % 2 == 0
    toward = np.where((error > 0) == (total > 0), 1, 0)  # 1: away from zero
    adjusted = np.nextafter(total, np.where(toward, np.copysign(np.inf, total), np.longdouble(0)))
    return np.where(np.isfinite(total) & (error != 0) & is_even, adjusted, total).astype(np.float32)


class Memory:
    """Global memory: allocations with inaccessible bytes between them."""

    GAP = 64

    def __init__(self, size: int) -> None:
        size = -(-size // 64) * 64
        self.bytes = np.full(size, 0xA5, np.uint8)
        self.is_allocated = np.zeros(size, np.bool_)
        self.top = self.GAP

    def put(self, values: Array, offset: int = 0) -> int:
        """Copy an array to an address that is `offset` bytes after a multiple of 64; return the
        address.
        """
        address = -(-self.top // 64) * 64 + offset
        end = address + values.nbytes
        self.bytes[address:end] = values.reshape(-1).view(np.uint8)
        self.is_allocated[address:end] = True
        self.top = end + self.GAP
        return address

    def get(self, address: int, like: Array) -> Array:
        """Return a copy of the current values at an address."""
        return self.bytes[address : address + like.nbytes].view(like.dtype).copy()

    def places(self, addresses: Array, dtype: Any, count: int) -> tuple[Array, Array]:
        """Return memory as numbers, and the indices of `count` numbers at each address, one row
        each.
        """
        size = np.dtype(dtype).itemsize
        if (addresses % (size * count)).any():
            raise ValueError(
                f"an access of {size * count} bytes at an address that is no multiple of it"
            )
        starts = addresses.astype(np.int64)
        if not (
            self.is_allocated[starts].all() and self.is_allocated[starts + size * count - 1].all()
        ):
            raise ValueError("an access outside of every allocation")
        return self.bytes.view(dtype), starts[:, None] // size + np.arange(count)


class ProcessMemory(Memory):
    """The memory of this process, used as the memory of a device. Bounds are not checked."""

    def __init__(self) -> None:
        super().__init__(0)

    def places(self, addresses: Array, dtype: Any, count: int) -> tuple[Array, Array]:
        size = np.dtype(dtype).itemsize
        if (addresses % (size * count)).any():
            raise ValueError(
                f"an access of {size * count} bytes at an address that is no multiple of it"
            )
        first = int(addresses.min())
        span = int(addresses.max()) - first + size * count
        numbers = np.frombuffer((ctypes.c_uint8 * span).from_address(first), dtype)
        return numbers, (addresses - first).astype(np.int64)[:, None] // size + np.arange(count)


@dataclass
class Instruction:
    """One instruction. guard: the predicate that enables it, and its sign."""

    opcode: str
    operands: list[str]
    guard: tuple[str, bool] | None

    @classmethod
    def from_text(cls, text: str) -> Instruction:
        guard = None
        if text.startswith("@"):
            name, text = text[1:].split(None, 1)
            guard = (name.lstrip("!"), not name.startswith("!"))
        opcode, _, rest = text.partition("\t" if "\t" in text else " ")
        return cls(opcode.strip(), re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest), guard)


@dataclass
class Program:
    """The instructions of a kernel, the positions of its labels and its parameters' indices."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> Program:
        found = cls()
        for index, name in enumerate(re.findall(r"\.param(?: \.align \d+)? \.\w+ (\w+)", text)):
            found.parameters[name] = index
        body = text[text.index("{", text.index(".entry")) + 1 : text.rindex("}")]
        for line in body.splitlines():
            statement = line.partition("//")[0].strip().removesuffix(";")
            if statement.endswith(":"):
                found.labels[statement.removesuffix(":")] = len(found.instructions)
            elif statement and not statement.startswith("."):
                found.instructions.append(Instruction.from_text(statement))
        return found


class Launch:
    """One launch of a kernel.

    Attributes:
        executed: Number of threads that executed each opcode.
        loaded: Bytes that all threads read from global memory.
        stored: Bytes that all threads wrote to global memory.
    """

    def __init__(
        self, program: Program, memory: Memory, grid: int, block: int, arguments: Sequence[Any]
    ) -> None:
        self.program = program
        self.memory = memory
        self.arguments = [np.asarray(argument).reshape(-1) for argument in arguments]
        threads = np.arange(grid * block)
        self.special = {
            "%ctaid.x": (threads // block).astype(np.uint32),
            "%tid.x": (threads % block).astype(np.uint32),
            "%ntid.x": np.full(len(threads), block, np.uint32),
        }
        self.registers: dict[str, Array] = {}
        self.counter = np.zeros(len(threads), np.int64)
        self.active = threads
        self.executed: Counter[str] = Counter()
        self.loaded = 0
        self.stored = 0

    def run(self) -> Launch:
        end = len(self.program.instructions)
        while True:
            place = int(self.counter.min())
            if place >= end:
                return self
            instruction = self.program.instructions[place]
            self.active = np.flatnonzero(self.counter == place)
            self.counter[self.active] = place + 1
            if instruction.guard is not None:
                name, wanted = instruction.guard
                self.active = self.active[self.registers[name][self.active] == wanted]
            if len(self.active):
                self.executed[instruction.opcode] += len(self.active)
                self._execute(instruction)

    def read(self, operand: str, kind: str) -> Array:
        """Return an operand of the active threads as numbers of this type."""
        dtype = np.dtype(DTYPES[kind])
        if operand.startswith("%"):
            values = self.special.get(operand)
            values = (self.registers[operand] if values is None else values)[self.active]
            if values.dtype.itemsize > dtype.itemsize:
                values = values.astype(f"u{dtype.itemsize}")
            return values.view(dtype)
        if operand.startswith("0f"):
            number = np.array([int(operand[2:], 16)], np.uint32).view(dtype)
        else:
            number = (
                np.array([int(operand, 0) % (1 << 8 * dtype.itemsize)], np.uint64)
                .astype(f"u{dtype.itemsize}")
                .view(dtype)
            )
        return np.broadcast_to(number, len(self.active))

    def write(self, register: str, values: Array) -> None:
        """Set a register of the active threads; a narrower integer is extended."""
        prefix = re.match(r"%[a-z]+", register)
        assert prefix is not None
        dtype = np.dtype(REGISTERS[prefix[0]])
        if values.dtype.itemsize < dtype.itemsize:
            values = values.astype(f"{values.dtype.kind}{dtype.itemsize}")
        if register not in self.registers:
            self.registers[register] = np.zeros(len(self.counter), dtype)
        self.registers[register][self.active] = values.view(dtype)

    def _execute(self, instruction: Instruction) -> None:
        name, *modifiers = instruction.opcode.split(".")
        handler = getattr(self, f"_{name}", None)
        if handler is None:
            raise NotImplementedError(f"PTX instruction {instruction.opcode}")
        with np.errstate(all="ignore"):
            handler(modifiers, *instruction.operands)

    # -- control

    def _bra(self, modifiers: list[str], label: str) -> None:
        self.counter[self.active] = self.program.labels[label]

    def _ret(self, modifiers: list[str]) -> None:
        self.counter[self.active] = len(self.program.instructions)

    # -- moves

    def _mov(self, modifiers: list[str], target: str, source: str) -> None:
        kind = modifiers[-1]
        if target.startswith("{"):
            values = self.read(source, "b32").copy().view(np.uint16).reshape(-1, 2)
            for index, part in enumerate(_list(target)):
                self.write(part, values[:, index].copy())
        elif source.startswith("{"):
            parts = [self.read(part, "b16") for part in _list(source)]
            self.write(target, np.stack(parts, axis=1).copy().view(np.uint32).reshape(-1))
        else:
            self.write(target, self.read(source, kind))

    def _cvta(self, modifiers: list[str], target: str, source: str) -> None:
        self.write(target, self.read(source, "u64"))

    def _ld(self, modifiers: list[str], target: str, place: str) -> None:
        kind = modifiers[-1]
        if modifiers[0] == "param":
            name, _, offset = place.strip("[]").partition("+")
            data = self.arguments[self.program.parameters[name]].view(np.uint8)
            start = int(offset or 0)
            dtype = np.dtype(DTYPES[kind])
            value = data[start : start + dtype.itemsize].view(dtype)
            self.write(target, np.broadcast_to(value, len(self.active)))
            return
        targets = _list(target)
        numbers, indices = self.memory.places(self._address(place), DTYPES[kind], len(targets))
        for column, part in enumerate(targets):
            self.write(part, numbers[indices[:, column]])
        self.loaded += indices.size * numbers.itemsize

    def _st(self, modifiers: list[str], place: str, source: str) -> None:
        kind, sources = modifiers[-1], _list(source)
        numbers, indices = self.memory.places(self._address(place), DTYPES[kind], len(sources))
        for column, part in enumerate(sources):
            numbers[indices[:, column]] = self.read(part, kind)
        self.stored += indices.size * numbers.itemsize

    def _address(self, place: str) -> Array:
        name, _, offset = place.strip("[]").partition("+")
        return self.read(name, "u64") + np.uint64(int(offset or 0) % (1 << 64))

    def _selp(self, modifiers: list[str], target: str, yes: str, no: str, predicate: str) -> None:
        kind = modifiers[-1]
        self.write(
            target,
            np.where(self.read(predicate, "pred"), self.read(yes, kind), self.read(no, kind)),
        )

    def _setp(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        relation, kind = modifiers
        self.write(target, COMPARE[relation](self.read(a, kind), self.read(b, kind)))

    def _cvt(self, modifiers: list[str], target: str, source: str) -> None:
        into, kind = modifiers[-2:]
        if modifiers in (["f32", "f16"], ["rn", "f16", "f32"]):
            values = self.read(source, kind)
            found = values.astype(DTYPES[into])
            bits = found.view(f"u{found.dtype.itemsize}")
            bits[np.isnan(values)] = GPU_NAN if into == "f32" else 0x7FFF
            self.write(target, bits)
        elif "f" in into + kind or len(modifiers) != 2:
            raise NotImplementedError(f"cvt.{'.'.join(modifiers)}")
        else:
            self.write(target, self.read(source, kind).astype(DTYPES[into]))

    # -- integers

    def _integer(
        self, modifiers: list[str], target: str, operation: Callable[..., Array], *sources: str
    ) -> None:
        kind = modifiers[-1]
        self.write(target, operation(*(self.read(source, kind) for source in sources)))

    def _and(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        self._integer(modifiers, target, np.bitwise_and, a, b)

    def _or(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        self._integer(modifiers, target, np.bitwise_or, a, b)

    def _xor(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        self._integer(modifiers, target, np.bitwise_xor, a, b)

    def _not(self, modifiers: list[str], target: str, a: str) -> None:
        self._integer(modifiers, target, np.invert, a)

    def _shl(self, modifiers: list[str], target: str, a: str, by: str) -> None:
        values = self.read(a, modifiers[-1])
        self.write(target, values << self.read(by, "u32").astype(values.dtype))

    def _shr(self, modifiers: list[str], target: str, a: str, by: str) -> None:
        values = self.read(a, modifiers[-1])
        self.write(target, values >> self.read(by, "u32").astype(values.dtype))

    def _prmt(self, modifiers: list[str], target: str, a: str, b: str, selector: str) -> None:
        low, high = self.read(a, "u32").copy(), self.read(b, "u32").copy()
        data = np.stack([low, high], axis=1).view(np.uint8)
        choice = int(selector, 0)
        if choice & 0x8888:
            raise NotImplementedError("prmt with replicated signs")
        found = np.stack([data[:, choice >> 4 * index & 7] for index in range(4)], axis=1)
        self.write(target, found.copy().view(np.uint32).reshape(-1))

    def _mad(self, modifiers: list[str], target: str, a: str, b: str, c: str) -> None:
        if modifiers[0] != "lo":
            raise NotImplementedError(f"mad.{'.'.join(modifiers)}")
        self._integer(modifiers, target, lambda x, y, z: x * y + z, a, b, c)

    # -- fp32 and integers

    def _add(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        self._arithmetic(modifiers, target, np.add, a, b)

    def _sub(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        self._arithmetic(modifiers, target, np.subtract, a, b)

    def _mul(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        mode, kind = modifiers
        if mode == "wide":
            wide = DTYPES[f"{kind[0]}{2 * int(kind[1:])}"]
            self.write(target, self.read(a, kind).astype(wide) * self.read(b, kind).astype(wide))
        elif mode == "hi" and kind == "u64":
            self.write(target, _upper_half(self.read(a, kind), self.read(b, kind)))
        elif mode == "lo":
            self._integer(modifiers, target, np.multiply, a, b)
        else:
            self._arithmetic(modifiers, target, np.multiply, a, b)

    def _div(self, modifiers: list[str], target: str, a: str, b: str) -> None:
        self._rounded(modifiers, target, np.divide, a, b)

    def _sqrt(self, modifiers: list[str], target: str, a: str) -> None:
        self._rounded(modifiers, target, np.sqrt, a)

    def _fma(self, modifiers: list[str], target: str, a: str, b: str, c: str) -> None:
        self._rounded(modifiers, target, fused, a, b, c)

    def _neg(self, modifiers: list[str], target: str, a: str) -> None:
        self._integer(modifiers, target, np.negative, a)

    def _arithmetic(
        self, modifiers: list[str], target: str, operation: Callable[..., Array], *sources: str
    ) -> None:
        if modifiers[-1] == "f32":
            self._rounded(modifiers, target, operation, *sources)
        elif len(modifiers) == 1:
            self._integer(modifiers, target, operation, *sources)
        else:
            raise NotImplementedError(f"{operation.__name__} {'.'.join(modifiers)}")

    def _rounded(
        self, modifiers: list[str], target: str, operation: Callable[..., Array], *sources: str
    ) -> None:
        if modifiers != ["rn", "f32"]:
            raise NotImplementedError(f"{operation.__name__} {'.'.join(modifiers)}")
        found = operation(*(self.read(source, "f32") for source in sources))
        bits = found.view(np.uint32).copy()
        bits[np.isnan(found)] = GPU_NAN
        self.write(target, bits.view(np.float32))


def _list(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def _upper_half(a: Array, b: Array) -> Array:
    """Return the upper 64 bits of the products of two arrays of uint64."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, cross = (a & mask) * (b & mask), (a >> half) * (b & mask)
    middle = (a & mask) * (b >> half) + (low >> half)
    carry = (cross & mask) + (middle & mask)
    return (a >> half) * (b >> half) + (cross >> half) + (middle >> half) + (carry >> half)
