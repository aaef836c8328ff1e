"""Updates in one pass over memory on a CPU, compiled by numba.

Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import float32, int16, njit

from ..base.log import log_once
from .chance import fill
from .check import Arrays, Chance, is_definition
from .compiler import compiled, converts_fp16, in_slices
from .primitives import (
    fma,
    from_bf16,
    from_fp16,
    joined,
    low_half,
    round_by,
    settled,
    to_bf16,
    to_fp16,
)
from .rules import RULES, VECTOR, Layout, Operations, Scalars, Variant


@njit
def _sign(value: Any) -> Any:
    return float32(value > 0) - float32(value < 0)


@njit
def _sqrt(value: Any) -> Any:
    return np.sqrt(value)


@njit
def _itself(value: Any) -> Any:
    return value


_OPERATIONS = Operations(fma, _sqrt, _sign)
_READ = {torch.float32: _itself, torch.bfloat16: from_bf16, torch.float16: from_fp16}
_WRITE = {None: _itself, torch.bfloat16: to_bf16, torch.float16: to_fp16}
_BLOCK = 2048  # Elements whose random bits are drawn at a time; they fit into a core's L1 cache


def _element_of(variant: Variant, layout: Layout) -> Any:
    """Return the function that updates element i of the arrays.

    Its argument `random` has three arrays of random bits, and `k` is the index in them.
    """
    formula = njit(RULES[variant.rule].formula(variant, _OPERATIONS))
    read = _READ[layout.gradient]
    publish = _WRITE[layout.published]
    is_split = layout.is_split
    is_rounded = layout.is_rounded
    states_rounded = layout.states_rounded
    publishes = layout.published is not None
    has_first = len(variant.states) > 0
    has_second = len(variant.states) > 1
    reads_first = has_first and not variant.first

    @njit
    def weight_of(i: Any, main: Any, other: Any) -> Any:
        if is_split:
            return joined(main[i], other[i])
        if is_rounded:
            return from_bf16(main[i])
        return main[i]

    @njit
    def read_state(i: Any, state: Any) -> Any:
        return from_bf16(state[i]) if states_rounded else state[i]

    @njit
    def write_state(i: Any, state: Any, value: Any, random: Any) -> None:
        state[i] = round_by(settled(value), random) if states_rounded else settled(value)

    @njit
    def element(
        i: Any,
        is_tail: Any,
        gradient: Any,
        main: Any,
        other: Any,
        first: Any,
        second: Any,
        scalars: Any,
        factor: Any,
        random: Any,
        k: Any,
    ) -> None:
        p = weight_of(i, main, other)
        a = read_state(i, first) if reads_first else float32(0)
        b = read_state(i, second) if has_second else float32(0)
        p, a, b = formula(p, read(gradient[i]) * factor, a, b, scalars, is_tail)
        p = settled(p)
        if is_split:
            main[i] = to_bf16(p)
            other[i] = low_half(p)
        elif is_rounded:
            main[i] = round_by(p, random[0, k])
        else:
            main[i] = p
        if publishes:
            other[i] = publish(p)
        if has_first:
            first_random = random[1, k] if states_rounded else int16(0)
            write_state(i, first, a, first_random)
        if has_second:
            second_random = random[2, k] if states_rounded else int16(0)
            write_state(i, second, b, second_random)

    return element


@cache
def compiled_loop(variant: Variant, layout: Layout) -> Callable[..., None]:
    """Return the loop over a shard's elements. numba compiles it at its first call.

    Args:
        variant: Optimizer rule and options, which select the formula.
        layout: Dtypes and form in which the shard is stored.
    """
    element = _element_of(variant, layout)
    draws_weight = layout.is_rounded
    draws_states = len(variant.states) if layout.states_rounded else 0

    def loop(
        body: Any,
        gradient: Any,
        main: Any,
        other: Any,
        first: Any,
        second: Any,
        scalars: Any,
        factor: Any,
        chance: Any,
        random: Any,
    ) -> None:
        for i in range(body):
            element(i, False, gradient, main, other, first, second, scalars, factor, random, 0)
        for i in range(body, len(gradient)):
            element(i, True, gradient, main, other, first, second, scalars, factor, random, 0)

    def loop_in_blocks(
        body: Any,
        gradient: Any,
        main: Any,
        other: Any,
        first: Any,
        second: Any,
        scalars: Any,
        factor: Any,
        chance: Any,
        random: Any,
    ) -> None:
        start, step, seed, keys = chance
        for low in range(0, len(gradient), _BLOCK):
            high = min(low + _BLOCK, len(gradient))
            if draws_weight:
                fill(random[0, : high - low], start + low, step, seed, keys[0])
            for number in range(1, 1 + draws_states):
                fill(random[number, : high - low], start + low, step, seed, keys[number])
            for i in range(low, min(high, body)):
                element(
                    i, False, gradient, main, other, first, second, scalars, factor, random, i - low
                )
            for i in range(max(low, body), high):
                element(
                    i, True, gradient, main, other, first, second, scalars, factor, random, i - low
                )

    chosen = loop_in_blocks if layout.is_random else loop
    return compiled(chosen)


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
    """
    loop = compiled_loop(variant, layout)
    numel = len(arrays.gradient)
    body = numel // VECTOR * VECTOR
    columns = arrays.columns()
    rounded = np.float32(factor)

    def part(low: int, high: int) -> None:
        own = [column[low:high] for column in columns]
        random = np.empty((3, _BLOCK if layout.is_random else 0), np.int16)
        begin = (chance.element + low, *chance[1:])
        loop(max(0, min(body, high) - low), *own, scalars, rounded, begin, random)

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
    return is_definition(variant, layout, run, "numba", "this machine")
