"""A look at the first batch of ranks that must be given the same one: along "tp", and the stages of
a pipeline.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import BatchMismatchError
from ..base.nested import map_inputs
from ..comm.collectives import Comm


def compare_first_inputs(model: nn.Module, comm: Comm) -> None:
    """Have the model's first forward compare what the ranks of a tensor-parallel axis were given.
    Local.

    comm: of these ranks.  That forward raises BatchMismatchError on each of them, in DeepSpeed's
    words, where their
    tensors differ: each would compute its part of another batch.
    """

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
    """Say in which ranks of a communicator the tensors of a batch differ, None where they are
    alike.  Collective.
    """
    told = comm.all_gather_text(_fingerprint(batch), "the first batch")
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is None:
        return None
    return f"rank {comm.ranks[0]} was given {told[0]}, rank {comm.ranks[other]} {told[other]}"


def _fingerprint(batch: Any) -> str:
    """Say what the tensors of a batch are: shapes, dtypes, and a digest of what they hold."""
    digest = hashlib.sha256()
    shapes = list[str]()

    def look(tensor: Tensor) -> Tensor:
        shapes.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        if tensor.layout is torch.strided and not tensor.is_meta:
            plain = tensor.detach().cpu().contiguous()
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    map_inputs(batch, look)
    return f"{', '.join(shapes) or 'no tensors'} (sha256 {digest.hexdigest()[:12]})"
