"""The PTX emulator computes exact fused multiply-adds and refuses accesses that a GPU refuses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from deepseek_zero.kernels import check
from tests.ptx import Memory, fused


def nearest(exact: Fraction) -> float:
    """Return the nearest fp32 number, with ties to even."""
    if exact == 0:
        return 0.0
    exponent = math.frexp(float(abs(exact)))[1] - 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(exact / unit) * unit)


def test_a_fused_multiply_add_rounds_once() -> None:
    random = np.random.default_rng(0)
    a, b = check.values("normal", 4096, random), check.values("normal", 4096, random)
    a[::4] = a[::4].astype(np.float16)
    # The products are exact, so sums are often halfway between two numbers.
    b[::4] = b[::4].astype(np.float16)
    c = np.where(random.random(4096) < 0.5, -(a * b), 2.0**-25 * b).astype(np.float32)
    a[::5] *= np.float32(2.0**-120)  # subnormal results
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert fused(a, b, c).tolist() == [nearest(number) for number in exact]


def test_memory_refuses_what_a_gpu_refuses() -> None:
    memory = Memory(1024)
    address = memory.put(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="no multiple"):
        memory.places(np.array([address + 4], np.uint64), np.float32, 4)
    with pytest.raises(ValueError, match="outside"):
        memory.places(np.array([address + 16], np.uint64), np.float32, 1)
