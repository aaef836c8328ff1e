"""Sums over rows and sums of squares, in one fixed order, in one pass over memory.

Each function has two implementations with the same bits. Operations of torch and NumPy work
everywhere. Loops that LLVM compiles (`lanes.py`) are used for large tensors in CPU memory and
compiled at first use.

The sum of squares is a sum over blocks of 1,024 elements. The first block begins at the start of
the flat layout, and elements that are not counted are zeros. A block is a table of 32 rows and 32
columns. All numbers are float64, in which the square of a float32 is exact. The squares of each
column are added in row order. Column k is then added to column k + 16, next k to k + 8, until one
number remains. The sums of blocks are added in order.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.log import log_once
from ..base.quantities import ceil_div
from .check import values as sample
from .choice import VARIABLE, available
from .threads import in_slices

BLOCK = 1024  # Elements per block of a sum of squares
COLUMNS = 32
_TILE = 256  # Blocks that NumPy computes at a time: 2 MiB of float64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 1 << 17  # Elements from which a loop is compiled, which takes up to a second


def add_rows(
    rows: Sequence[Tensor],
    out: Tensor,
    scratch: Tensor,
    *,
    divisor: float = 1.0,
    add: bool = False,
    threads: int = 1,
) -> None:
    """Write (rows[0] + rows[1] + ...) / divisor to `out`, or add it.

    Rows are added in order in fp32, and the result is rounded once. There is one exception: the sum
    of two bf16 rows that is divided by a power of two, and not added, is also rounded before the
    division. This changes only results below 2^-126 and sums that overflow. It is not defined which
    NaN a NaN becomes.

    Args:
        rows: One-dimensional, of equal length, of any float dtypes.
        out: The sum, of the same length and any float dtype; it may be one of the rows.
        scratch: fp32; torch computes in tiles of its size.
        divisor: The divisor of the sum.
        add: Whether to add the result to the values of `out`.
        threads: The largest number of threads of a compiled loop.
    """
    is_uniform = len({row.dtype for row in rows}) == 1
    if (
        is_uniform
        and _fits_loop(out, *rows)
        and _has_sum_loop(rows[0].dtype, out.dtype, len(rows), divisor, add)
    ):
        _add_by_loop(rows, out, divisor, add=add, threads=threads)
    else:
        _add_by_torch(rows, out, scratch, divisor, add=add)


def scale_and_store(total: Tensor, into: Tensor, divisor: float, *, add: bool) -> None:
    """Divide an fp32 total in place, then store or add it, rounded once.

    Args:
        total: Flat fp32 sum, which is overwritten.
        into: Output, of any float dtype; may be `total`.
        divisor: Number by which the sum is divided.
        add: Whether to add the result to the values of `into`.
    """
    if divisor != 1.0:
        total.mul_(1.0 / divisor) if is_power_of_two(divisor) else total.div_(divisor)
    if total is not into:
        into.add_(total) if add else into.copy_(total)


def is_power_of_two(divisor: float) -> bool:
    """Return whether multiplying by 1 / divisor is exact; it is faster than dividing."""
    return math.frexp(divisor)[0] == 0.5


@np.errstate(over="ignore")  # Squares of float64 gradients may overflow
def sum_of_squares(values: Tensor, first: int, threads: int) -> float:
    """Return the sum of squares of flat values on the CPU, in this module's order.

    Args:
        values: Flat tensor on the CPU.
        first: The index of the first value in the flat layout.
        threads: The largest number of threads.
    """
    lead = min(-first % BLOCK, values.numel())
    end = lead + (values.numel() - lead) // BLOCK * BLOCK
    sums = np.zeros(1 + (end - lead) // BLOCK + 1)
    sums[0] = _edge_block(values[:lead], first % BLOCK)
    sums[-1] = _edge_block(values[end:], 0)
    whole = values[lead:end]
    if _fits_loop(whole) and _has_square_loop(values.dtype):
        _squares_by_loop(whole, sums[1:-1], threads)
    else:
        _squares_by_arrays(whole, sums[1:-1])
    return float(np.add.accumulate(sums)[-1])


def compile_squares(dtype: torch.dtype) -> None:
    """Compile the loop of `sum_of_squares` for large tensors of a dtype, if any."""
    sum_of_squares(torch.zeros(LARGE, dtype=dtype, device="cpu"), 0, 1)


def _fits_loop(*tensors: Tensor) -> bool:
    """Return whether the tensors are large enough and suited for a compiled loop."""
    if tensors[0].numel() < LARGE:
        return False
    is_plain = all(
        each.device.type == "cpu" and each.dtype in _DTYPES and each.is_contiguous()
        for each in tensors
    )
    return is_plain and _may_compile(os.environ.get(VARIABLE))


@cache
def _may_compile(variable: str | None) -> bool:
    """Return whether llvmlite is installed and may be used.

    Args:
        variable: The value of DEEPSEEK_ZERO_KERNELS.
    """
    return available(variable or "auto") != "torch"


def _loops() -> Any:
    """Return the module of compiled loops, whose import imports llvmlite."""
    return import_module("deepseek_zero.kernels.lanes")


def _is_plain_pair(rows: Sequence[Tensor], out: Tensor, divisor: float, *, add: bool) -> bool:
    """Return whether torch's own addition of two rows gives the bits of the sum.

    It does if rows and sum have one dtype, fp32 or bf16, the divisor is a power of two, and the
    result is not added.
    """
    is_pair = len(rows) == 2 and not add and is_power_of_two(divisor)
    return is_pair and {out.dtype, *(row.dtype for row in rows)} in (
        {torch.float32},
        {torch.bfloat16},
    )


def _add_by_torch(
    rows: Sequence[Tensor], out: Tensor, scratch: Tensor, divisor: float, *, add: bool
) -> None:
    """Do the work of `add_rows` with torch's operations, in tiles of the size of `scratch`."""
    is_pair = _is_plain_pair(rows, out, divisor, add=add)
    tile = scratch.numel()
    if is_pair and divisor == 1.0:  # A single operation needs no tiles
        tile = max(1, out.numel())
    for start in range(0, out.numel(), tile):
        stop = min(start + tile, out.numel())
        into = out[start:stop]
        first, *others = [row[start:stop] for row in rows]
        if is_pair:
            total = torch.add(first, others[0], out=into)
        else:
            total = scratch[: stop - start].copy_(first)
            for row in others:
                total.add_(row)
        scale_and_store(total, into, divisor, add=add)


def _add_by_loop(
    rows: Sequence[Tensor], out: Tensor, divisor: float, *, add: bool, threads: int
) -> None:
    """Do the work of `add_rows` with a compiled loop."""
    divides = not is_power_of_two(divisor)
    is_pair = _is_plain_pair(rows, out, divisor, add=add)
    loop = _loops().sum_loop(
        rows[0].dtype,
        out.dtype,
        len(rows),
        divides=divides,
        adds=add,
        rounds=is_pair and divisor != 1.0 and out.dtype == torch.bfloat16,
    )
    addresses = [out.data_ptr(), *(row.data_ptr() for row in rows)]
    factor = divisor if divides else 1.0 / divisor

    def part(start: int, stop: int) -> None:
        loop(start, stop, factor, *addresses)

    in_slices(out.numel(), threads, part)


def _edge_block(values: Tensor, place: int) -> float:
    """Return the sum of squares of a block whose only values begin at `place`."""
    if not values.numel():
        return 0.0
    block = values.new_zeros(BLOCK)
    found = np.zeros(1)
    block[place : place + values.numel()] = values
    _squares_by_arrays(block, found)
    return float(found[0])


def _squares_by_arrays(values: Tensor, sums: NDArray[np.float64]) -> None:
    """Write the sum of squares of each block with NumPy.

    NumPy's calls cost less than torch's.
    """
    tile = max(1, min(_TILE, len(sums)))
    wide = torch.empty(tile * BLOCK, dtype=torch.float64, device="cpu")
    for low in range(0, len(sums), tile):
        high = min(low + tile, len(sums))
        numbers = wide[: (high - low) * BLOCK].copy_(values[low * BLOCK : high * BLOCK]).numpy()
        blocks = numbers.reshape(high - low, BLOCK // COLUMNS, COLUMNS)
        columns = np.einsum("brc,brc->bc", blocks, blocks).T.copy()  # Adds in row order
        while len(columns) > 1:
            half = len(columns) // 2
            columns = columns[:half] + columns[half:]
        sums[low:high] = columns[0]


def _squares_by_loop(values: Tensor, sums: NDArray[np.float64], threads: int) -> None:
    """Write the sum of squares of each block with a compiled loop."""
    loop = _loops().square_loop(values.dtype)
    addresses = values.data_ptr(), sums.ctypes.data

    def part(start: int, stop: int) -> None:
        loop(*addresses, ceil_div(start, BLOCK), ceil_div(stop, BLOCK))

    in_slices(values.numel(), threads, part)


@cache
def _has_sum_loop(
    row_dtype: torch.dtype, out_dtype: torch.dtype, count: int, divisor: float, add: bool
) -> bool:
    """Compile the loop of such a sum, and return whether it has torch's bits on this machine."""
    what = f"the sum of {row_dtype} in {out_dtype}"
    dtypes = row_dtype, out_dtype
    return _is_exact(what, dtypes, lambda: _sums_differ(row_dtype, out_dtype, count, divisor, add))


@cache
def _has_square_loop(dtype: torch.dtype) -> bool:
    """Compile the loop of squares, and return whether its bits equal NumPy's here."""
    return _is_exact(f"the sum of squares of {dtype}", (dtype,), lambda: _squares_differ(dtype))


def _is_exact(what: str, dtypes: Sequence[torch.dtype], differs: Callable[[], bool]) -> bool:
    """Return whether a loop can be used on this machine; log a warning if not."""
    problem = ""
    try:
        if (
            torch.float16 in dtypes
            and not import_module("deepseek_zero.kernels.jit").converts_fp16()
        ):
            problem = "cannot be compiled for this processor, which has no instructions for fp16"
        elif differs():
            problem = "differs from PyTorch's in a test on this machine"
    except Exception as error:  # any failure of the compiler on this machine
        problem = f"cannot be compiled ({type(error).__name__}: {error})"
    if problem:
        log_once(f"{what} {problem}, so PyTorch computes it, more slowly.", logging.WARNING)
    return not problem


def _sums_differ(
    row_dtype: torch.dtype, out_dtype: torch.dtype, count: int, divisor: float, add: bool
) -> bool:
    """Return whether a compiled sum differs from torch's in random numbers and edge values."""
    random = np.random.default_rng(0)
    numel = 999
    for kind in ("normal", "bits", "edges"):
        rows = [torch.from_numpy(sample(kind, numel, random)).to(row_dtype) for _ in range(count)]
        found = torch.from_numpy(sample(kind, numel, random)).to(out_dtype)
        expected = found.clone()
        _add_by_loop(rows, found, divisor, add=add, threads=1)
        scratch = torch.empty(numel, dtype=torch.float32, device="cpu")
        _add_by_torch(rows, expected, scratch, divisor, add=add)
        if not same_bits(found, expected):
            return True
    return False


def _squares_differ(dtype: torch.dtype) -> bool:
    """Return whether compiled sums of squares differ from NumPy's in finite numbers."""
    random = np.random.default_rng(0)
    blocks = 3
    for kind in ("normal", "bits", "edges"):
        values = torch.from_numpy(sample(kind, blocks * BLOCK, random)).to(dtype)
        values[~values.isfinite()] = 0
        found = np.zeros(blocks)
        expected = np.zeros(blocks)
        _squares_by_loop(values, found, 1)
        _squares_by_arrays(values, expected)
        if not np.array_equal(found, expected):
            return True
    return False


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same bits. A NaN equals every NaN.

    Args:
        left: The first tensor, of a 16-bit or 32-bit float dtype.
        right: The second tensor, of the same dtype and shape.
    """
    integer = {2: torch.int16, 4: torch.int32}[left.dtype.itemsize]
    equal = left.view(integer) == right.view(integer)
    return bool((equal | (left.isnan() & right.isnan())).all())
