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
    """All-gather nested containers of tensors and plain values.

    Args:
        value: This rank's value, for example its batch.
        comm: The communicator of the ranks that exchange their values.
        what: Name of the exchange in error messages.

    Returns:
        The values of all ranks, in rank order. This rank's value is returned unchanged; tensors of
        other ranks are on the communicator's device.

    Raises:
        UsageError: A value contains something other than tensors, plain values, lists, tuples and
            mappings with text keys.

    Note:
        Collective: every rank of `comm` must call it.
    """
    tensors: list[Tensor] = []
    told = _described(value, tensors)
    descriptions = [json.loads(text) for text in comm.all_gather_text(told, what)]
    own = _packed(tensors, comm)
    inbox = [_empty(each, comm) for each in descriptions]
    inbox[comm.rank] = own
    comm.exchange([own] * comm.size, inbox, "gather", what).wait()
    return [
        value if rank == comm.rank else _rebuilt(each, inbox[rank])
        for rank, each in enumerate(descriptions)
    ]


def hand_out(values: Sequence[Any] | None, comm: Comm, what: str, source: int) -> Any:
    """Scatter nested containers of tensors and plain values from one rank.

    Mapping items that cannot be sent are omitted, such as the caches of transformers models.

    Args:
        values: One value for each rank on rank `source`; None on other ranks.
        comm: The communicator of the ranks.
        what: Name of the exchange in error messages.
        source: The rank that sends.

    Returns:
        The value for this rank, with tensors on the communicator's device.

    Note:
        Collective: every rank of `comm` must call it.
    """
    told: list[str] = []
    pieces: list[Tensor] = []
    if comm.rank == source:
        assert values is not None
        for value in values:
            tensors: list[Tensor] = []
            told.append(_described(_portable(value), tensors))
            pieces.append(_packed(tensors, comm))
    texts = json.loads(comm.all_gather_text(json.dumps(told), what)[source])
    described = json.loads(texts[comm.rank])
    own = pieces[source] if pieces else _empty(described, comm)
    scatter(comm, pieces, own, what, source)
    return _rebuilt(described, own)


def _described(value: Any, tensors: list[Tensor]) -> str:
    """Return the description of a value as JSON, and append its tensors to a list."""
    node = _node(value, tensors)
    forms = [[str(each.dtype).removeprefix("torch."), *each.shape] for each in tensors]
    return json.dumps({"tensors": forms, "value": node})


def _node(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value with its tensors replaced by their numbers."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"named": {key: _node(each, tensors) for key, each in value.items()}}
    if isinstance(value, (list, tuple)):
        nodes = [_node(each, tensors) for each in value]
        return nodes if isinstance(value, list) else {"tuple": nodes}
    raise UsageError(
        f"a {type(value).__name__} is in a batch, and each pipeline rank has different rows.",
        "Its rows go to the other ranks, as tensors and plain values in lists, tuples and mappings "
        "with names.",
        "pass its tensors, or let all ranks of a pipeline have the same rows (pipeline.rows: "
        "shared).",
    )


def _sizes(described: Any) -> list[int]:
    """Return the size of each tensor in a description, in bytes."""
    return [
        getattr(torch, dtype).itemsize * math.prod(shape) for dtype, *shape in described["tensors"]
    ]


def _empty(described: Any, comm: Comm) -> Tensor:
    return torch.empty(sum(_sizes(described)), dtype=torch.uint8, device=comm.device)


def _rebuilt(described: Any, elements: Tensor) -> Any:
    """Create a value from its description and the bytes of its tensors."""
    pieces = elements.split(_sizes(described))
    tensors = [
        piece.clone().view(getattr(torch, dtype)).view(shape)
        for piece, (dtype, *shape) in zip(pieces, described["tensors"], strict=True)
    ]

    def rebuilt(node: Any) -> Any:
        match node:
            case {"tensor": number}:
                return tensors[number]
            case {"named": items}:
                return {key: rebuilt(each) for key, each in items.items()}
            case {"tuple": nodes}:
                return tuple(map(rebuilt, nodes))
            case list():
                return list(map(rebuilt, node))
        return node

    return rebuilt(described["value"])


def _portable(value: Any) -> Any:
    """Return a mapping without the items that cannot be sent; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: each
        for key, each in value.items()
        if isinstance(each, (Tensor, list, tuple, Mapping, *_PLAIN))
    }


def _packed(tensors: Sequence[Tensor], comm: Comm) -> Tensor:
    """Return the bytes of all tensors, concatenated."""
    packed = comm.empty(sum(each.nbytes for each in tensors), torch.uint8)
    start = 0
    for each in tensors:
        plain = each.detach().to(comm.device).contiguous().reshape(-1).view(torch.uint8)
        packed[start : start + plain.numel()] = plain
        start += plain.numel()
    return packed
