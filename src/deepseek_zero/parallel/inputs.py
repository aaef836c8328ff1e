"""Compares a model's first inputs between the ranks of a tensor-parallel axis: all of them read the same data."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ModelMismatchError
from ..base.nested import map_inputs
from ..comm.collectives import Comm


def compare_first_inputs(model: nn.Module, comm: Comm) -> None:
    """Make the model's first forward compare its inputs with those of the other ranks, once; it is collective then.

    It raises ModelMismatchError on every rank where they differ.
    """

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        own = torch.tensor([_checksum((args, kwargs))])
        found = comm.all_gather_rows(own, "the first inputs")[:, 0]
        others = [comm.ranks[rank] for rank in range(comm.size) if found[rank] != found[0]]
        if others:
            raise ModelMismatchError(
                f"Data inconsistency within the TP group: rank {others[0]}'s inputs are not rank {comm.ranks[0]}'s.",
                "Ranks along the axis tp compute parts of the same layers, for the same samples.",
                "give ranks of one data coordinate the same batches: shard the data by data coordinate, not by rank.",
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def _checksum(inputs: Any) -> int:
    """Return a checksum of every tensor's shape and bytes, in their order."""
    found = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal found
        found = zlib.crc32(str((tuple(tensor.shape), tensor.dtype)).encode(), found)
        if not tensor.is_meta:
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found = zlib.crc32(values.numpy().tobytes(), found)
        return tensor

    map_inputs(inputs, add)
    return found
