"""Sums of rows and sums of squares are compared with their definitions and with torch."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from deepseek_zero.kernels import choice, sums
from deepseek_zero.kernels.check import values
from deepseek_zero.kernels.sums import BLOCK, add_rows, same_bits, sum_of_squares
from deepseek_zero.planner import layout
from tests.kernels import on_processor

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)
NUMEL = 5 * 64 + 11  # the last vector overlaps the previous one
KINDS = ("normal", "bits", "edges")


def numbers(kind: str, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.from_numpy(values(kind, numel, np.random.default_rng(seed))).to(dtype)


@pytest.fixture
def every_size_has_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(sums, "LARGE", 64)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "torch")


def ways(numel: int) -> Iterator[tuple[int, float, bool]]:
    """Yield the number of rows, the divisor, and whether the sum is added to the output."""
    yield from product((1, 2, 3, 4, 8, 16, 19), (1.0, 2.0, 3.0, 7.0), (False, True))


@pytest.mark.usefixtures("every_size_has_a_loop")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", list(product(DTYPES, DTYPES)), ids=str)
def test_a_compiled_sum_has_torchs_bits(dtypes: tuple[torch.dtype, torch.dtype], kind: str) -> None:
    for count, divisor, add in ways(NUMEL):
        assert sums._has_sum_loop(*dtypes, count, divisor, add), "it is not left to torch"
        rows = [numbers(kind, NUMEL, dtypes[0], seed) for seed in range(count)]
        found = numbers(kind, NUMEL, dtypes[1], count)
        expected = found.clone()
        add_rows(rows, found, torch.empty(100), divisor=divisor, add=add)
        sums._add_by_torch(rows, expected, torch.empty(100), divisor, add=add)
        assert same_bits(found, expected), (count, divisor, add)


@pytest.mark.usefixtures("every_size_has_a_loop")
@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_every_tie_is_rounded_to_the_even_number(dtype: torch.dtype) -> None:
    """The sums of two fp32 rows are the midpoints between all adjacent 16-bit numbers."""
    all_numbers = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    )
    towards_next = (
        torch.nextafter(all_numbers.to(dtype), torch.full((), math.inf, dtype=dtype)).float()
        - all_numbers
    )
    rows = [all_numbers, towards_next / 2]
    found, expected = torch.empty(1 << 16, dtype=dtype), torch.empty(1 << 16, dtype=dtype)
    add_rows(rows, found, torch.empty(0))
    sums._add_by_torch(rows, expected, torch.empty(1 << 16), 1.0, add=False)
    assert same_bits(found, expected)
    assert same_bits(found, (rows[0] + rows[1]).to(dtype))


@pytest.mark.usefixtures("every_size_has_a_loop")
@pytest.mark.parametrize("count", (1, 2, 3))
@pytest.mark.parametrize("numel", (64, 65, 127, 128, 200))
def test_a_sum_may_overwrite_any_of_its_rows(numel: int, count: int) -> None:
    for place in range(count):
        rows = [numbers("normal", numel, BF16, seed) for seed in range(count)]
        expected = torch.empty(numel, dtype=BF16)
        sums._add_by_torch(rows, expected, torch.empty(numel), 3.0, add=False)
        add_rows(rows, rows[place], torch.empty(0), divisor=3.0)
        assert torch.equal(rows[place], expected)


@pytest.mark.usefixtures("every_size_has_a_loop")
def test_a_sum_writes_nothing_outside_and_does_not_depend_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepseek_zero.kernels.threads.GRAIN", 64)
    memory = [numbers("normal", 1003, BF16, seed) for seed in range(3)]
    rows = [each[1:-1] for each in memory]  # unaligned addresses
    expected = torch.empty(1001, dtype=BF16)
    sums._add_by_torch(rows, expected, torch.empty(1001), 1.0, add=False)
    for count in (1, 2, 3, 4):
        target = torch.full((1003,), 7.0, dtype=BF16)
        add_rows(rows, target[1:-1], torch.empty(0), threads=count)
        assert torch.equal(target[1:-1], expected)
        assert target[0] == target[-1] == 7.0


@pytest.mark.usefixtures("every_size_has_a_loop")
def test_sums_without_a_loop_are_computed_by_torch() -> None:
    strided = numbers("normal", 2000, FP32, 0)[::2]
    rows = [strided, strided.clone()]
    doubles = [row.double() for row in rows]
    mixed = [rows[1], rows[1].bfloat16()]
    for each in (rows, doubles, mixed):
        found = torch.empty(1000)
        add_rows(each, found, torch.empty(1000))
        assert torch.equal(found, each[0].float() + each[1].float())


def plain_sum_of_squares(numbers_in: Tensor, first: int) -> float:
    """Return the sum by definition, one number at a time."""
    placed = [0.0] * (first % BLOCK) + numbers_in.double().tolist()
    placed += [0.0] * (-len(placed) % BLOCK)
    total = 0.0
    for low in range(0, len(placed), BLOCK):
        columns = []
        for column in range(32):
            added = 0.0
            for row in range(32):
                added += placed[low + row * 32 + column] ** 2
            columns.append(added)
        while len(columns) > 1:
            half = len(columns) // 2
            columns = [columns[at] + columns[at + half] for at in range(half)]
        total += columns[0]
    return total


def spread(numel: int, dtype: torch.dtype) -> Tensor:
    """Return finite numbers of many magnitudes: their sum depends on the order."""
    found = numbers("normal", numel, FP32, 0) * 10.0 ** torch.linspace(-6, 4, numel)
    return found[torch.randperm(numel)].to(dtype)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", (0, 1, 1000, 5 * BLOCK + 17))
@pytest.mark.parametrize("numel", (0, 1, 23, 24, 1023, BLOCK, 3 * BLOCK + 5))
def test_the_definition_of_a_sum_of_squares(numel: int, first: int, dtype: torch.dtype) -> None:
    numbers_in = spread(numel, dtype)
    assert sum_of_squares(numbers_in, first, 1) == plain_sum_of_squares(numbers_in, first)


@pytest.mark.usefixtures("every_size_has_a_loop")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_sum_of_squares_has_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sums._has_square_loop(dtype), "it is compiled, and not left to torch"
    monkeypatch.setattr("deepseek_zero.kernels.threads.GRAIN", 64)
    for numel, first in product((BLOCK, 5 * BLOCK, 200 * BLOCK + 77), (0, 1, 1023)):
        numbers_in = spread(numel, dtype)
        with pytest.MonkeyPatch.context() as alone:
            alone.setenv(choice.VARIABLE, "torch")
            expected = sum_of_squares(numbers_in, first, 1)
        for count in (1, 2, 3, 4):
            assert sum_of_squares(numbers_in, first, count) == expected


@pytest.mark.parametrize("fixture", ("every_size_has_a_loop", "torch_alone"))
def test_squares_neither_overflow_nor_vanish(fixture: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(fixture)
    for size in (3e38, 1e20, 1e-20, 1e-40):
        numbers_in = torch.full((2 * BLOCK,), size)
        exact = numbers_in[0].item() ** 2 * 2 * BLOCK
        assert sum_of_squares(numbers_in, 0, 1) == pytest.approx(exact, rel=1e-12)
    assert sum_of_squares(torch.full((BLOCK,), -math.inf, dtype=BF16), 0, 1) == math.inf
    assert math.isnan(sum_of_squares(torch.full((BLOCK,), math.nan, dtype=FP16), 0, 1))


def test_slices_of_the_layout_begin_with_a_block() -> None:
    assert layout.BLOCK % BLOCK == 0


def test_small_sums_import_no_compiler() -> None:
    program = (
        "import sys, torch; from deepseek_zero.kernels import sums; rows = [torch.ones(1000)] * 3;"
        "sums.add_rows(rows, torch.empty(1000), torch.empty(10)); sums.sum_of_squares(rows[0], 0, "
        "2);assert 'llvmlite' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
@pytest.mark.usefixtures("every_size_has_a_loop")
def test_a_processor_without_fp16_leaves_it_to_torch() -> None:
    program = (
        "import torch; from deepseek_zero.kernels import sums; sums.LARGE = 64; rows = "
        "[torch.ones(100).half()] * 3;sums.add_rows(rows, out := torch.empty(100), "
        "torch.empty(100)); assert out.tolist() == [3.0] * 100;assert not "
        "sums._has_sum_loop(torch.float16, torch.float32, 3, 1.0, False);assert "
        "sums._has_sum_loop(torch.bfloat16, torch.float32, 3, 1.0, False)"
    )
    code = on_processor("x86-64") + program
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_llvmlite_torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "torch")
    monkeypatch.setattr(sums, "LARGE", 64)
    monkeypatch.setattr(sums, "_loops", lambda: pytest.fail("nothing is to be compiled"))
    rows, found = [torch.ones(1000)] * 3, torch.empty(1000)
    add_rows(rows, found, torch.empty(100))
    assert torch.equal(found, torch.full((1000,), 3.0))
    assert sum_of_squares(rows[0], 0, 1) == 1000.0


@pytest.mark.usefixtures("every_size_has_a_loop")
def test_a_loop_with_other_bits_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(rows: list[Tensor], out: Tensor, *_: object, **__: object) -> None:
        out.zero_()

    monkeypatch.setattr(sums, "_add_by_loop", wrong)
    sums._has_sum_loop.cache_clear()
    try:
        with caplog.at_level("WARNING", logger="deepseek_zero"):
            found = torch.empty(1000)
            add_rows([torch.ones(1000)] * 2, found, torch.empty(100))
        assert torch.equal(found, torch.full((1000,), 2.0))
        assert "the sum of torch.float32 in torch.float32 differs" in caplog.text
    finally:
        sums._has_sum_loop.cache_clear()
