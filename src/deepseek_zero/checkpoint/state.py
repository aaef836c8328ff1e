"""What of an engine goes into a checkpoint on this rank, as chunks of flat tensors, and where each is to be had.

Walks units, masters, buffers and optimizer pieces; writes no file, and copies nothing before it is read.  Called by
save.py, writing.py and load.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..base.device import is_persistent_buffer
from ..base.errors import CheckpointError
from ..optim.flow import Stretch
from ..optim.piece import Cover, Piece
from ..optim.sharded import ShardedOptimizer
from ..planner.spec import R
from ..sharding.group import FlatGroup
from ..sharding.runtime import Runtime
from .manifest import MOMENT, OWED, WEIGHT, WHOLE, Chunk


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


@dataclass(eq=False)
class Origin:
    """One chunk of this rank's and where its elements are now.

    read(low, high): elements of the chunk, to be looked at before anything else happens.  group: whose step changes it.
    """

    chunk: Chunk
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    group: FlatGroup | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass
class Batch:
    """Sources that are read together, and what of other memories must be here meanwhile."""

    origins: list[Origin]
    stretches: list[Stretch] = field(default_factory=list)


def batches_of(contents: Contents, *, skip_frozen: bool) -> Iterator[Batch]:
    """This rank's part of weights and optimizer states, group by group in the order of their update.  Each element of
    the model is in one rank's batches.
    """
    runtime, optimizer = contents.runtime, contents.optimizer
    pieces: dict[int, list[Piece]] = {}
    for piece in optimizer.pieces() if optimizer is not None else ():
        pieces.setdefault(id(piece.group), []).append(piece)
    recent = Recent()
    for group in runtime.groups:
        if group.trainable or not skip_frozen:
            yield _weights(group)
        for piece in pieces.get(id(group), ()):
            assert optimizer is not None
            yield _moments(optimizer, piece, recent)
        if group.trainable:
            yield _owed(group)


def _weights(group: FlatGroup) -> Batch:
    """This rank's part of a group's parameters, also of those that every rank holds whole."""
    batch, rank, master = Batch([]), group.route.comm.rank, group.master
    places = []
    for member in group.members:
        start, stop = group.layout.owned(member.slot, rank)
        if start >= stop:
            continue
        low = member.slot.start
        chunk = Chunk(WEIGHT, member.name, "", start - low, stop - low, rank)
        if master is not None:
            place = master.owned(member.slot)[0]
            read = partial(_read_from, master.peek, place)
        else:
            place = start - (group.layout.bounds(rank)[0] if group.is_sharded else 0)
            read = partial(_read_from, group.weight.peek, place)
        places.append((place, place + stop - start))
        batch.origins.append(Origin(chunk, exact_dtype(group), (stop - start,), read, group))
    if places:
        extents = master.extents() if master is not None else [group.weight.extent]
        low, high = places[0][0], places[-1][1]
        batch.stretches = [Stretch(extent, low, high, changes=False) for extent in extents if extent is not None]
    return batch


def _read_from(peek: Callable[[int, int], Tensor], place: int, low: int, high: int) -> Tensor:
    return peek(place + low, place + high)


def _owed(group: FlatGroup) -> Batch:
    """This rank's part of a gradient whose update comes a step late."""
    waiting, rank, batch = group.gradient.waiting, group.route.comm.rank, Batch([])
    low = group.layout.bounds(rank)[0]
    for number, member in enumerate(group.members if waiting.is_held and waiting.buffer is not None else ()):
        if number in (waiting.absent or ()):
            continue
        assert waiting.buffer is not None
        start, stop = group.layout.owned(member.slot, rank)
        if start < stop:
            chunk = Chunk(OWED, member.name, "", start - member.slot.start, stop - member.slot.start, rank)
            read = partial(_read_from, waiting.buffer.peek, start - low)
            batch.origins.append(Origin(chunk, waiting.buffer.spec.dtype, (stop - start,), read, group))
            batch.stretches = [Stretch(each, 0, each.memory.numel(), changes=False) for each in waiting.extents]
    return batch


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict would hold, each once."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent_buffer(module, name):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def state_names(model: nn.Module) -> dict[str, str]:
    """name in the state dict -> the first name of the same parameter (itself, unless it is tied), in its order."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found[dot + name] = first.setdefault(id(param), dot + name)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent_buffer(module, name):
                found[dot + name] = first.setdefault(id(buffer), dot + name)
    return found


class Recent:
    """A piece's moment as it was read last: parameters that share the piece ask for it one after another."""

    def __init__(self) -> None:
        self._last: tuple[tuple[int, str], Tensor] | None = None  # one attribute: two threads may ask

    def of(self, optimizer: ShardedOptimizer, piece: Piece, key: str) -> Tensor:
        last = self._last
        if last is None or last[0] != (id(piece), key):
            last = self._last = (id(piece), key), optimizer.moments.read(piece, key).reshape(-1)
        return last[1]


def _moments(optimizer: ShardedOptimizer, piece: Piece, recent: Recent) -> Batch:
    """This rank's part of every optimizer state of a piece that has elements."""
    batch, rank = Batch([], [replace(each, changes=False) for each in optimizer.moments.stretches(piece)]), piece.rank
    for key, value in optimizer.inner.state.get(piece.param, {}).items():
        if not isinstance(value, Tensor) or is_number(value, piece.param):
            continue
        for cover in piece.covers():
            if value.shape == piece.param.shape:
                batch.origins += _owned_moment(optimizer, cover, key, value.dtype, recent)
            else:
                batch.origins += _whole_state(cover, key, value, rank)
    return batch


def is_number(value: Tensor, param: Tensor) -> bool:
    """Whether a state counts something (`step`) instead of following the parameter's elements."""
    return value.dim() == 0 and param.dim() > 0


def _owned_moment(
    optimizer: ShardedOptimizer, cover: Cover, key: str, dtype: torch.dtype, recent: Recent
) -> Iterator[Origin]:
    """Where every rank holds the whole state (stage 0), each writes the part it would own if it were sharded."""
    piece, rank = cover.piece, cover.piece.rank
    low, high = piece.group.layout.owned(cover.slot, rank)
    start, stop = max(cover.start, low - cover.slot.start), min(cover.stop, high - cover.slot.start)
    if start < stop:
        at = cover.offset + start - cover.start

        def read(low: int, high: int) -> Tensor:
            return recent.of(optimizer, piece, key)[at + low : at + high]

        yield Origin(Chunk(MOMENT, cover.slot.name, key, start, stop, rank), dtype, (stop - start,), read, piece.group)


def _whole_state(cover: Cover, key: str, value: Tensor, rank: int) -> Iterator[Origin]:
    if cover.stop - cover.start != cover.slot.numel:
        raise CheckpointError(
            f"optimizer state '{key}' of '{cover.slot.name}' has shape {tuple(value.shape)} over part of it.",
            "Only whole parameters can have a state of another shape.",
            'give the optimizer class the attribute granularity = "tensor".',
        )
    group = cover.piece.group
    low, high = group.layout.bounds(rank)
    replicated = group.master is not None and group.master.placement is R
    if not replicated or low <= cover.slot.start < high:
        chunk = Chunk(WHOLE, cover.slot.name, key, 0, value.numel(), rank)
        yield Origin(chunk, value.dtype, tuple(value.shape), lambda low, high: value.reshape(-1)[low:high], group)


def numbers(optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """Optimizer states without elements, by parameter: {name: {"step": {"value": 3.0, "dtype": "float32"}}}."""
    found: dict[str, dict[str, Any]] = {}
    for piece in optimizer.pieces():
        for key, value in optimizer.inner.state.get(piece.param, {}).items():
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


def value_origin(kind: str, name: str, value: Tensor, rank: int) -> Origin:
    """A tensor that no step changes, whole and in its own shape."""
    flat = value.reshape(-1)
    chunk = Chunk(kind, name, "", 0, value.numel(), rank)
    return Origin(chunk, value.dtype, tuple(value.shape), lambda low, high: flat[low:high])
