"""DeepSpeed's own collectives, which torch.distributed spells otherwise or not at all.

Read by the mirror in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..base.device import default_device
from ..base.errors import NotBuiltError

# torch 2.13 renames these two and warns of the old names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather every rank's tensor into one."""
    return gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Add up every rank's tensor; each rank keeps its slice."""
    return scatter_from(output_tensor, tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """Add up every rank's tensor, in place."""
    return dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """Add up several tensors, one after the other."""
    _refuse_async("all_reduce_coalesced", async_op)
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> None:
    """Gather several tensors, one after the other."""
    _refuse_async("all_gather_coalesced", async_op)
    for output, value in zip(output_tensors, input_tensors, strict=True):
        gather_into(output, value, group=group)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """torch's DeviceMesh over all ranks.  Collective."""
    return init_device_mesh(default_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def _refuse_async(name: str, async_op: bool) -> None:
    if async_op:
        raise NotBuiltError(f"{name}(async_op=True) is not built.", "It is several collectives.", "leave async_op out.")


def _into(output: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
    output.view(-1).copy_(value.reshape(-1))


def _into_each(outputs: Sequence[Tensor], values: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
    for output, value in zip(outputs, values, strict=True):
        _into(output, value)


def _stays(value: Any, *args: Any, **kwargs: Any) -> None:
    """A sum over one rank."""


# name: (with a group, in a world of one)
COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allgather_fn": (allgather_fn, _into),
    "reduce_scatter_fn": (reduce_scatter_fn, _into),
    "inference_all_reduce": (inference_all_reduce, _stays),
    "all_reduce_coalesced": (all_reduce_coalesced, _stays),
    "all_gather_coalesced": (all_gather_coalesced, _into_each),
}
# What DeepSpeed asks of torch's version; all of it is there.
ASKED = frozenset(
    "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager".split()
)
