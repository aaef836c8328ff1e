"""Checksums per MiB of a tensor's memory detect a change of any bit."""

from __future__ import annotations

import pytest
import torch

from deepseek_zero.base.checksums import BLOCK_BYTES, block_sums


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("nbytes", [0, 8, 24, BLOCK_BYTES, BLOCK_BYTES + 8, 2 * BLOCK_BYTES + 40])
def test_there_is_a_sum_for_each_mebibyte(dtype: torch.dtype, nbytes: int) -> None:
    values = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    sums = block_sums(values)
    assert sums.dtype is torch.int64 and sums.tolist() == [0] * -(-nbytes // BLOCK_BYTES)


@pytest.mark.parametrize("numel", [1, 7, 1001, 3 * BLOCK_BYTES // 2 + 5])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_any_bit_changes_only_the_checksum_of_its_block(numel: int, start: int) -> None:
    memory = torch.randint(0, 255, (start + numel,), dtype=torch.uint8)
    values = memory[start:]  # words may start at an unaligned address
    before = block_sums(values)
    generator = torch.Generator().manual_seed(numel + start)
    places = torch.randint(0, numel, (6,), generator=generator).tolist()
    for place, bit in zip([0, numel - 1, *places], [7, 0, 1, 2, 3, 4, 5, 6], strict=True):
        values[place] ^= 1 << bit
        assert block_sums(values).ne(before).nonzero().flatten().tolist() == [place // BLOCK_BYTES]
        values[place] ^= 1 << bit
    assert block_sums(values).equal(before)
    assert block_sums(values.view(numel, 1)).equal(before), "the shape is nothing to them"
