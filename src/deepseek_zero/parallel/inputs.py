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
    """Register a hook that compares the inputs of the model's first forward over the ranks.

    If the tensors differ, that forward raises BatchMismatchError on each rank, because the ranks
    would compute parts of different batches. The message contains the text of DeepSpeed's error.

    Args:
        model: The model whose next forward is checked.
        comm: The communicator of the tensor-parallel ranks.

    Note:
        The first forward is collective: every rank of `comm` must run it.
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
    """Compare the batches of ranks that must all receive the same batch.

    Only the tensors in the batches are compared. The values of sparse tensors and of tensors on
    the meta device are not compared.

    Args:
        batch: This rank's batch: a tensor, or nested mappings, sequences and dataclasses with
            tensors.
        comm: The communicator of the ranks to compare.

    Returns:
        A description of the first rank's tensors and those of the first rank that differs from it,
        for an error message. None if the shapes, dtypes and values are equal on all ranks.

    Raises:
        PeerError: Another rank failed or issued a different collective.

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
