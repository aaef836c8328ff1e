"""Updates in one pass over memory on a CPU, compiled by LLVM.

The formula is not written a second time. The function in `rules.py` is evaluated with vectors
instead of numbers, and each operation emits an instruction. Importing this module imports llvmlite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.log import log_once
from .chance import PER_COUNT, emit_fill
from .check import Arrays, Chance, is_definition
from .jit import F32, I16, I64, address_of, compile_function, converts_fp16, counting
from .rules import RULES, VECTOR, Layout, Scalars, Variant
from .threads import in_slices
from .vectors import (
    FORMATS,
    OPERATIONS,
    Floats,
    filled,
    joined,
    load,
    lower_half,
    rounded_by,
    spread,
    upper_half,
)

WIDTH = 16  # Elements of a vector
_BLOCK = 2048  # Elements whose random bits are drawn at a time; they fit into a core's L1 cache
_STREAM = _BLOCK + 2 * PER_COUNT  # Room for the random bits of one state
_FP32 = FORMATS[torch.float32]
_BF16 = FORMATS[torch.bfloat16]


class _Columns(NamedTuple):
    """The addresses of a shard's arrays, int64.

    `random` has the addresses of the random bits of the weight and of two states.
    """

    gradient: Any
    main: Any
    other: Any
    first: Any
    second: Any
    random: tuple[Any, ...] = ()


class _Kernel:
    """Emits the update of a variant and layout."""

    def __init__(self, variant: Variant, layout: Layout, builder: Any, scalars: Any) -> None:
        self.variant = variant
        self.layout = layout
        self.builder = builder
        self.formula = RULES[variant.rule].formula(variant, OPERATIONS)
        self.state_format = _BF16 if layout.states_rounded else _FP32
        self._scalars = scalars  # numbers; the last one is the factor of the gradient

    def emit_range(self, columns: _Columns, start: Any, body: Any, stop: Any) -> None:
        """Emit the update of elements [start, stop), of which those from `body` on are a tail."""
        builder = self.builder
        whole = builder.and_(builder.sub(body, start), I64(-WIDTH))
        for first, last, width, is_tail in (
            (start, builder.add(start, whole), WIDTH, False),
            (builder.add(start, whole), body, 1, False),
            (body, stop, 1, True),
        ):
            scalars = tuple(spread(builder, number, width) for number in self._scalars)
            with counting(builder, first, last, width) as index:
                self._emit_vector(columns, index, builder.sub(index, start), scalars, is_tail)

    def _emit_vector(
        self, columns: _Columns, index: Any, place: Any, scalars: Sequence[Floats], is_tail: bool
    ) -> None:
        """Emit the update of the elements at `index`, whose random bits are at `place`."""
        builder = self.builder
        layout = self.layout
        width = scalars[0].width
        *hypers, factor = scalars
        gradient = FORMATS[layout.gradient].load(builder, columns.gradient, index, width)
        zeros = Floats(builder, filled(F32, 0.0, width))
        addresses = (columns.first, columns.second)[: len(self.variant.states)]
        states = [zeros, zeros]
        if not self.variant.first:
            for number, address in enumerate(addresses):
                states[number] = self.state_format.load(builder, address, index, width)
        weight = self._weight(columns, index, width)
        first, second = states
        weight, *states = self.formula(weight, gradient * factor, first, second, hypers, is_tail)
        self._store_weight(weight.settled(), columns, index, place)
        for number, address in enumerate(addresses):
            state = states[number].settled()
            if layout.states_rounded:
                random = self._load_bits(columns.random[1 + number], place, width)
                numbers = rounded_by(state, random)
                _BF16.store_bits(builder, numbers, address, index)
            else:
                _FP32.store(state, address, index)

    def _weight(self, columns: _Columns, index: Any, width: int) -> Floats:
        """Emit the load of the main weight, or of the weight if there is no main weight."""
        if self.layout.is_split:
            upper = self._load_bits(columns.main, index, width)
            lower = self._load_bits(columns.other, index, width)
            return joined(self.builder, upper, lower)
        stored = _BF16 if self.layout.is_rounded else _FP32
        return stored.load(self.builder, columns.main, index, width)

    def _store_weight(self, weight: Floats, columns: _Columns, index: Any, place: Any) -> None:
        """Emit the stores of the main weight and of the published weight, if any."""
        builder = self.builder
        layout = self.layout
        if layout.is_split:
            _BF16.store_bits(builder, upper_half(weight), columns.main, index)
            _BF16.store_bits(builder, lower_half(weight), columns.other, index)
        elif layout.is_rounded:
            numbers = rounded_by(weight, self._load_bits(columns.random[0], place, weight.width))
            _BF16.store_bits(builder, numbers, columns.main, index)
        else:
            _FP32.store(weight, columns.main, index)
        if layout.published == torch.bfloat16:
            _BF16.store_bits(builder, upper_half(weight), columns.other, index)
        elif layout.published is not None:
            FORMATS[layout.published].store(weight, columns.other, index)

    def _load_bits(self, start: Any, index: Any, width: int) -> Any:
        """Emit the load of 16-bit integers from the array that begins at `start`."""
        address = address_of(self.builder, start, index, _BF16.nbytes)
        return load(self.builder, address, I16, _BF16.nbytes, width)


@cache
def compiled_loop(variant: Variant, layout: Layout, scalar_count: int) -> Callable[..., None]:
    """Return the compiled loop over a shard's elements.

    Its arguments are the number of elements without a tail, the number of all elements, the
    addresses of the five columns and of the room for random bits, the first element in the
    parameter, the number of the update, the seed, three keys, the scalars and the factor.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        scalar_count: Number of scalars of the formula.
    """

    def emit(builder: Any, arguments: Sequence[Any]) -> None:
        body, numel, *rest = arguments
        columns = _Columns(*rest[:5])
        room, element, step, seed, *keys = rest[5:12]
        kernel = _Kernel(variant, layout, builder, rest[12:])
        if not layout.is_random:
            kernel.emit_range(columns, I64(0), body, numel)
            return
        streams = [0] if layout.is_rounded else []
        streams += range(1, 1 + len(variant.states)) if layout.states_rounded else []
        with counting(builder, I64(0), numel, _BLOCK) as low:
            high = _least(builder, builder.add(low, I64(_BLOCK)), numel)
            first = builder.add(element, low)
            random = [room] * 3
            for stream in streams:
                out = builder.add(room, I64(stream * _STREAM * _BF16.nbytes))
                count = builder.sub(high, low)
                random[stream] = emit_fill(builder, out, first, count, step, seed, keys[stream])
            end = _most(builder, low, _least(builder, body, high))
            kernel.emit_range(columns._replace(random=tuple(random)), low, end, high)

    return compile_function([I64] * 14 + [F32] * (scalar_count + 1), emit)


def _least(builder: Any, left: Any, right: Any) -> Any:
    """Emit the smaller one of two integers."""
    return builder.select(builder.icmp_signed("<", left, right), left, right)


def _most(builder: Any, left: Any, right: Any) -> Any:
    """Emit the larger one of two integers."""
    return builder.select(builder.icmp_signed(">", left, right), left, right)


def run(
    variant: Variant,
    layout: Layout,
    arrays: Arrays,
    scalars: Scalars,
    factor: float,
    chance: Chance,
    threads: int = 1,
) -> None:
    """Update the arrays of a shard in place.

    The last n % 8 of the n elements use the formula of a tail.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
        arrays: The arrays of the shard.
        scalars: The result of `Rule.scalars`.
        factor: The factor by which the gradient is multiplied.
        chance: The random bits, if the layout needs any.
        threads: The largest number of threads.

    Raises:
        ValueError: An array is not contiguous, or has another length than the gradient.
    """
    loop = compiled_loop(variant, layout, len(scalars))
    numel = len(arrays.gradient)
    body = numel // VECTOR * VECTOR
    columns = arrays.columns()
    used = [*columns[:2], *columns[3 : 3 + len(variant.states)]]
    if layout.is_split or layout.published is not None:
        used.append(arrays.other)
    if not all(len(each) == numel and each.flags.c_contiguous for each in used):
        # The loop would read and write memory outside the arrays
        raise ValueError(f"the arrays are not all contiguous with {numel} elements each")
    numbers = [*map(float, scalars), factor]

    def part(low: int, high: int) -> None:
        own = [column.ctypes.data + low * column.itemsize for column in columns]
        random = np.empty(3 * _STREAM if layout.is_random else 0, np.int16)
        draws = (chance.element + low, chance.step, chance.seed, *chance.keys)
        inner = max(0, min(body, high) - low)
        loop(inner, high - low, *own, random.ctypes.data, *draws, *numbers)

    in_slices(numel, threads, part)


@cache
def is_exact(variant: Variant, layout: Layout) -> bool:
    """Return whether the compiled loop equals the definition bit for bit on this machine.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
    """
    if torch.float16 in (layout.gradient, layout.published) and not converts_fp16():
        log_once(
            "this processor converts no fp16, so PyTorch computes updates of fp16 weights, more "
            "slowly."
        )
        return False
    return is_definition(variant, layout, run, "LLVM", "this machine")
