"""What of an engine goes into a checkpoint on this rank, as chunks of flat tensors.

Walks units, masters, buffers and optimizer pieces; writes no file.  Called by save.py and load.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..optim.piece import Cover
from ..optim.sharded import ShardedOptimizer
from ..sharding.group import FlatGroup
from ..sharding.layout import Slot
from ..sharding.placement import R
from ..sharding.runtime import Runtime
from .manifest import BUFFER, MOMENT, WEIGHT, WHOLE, Chunk


@dataclass
class Contents:
    """What a checkpoint is made of. trainer: counters, scaler and schedule; client: the caller's own; both plain
    values.
    """

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    trainer: dict[str, Any] = field(default_factory=dict)
    client: Any = None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def exact_dtype(group: FlatGroup) -> torch.dtype:
    """Dtype of the most precise form of a group's weights: the master's, where there is one."""
    return group.master.dtype if group.master is not None else group.weight.spec.dtype


def owned_values(group: FlatGroup, slot: Slot) -> Tensor:
    """This rank's part of a parameter in its most precise form, flat."""
    if group.master is None:
        return group.weight.owned(slot, group.route.comm.rank)
    return group.master.read(*group.master.owned(slot))


def owned_weights(runtime: Runtime, *, skip_frozen: bool) -> Iterator[tuple[Chunk, Tensor]]:
    """This rank's part of every parameter, also of those that every rank holds whole: each element is written once."""
    rank = runtime.comm.rank
    for group in runtime.groups:
        if skip_frozen and not group.trainable:
            continue
        for member in group.members:
            start, stop = group.layout.owned(member.slot, rank)
            if start < stop:
                low = member.slot.start
                chunk = Chunk(WEIGHT, member.name, "", start - low, stop - low, rank)
                yield chunk, owned_values(group, member.slot)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict would hold, each once."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def owned_moments(optimizer: ShardedOptimizer, rank: int) -> Iterator[tuple[Chunk, Tensor]]:
    """This rank's part of every optimizer state that has elements."""
    for piece in optimizer.pieces():
        state = optimizer.state.get(piece.param, {})
        for key, value in state.items():
            if not isinstance(value, Tensor) or is_number(value, piece.param):
                continue
            for cover in piece.covers():
                if value.shape == piece.param.shape:
                    yield from _owned_moment(cover, key, value, rank)
                else:
                    yield from _whole_state(cover, key, value, rank)


def is_number(value: Tensor, param: Tensor) -> bool:
    """Whether a state counts something (`step`) instead of following the parameter's elements."""
    return value.dim() == 0 and param.dim() > 0


def _owned_moment(cover: Cover, key: str, value: Tensor, rank: int) -> Iterator[tuple[Chunk, Tensor]]:
    """Where every rank holds the whole state (stage 0), each writes the part it would own if it were sharded."""
    low, high = cover.piece.group.layout.owned(cover.slot, rank)
    start, stop = max(cover.start, low - cover.slot.start), min(cover.stop, high - cover.slot.start)
    if start < stop:
        part = cover.of(value)[start - cover.start : stop - cover.start]
        yield Chunk(MOMENT, cover.slot.name, key, start, stop, rank), part


def _whole_state(cover: Cover, key: str, value: Tensor, rank: int) -> Iterator[tuple[Chunk, Tensor]]:
    if cover.stop - cover.start != cover.slot.numel:
        raise CheckpointError(
            f"optimizer state '{key}' of '{cover.slot.name}' has shape {tuple(value.shape)} over part of it.",
            "Only whole parameters can have a state of another shape.",
            'give the optimizer class the attribute granularity = "tensor".',
        )
    low, high = cover.piece.group.layout.bounds(rank)
    replicated = cover.piece.group.master is not None and cover.piece.group.master.placement is R
    if not replicated or low <= cover.slot.start < high:
        yield Chunk(WHOLE, cover.slot.name, key, 0, value.numel(), rank), value


def numbers(optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """Optimizer states without elements, by parameter: {name: {"step": {"value": 3.0, "dtype": "float32"}}}."""
    found: dict[str, dict[str, Any]] = {}
    for piece in optimizer.pieces():
        for key, value in optimizer.state.get(piece.param, {}).items():
            if isinstance(value, Tensor) and not is_number(value, piece.param):
                continue
            number = _number(key, value, piece.names[0])
            for name in piece.names:
                found.setdefault(name, {})[key] = number
    return found


def _number(key: str, value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"value": value.item(), "dtype": dtype_name(value.dtype)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value, "dtype": None}
    raise CheckpointError(
        f"optimizer state '{key}' of '{name}' is a {type(value).__name__}.",
        "Checkpoints hold plain values and tensors, so that reading one never runs code.",
        "keep it as a tensor or a number.",
    )


def buffer_chunk(name: str, buffer: Tensor, rank: int) -> Chunk:
    return Chunk(BUFFER, name, "", 0, buffer.numel(), rank)
