"""Compare the first batch of ranks that must receive the same one.

These are the ranks along "tp" and the stages of a pipeline.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from ..base.errors import BatchMismatchError
from ..base.nested import Args, Kwargs, all_tensors
from ..comm.collectives import Comm


def compare_first_inputs(model: nn.Module, comm: Comm) -> None:
    """Make the model's first forward compare its inputs across tensor-parallel ranks.

    That forward raises BatchMismatchError on each rank if their tensors differ, because each rank
    would compute its part of another batch. The message contains DeepSpeed's text.

    Args:
        model: The model.
        comm: The communicator of the tensor-parallel ranks.
    """

    def compare(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        hook.remove()
        if (found := difference((args, kwargs), comm)) is not None:
            raise BatchMismatchError(
                "Data inconsistency within the TP group. Please check the Dataloader "
                f"implementation to ensure consistency: {found}.",
                "Ranks along tp compute parts of one batch.",
                "shard data over mesh.data_size by mesh.data_index, not over the world by rank.",
            )

    hook = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def difference(batch: Any, comm: Comm) -> str | None:
    """Return a description of how the tensors of a batch differ between ranks.

    Args:
        batch: This rank's batch.
        comm: The communicator of the ranks.

    Returns:
        The description, or None if the batches are equal.

    Note:
        Collective: every rank of `comm` must call it.
    """
    told = comm.all_gather_text(_fingerprint(batch), "the first batch")
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is None:
        return None
    return f"rank {comm.ranks[0]} was given {told[0]}, rank {comm.ranks[other]} {told[other]}"


def _fingerprint(batch: Any) -> str:
    """Return the shapes, dtypes and a digest of the tensors of a batch."""
    digest = hashlib.sha256()
    shapes = []
    for tensor in all_tensors(batch, visits_objects=False):
        shapes.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        if tensor.layout is torch.strided and not tensor.is_meta:
            plain = tensor.detach().cpu().contiguous()
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{', '.join(shapes) or 'no tensors'} (sha256 {digest.hexdigest()[:12]})"
