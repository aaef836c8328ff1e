"""Divide a batch into parts by its rows, and join the outputs of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..base.nested import all_tensors, map_inputs
from .stage import MicroBatch


def rows_of(micro: MicroBatch) -> int | None:
    """Return the number of rows of a batch, or None if no tensor has a dimension.

    It is the size of the first dimension of the first tensor that has one.
    """
    tensors = all_tensors((micro.args, dict(micro.kwargs)), visits_objects=False)
    return next((each.shape[0] for each in tensors if each.dim()), None)


def cut_rows(micro: MicroBatch, parts: int) -> list[MicroBatch]:
    """Divide a batch into micro-batches with equal numbers of rows.

    Each micro-batch has its rows of every tensor whose first dimension is that of the batch. All
    other tensors and values are the same in every micro-batch.

    Args:
        micro: The batch: the arguments of the model's forward.
        parts: Number of micro-batches.

    Returns:
        The micro-batches, in the order of the rows.

    Raises:
        UsageError: The number of rows is not divisible by the number of parts.
    """
    if parts == 1:
        return [micro]
    rows = rows_of(micro)
    if rows is None or rows % parts:
        raise UsageError(
            f"a batch of {rows or 0} rows cannot be cut into pipeline.micro_batches = {parts} "
            "equal parts.",
            "The loss is the mean over equal parts, each of whole rows.",
            f"let each batch have a multiple of {parts} rows (drop a short last one), or state "
            "another pipeline.micro_batches.",
        )
    length = rows // parts

    def part(number: int, tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() and tensor.shape[0] == rows
        return tensor.narrow(0, number * length, length) if has_rows else tensor

    whole = (micro.args, dict(micro.kwargs))
    return [MicroBatch(*map_inputs(whole, partial(part, number))) for number in range(parts)]


def join_rows(outputs: Sequence[Any]) -> Any:
    """Join a model's outputs for the micro-batches of one batch.

    Tensors are concatenated by rows, scalars are averaged, and containers are joined item by item.
    For any other value, the first one is returned.

    Args:
        outputs: The model's output for each micro-batch, in order.

    Returns:
        One output for the whole batch, of the same structure.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs)).mean()
    if isinstance(first, Mapping):
        items = {key: join_rows([each[key] for each in outputs]) for key in first}
        return items if type(first) is dict else type(first)(**items)
    if isinstance(first, (tuple, list)):
        joined = [join_rows(each) for each in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first
