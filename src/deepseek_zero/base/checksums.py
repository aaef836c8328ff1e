"""Sums by which memory that should be equal, or should have stayed as it was, is compared."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 20  # that one sum stands for
_WORD = 8


def block_sums(values: Tensor) -> Tensor:
    """Return the wrapping sums of the 64-bit words of each MiB of a tensor's memory, as int64, on
    its device.

    values: of any shape and dtype, contiguous.  A bit that differs changes the sum of its block.
    Local.
    """
    memory = values.detach().reshape(-1).view(torch.uint8)
    whole = memory.numel() // _WORD * _WORD
    if memory.storage_offset() % _WORD:
        memory = memory.clone()  # words begin at multiples of their size
    words = memory[:whole].view(torch.int64)
    rest = memory[whole:]
    per_block = BLOCK_BYTES // _WORD
    full = words.numel() // per_block * per_block
    sums = [words[:full].view(-1, per_block).sum(1)]
    if full < words.numel() or rest.numel():
        sums.append((words[full:].sum() + rest.sum()).view(1))
    return torch.cat(sums)
