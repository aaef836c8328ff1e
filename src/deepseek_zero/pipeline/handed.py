"""What ranks of a pipeline hand each other whole: a batch, or what a model returned; tensors among
plain values.

A description in JSON travels first, as text, then the elements of all tensors, as bytes.  Mappings
arrive as dicts.
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
    """Return every rank's value, by rank: the own one as it is, others with tensors on the
    communicator's device. Collective.

    UsageError where a value holds something that is no tensor, plain value, list, tuple or mapping
    with names.
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
    """Return values[r] of the rank `source` on rank r; other ranks give None.  Collective.

    Of a mapping, entries that cannot be handed out are left out: the caches of models of
    transformers.
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
    """Return the description of a value, and add its tensors to a list, in order."""
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
        f"a {type(value).__name__} in a batch of rows that each pipeline rank has of its own.",
        "Its rows go to the other ranks, as tensors and plain values in lists, tuples and mappings "
        "with names.",
        "pass its tensors, or let all ranks of a pipeline have the same rows (pipeline.rows: "
        "shared).",
    )


def _rebuilt(node: Any, elements: Any) -> Any:
    """Return the value that a description is of.  elements: an iterator over the bytes of its
    tensors.
    """
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
    """Return what a model returned without the entries of a mapping that cannot be handed out."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: each
        for key, each in value.items()
        if isinstance(each, (Tensor, list, tuple, Mapping, *_PLAIN))
    }


def _sizes(node: Any) -> list[int]:
    """The bytes of each tensor of a description, in order."""
    ((kind, told),) = node.items()
    if kind == "tensor":
        return [getattr(torch, told[0]).itemsize * math.prod(told[1:])]
    if kind == "plain":
        return []
    return [size for each in (told.values() if kind == "named" else told) for size in _sizes(each)]


def _nbytes(node: Any) -> int:
    return sum(_sizes(node))


def _packed(tensors: Sequence[Tensor], comm: Comm) -> Tensor:
    """The elements of tensors, one behind the other."""
    packed = comm.empty(sum(each.nbytes for each in tensors), torch.uint8)
    start = 0
    for each in tensors:
        plain = each.detach().to(comm.device).contiguous().reshape(-1).view(torch.uint8)
        packed[start : start + plain.numel()] = plain
        start += plain.numel()
    return packed
