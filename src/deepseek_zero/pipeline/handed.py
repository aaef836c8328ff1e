"""Exchange batches or model outputs between the ranks of a pipeline.

A value is a nested container of tensors and plain values. Its description is sent first as JSON,
then the elements of all tensors as bytes. Mappings are received as dicts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..comm.collectives import Comm, scatter

_PLAIN = (bool, int, float, str, type(None))


def hand_to_all(value: Any, comm: Comm, what: str) -> list[Any]:
    """Return the values of all ranks, ordered by rank.

    This rank's own value is returned unchanged. Tensors of other ranks are on the communicator's
    device.

    Args:
        value: This rank's value.
        comm: The communicator.
        what: Name of the exchange in errors.

    Raises:
        UsageError: A value contains something other than tensors, plain values, lists, tuples and
            mappings with text keys.

    Note:
        Collective: every rank of `comm` must call it.
    """
    tensors: list[Tensor] = []
    described = [
        json.loads(text)
        for text in comm.all_gather_text(json.dumps(_described(value, tensors)), what)
    ]
    own = _packed(tensors, comm)
    inbox = [
        torch.empty(_nbytes(each), dtype=torch.uint8, device=comm.device) for each in described
    ]
    inbox[comm.rank] = own
    comm.exchange([own] * comm.size, inbox, "gather", what).wait()
    return [
        value if rank == comm.rank else _rebuilt(node, iter(inbox[rank].split(_sizes(node))))
        for rank, node in enumerate(described)
    ]


def hand_out(values: Sequence[Any] | None, comm: Comm, what: str, source: int) -> Any:
    """Return values[r] of rank `source` on rank r.

    Entries of a mapping that cannot be sent are omitted, such as the caches of transformers models.

    Args:
        values: One value per rank on rank `source`; None on other ranks.
        comm: The communicator.
        what: Name of the exchange in errors.
        source: The sending rank.

    Note:
        Collective: every rank of `comm` must call it.
    """
    told = ""
    tensors = list[list[Tensor]]()
    if comm.rank == source:
        assert values is not None
        tensors = [[] for _ in values]
        told = json.dumps(
            [
                _described(_portable(each), found)
                for each, found in zip(values, tensors, strict=True)
            ]
        )
    node = json.loads(comm.all_gather_text(told, what)[source])[comm.rank]
    pieces = [_packed(each, comm) for each in tensors]
    own = (
        pieces[source]
        if pieces
        else torch.empty(_nbytes(node), dtype=torch.uint8, device=comm.device)
    )
    scatter(comm, pieces, own, what, source)
    return _rebuilt(node, iter(own.split(_sizes(node))))


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Return the description of a value, and append its tensors to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), *value.shape]}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"named": {key: _described(each, tensors) for key, each in value.items()}}
    if isinstance(value, (list, tuple)):
        return {
            "list" if isinstance(value, list) else "tuple": [
                _described(each, tensors) for each in value
            ]
        }
    raise UsageError(
        f"a {type(value).__name__} is in a batch, and each pipeline rank has different rows.",
        "Its rows go to the other ranks, as tensors and plain values in lists, tuples and mappings "
        "with names.",
        "pass its tensors, or let all ranks of a pipeline have the same rows (pipeline.rows: "
        "shared).",
    )


def _rebuilt(node: Any, elements: Any) -> Any:
    """Create a value from its description and an iterator over its tensors' bytes."""
    ((kind, told),) = node.items()
    if kind == "tensor":
        return next(elements).clone().view(getattr(torch, told[0])).view(told[1:])
    if kind == "plain":
        return told
    if kind == "named":
        return {key: _rebuilt(each, elements) for key, each in told.items()}
    found = [_rebuilt(each, elements) for each in told]
    return found if kind == "list" else tuple(found)


def _portable(value: Any) -> Any:
    """Remove the entries of a mapping that cannot be sent."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: each
        for key, each in value.items()
        if isinstance(each, (Tensor, list, tuple, Mapping, *_PLAIN))
    }


def _sizes(node: Any) -> list[int]:
    """Return the size of each tensor in a description, in bytes."""
    ((kind, told),) = node.items()
    if kind == "tensor":
        return [getattr(torch, told[0]).itemsize * math.prod(told[1:])]
    if kind == "plain":
        return []
    return [size for each in (told.values() if kind == "named" else told) for size in _sizes(each)]


def _nbytes(node: Any) -> int:
    return sum(_sizes(node))


def _packed(tensors: Sequence[Tensor], comm: Comm) -> Tensor:
    """Return the bytes of all tensors, concatenated."""
    packed = comm.empty(sum(each.nbytes for each in tensors), torch.uint8)
    start = 0
    for each in tensors:
        plain = each.detach().to(comm.device).contiguous().reshape(-1).view(torch.uint8)
        packed[start : start + plain.numel()] = plain
        start += plain.numel()
    return packed
