"""Checksums of memory that should be equal on several ranks, or unchanged."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 20  # bytes that one sum covers
_WORD = 8


def block_sums(values: Tensor) -> Tensor:
    """Return a checksum for each MiB of a tensor's memory.

    A checksum is the wrapping sum of a block's 64-bit integers. One changed bit changes the sum
    of its block.

    Args:
        values: A contiguous tensor of any shape and dtype.

    Returns:
        An int64 tensor with one element per block, on the tensor's device.
    """
    memory = values.detach().reshape(-1).view(torch.uint8)
    whole = memory.numel() // _WORD * _WORD
    if memory.storage_offset() % _WORD:
        memory = memory.clone()  # words must be aligned to their size
    words = memory[:whole].view(torch.int64)
    rest = memory[whole:]
    per_block = BLOCK_BYTES // _WORD
    full = words.numel() // per_block * per_block
    sums = [words[:full].view(-1, per_block).sum(1)]
    if full < words.numel() or rest.numel():
        sums.append((words[full:].sum() + rest.sum()).view(1))
    return torch.cat(sums)
