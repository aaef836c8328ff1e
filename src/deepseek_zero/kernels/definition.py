"""The reference of all kernels, exact and slow.

It evaluates the formulas of `rules.py` with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .rules import RULES, VECTOR, Operations, Scalars, Variant

F32 = NDArray[np.float32]
CANONICAL_NAN = 0x7FC00000


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of fp32 numbers, rounded once.

    The product is exact in double precision. The sum is rounded to odd: if it is not exact, its
    last bit is set. Rounding it to fp32 then equals rounding the exact sum, because a double has
    more than 2 * 24 + 2 bits.

    Args:
        a: First factor, fp32.
        b: Second factor, fp32.
        c: Number that is added to the product, fp32.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        bits = total.view(np.int64)
        is_inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
        is_above = (error > 0) == (total > 0)  # the exact sum has the larger magnitude
        odd = np.where(is_above, bits + 1, bits - 1)
        return np.where(is_inexact, odd, bits).view(np.float64).astype(np.float32)


def _sign(value: Any) -> Any:
    """Return -1, 0 or 1 for each number, and 0 for NaN."""
    return (value > 0).astype(np.float32) - (value < 0).astype(np.float32)


EXACT = Operations(fma, np.sqrt, _sign)


def settle(values: F32) -> F32:
    """Return the values with every NaN replaced by the canonical NaN."""
    bits = np.where(np.isnan(values), np.int32(CANONICAL_NAN), values.view(np.int32))
    return bits.astype(np.int32).view(np.float32)


def update(
    variant: Variant, scalars: Scalars, factor: float, weight: F32, gradient: F32, states: list[F32]
) -> tuple[F32, list[F32]]:
    """Return the new weight and states of one parameter.

    Args:
        variant: Optimizer rule and options, which select the formula.
        scalars: The result of `Rule.scalars`.
        factor: The factor by which the gradient is multiplied.
        weight: Flat, fp32.
        gradient: Flat, fp32.
        states: Flat, fp32, as many as the variant has.
    """
    formula = RULES[variant.rule].formula(variant, EXACT)
    body = len(weight) // VECTOR * VECTOR
    zeros = np.zeros_like(weight)
    first, second, *_ = [*states, zeros, zeros]
    parts = []
    with np.errstate(all="ignore"):
        for part, is_tail in ((slice(0, body), False), (slice(body, None), True)):
            scaled = gradient[part] * np.float32(factor)
            parts.append(formula(weight[part], scaled, first[part], second[part], scalars, is_tail))
    new = [settle(np.concatenate(each).astype(np.float32)) for each in zip(*parts, strict=True)]
    return new[0], new[1 : 1 + len(variant.states)]


# -- how values are stored


def widen(numbers: NDArray[Any], dtype: torch.dtype) -> F32:
    """Return stored numbers as fp32.

    Args:
        numbers: 16-bit numbers as int16, or fp32 numbers, which are returned unchanged.
        dtype: The dtype of the stored numbers.
    """
    if dtype == torch.float32:
        return numbers
    if dtype == torch.float16:
        return numbers.view(np.float16).astype(np.float32)
    return (numbers.astype(np.int32) << 16).view(np.float32)


def narrow(values: F32, dtype: torch.dtype) -> NDArray[Any]:
    """Return fp32 numbers in the form in which a dtype is stored; the inverse of `widen`.

    Args:
        values: Array of fp32 numbers to convert.
        dtype: bf16 (ties are rounded away from zero) or fp16 (ties to even), whose numbers are
            returned as int16, or fp32, for which `values` is returned unchanged.
    """
    if dtype == torch.float32:
        return values
    settled = settle(values)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return settled.astype(np.float16).view(np.int16)
    return split(settled)[0]


def split(values: F32) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the bf16 numbers nearest to fp32 numbers, and the remainders.

    `precision/policy.py` has the format.
    """
    bits = settle(values).view(np.int32)
    upper = ((bits.astype(np.int64) + 0x8000) >> 16).astype(np.int16)
    return upper, bits.astype(np.int16)


def join(upper: NDArray[np.int16], lower: NDArray[np.int16]) -> F32:
    """Return the fp32 numbers that `split` split.

    If a number and its remainder give NaN, and the number is not NaN, the result is the number.

    Args:
        upper: bf16 numbers, as int16.
        lower: Remainders of the numbers, as `split` returned them.
    """
    numbers = upper.astype(np.int32) << 16
    values = (numbers + lower).view(np.float32)
    return np.where(np.isnan(values), numbers.view(np.float32), values)


def round_by(values: F32, random: NDArray[np.int16]) -> NDArray[np.int16]:
    """Return fp32 numbers as bf16, stochastically rounded (`precision/compact.py`).

    Args:
        values: Array of fp32 numbers to convert.
        random: 16 random bits per number, as int16.
    """
    bits = settle(values).view(np.int32).astype(np.int64)
    return ((bits + (random.astype(np.int64) & 0xFFFF)) >> 16).astype(np.int16)
