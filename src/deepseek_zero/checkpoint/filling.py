"""Weights, masters, moments and buffers of an engine out of a reader: by name, by flat range, a group at a time.

Raises what the reader raises; changes the engine as it goes, so whoever calls has looked before.  Called by load.py and
deepspeed_load.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.memory import give_back_holes
from ..optim.piece import Cover, Piece
from ..optim.sharded import ShardedOptimizer, forget_states
from ..precision.policy import cast_master
from ..sharding.group import FlatGroup, Member
from .manifest import BUFFER, MOMENT, OWED, WEIGHT, WHOLE, Manifest
from .reading import Reader, Wanted
from .state import Contents, persistent_buffers
from .tensor_file import dtype_named

# What a group says about how to compute, not about what was learnt: the running program decides.
KEPT_OPTIONS = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
GroupStates = tuple[FlatGroup, dict[int, dict[str, Any]]]  # by number of the piece


def wanted_weights(reader: Reader, contents: Contents) -> Iterator[Wanted]:
    for group in contents.runtime.groups:
        for member in group.members:
            if reader.has(WEIGHT, member.name):
                yield WEIGHT, member.name, "", *_held(group, member)[:2]


def wanted_moments(reader: Reader, optimizer: ShardedOptimizer) -> Iterator[Wanted]:
    for _, piece in _by_group(optimizer):
        covers = list(piece.covers())
        for key in _keys(reader, covers):
            for cover in covers:
                yield MOMENT, cover.slot.name, key, cover.start, cover.stop


def _held(group: FlatGroup, member: Member) -> tuple[int, int, Any]:
    """Elements [start, stop) of a parameter that this rank holds, and where."""
    if group.master is not None:
        return group.master.held(member.slot)
    return group.weight.held(member.slot, group.route.comm.rank)


def _by_group(optimizer: ShardedOptimizer) -> list[tuple[int, Piece]]:
    """Pieces with their numbers, those of one group together: in the order of the files."""
    order = {id(group): number for number, group in enumerate(optimizer.runtime.groups)}
    return sorted(enumerate(optimizer.pieces()), key=lambda item: order[id(item[1].group)])


def _keys(reader: Reader, covers: list[Cover]) -> list[str]:
    return list(dict.fromkeys(key for cover in covers for key in reader.keys(MOMENT, cover.slot.name)))


def fill_weights(reader: Reader, contents: Contents) -> None:
    """Masters, and weights without one; weights with a master follow in `refresh`."""
    for group in contents.runtime.groups:
        for member in group.members:
            if reader.has(WEIGHT, member.name):
                _fill_weight(reader, group, member)
        extents = group.master.extents() if group.master is not None else [group.weight.extent]
        for left in [each.store(0, each.memory.numel()) for each in extents if each is not None]:
            left.wait()  # what rests elsewhere is here one group at a time


def _fill_weight(reader: Reader, group: FlatGroup, member: Member) -> None:
    device = group.route.pool.device
    if group.master is not None:
        start, stop, place = _held(group, member)
        for low, part in reader.read(WEIGHT, member.name, "", start, stop):
            at = place + low - start
            group.master.write(at, at + part.numel(), part.to(device))
        return
    start, stop, view = _held(group, member)
    for low, part in reader.read(WEIGHT, member.name, "", start, stop):
        cast_master(part.to(device), view[low - start : low - start + part.numel()])


def fill_buffers(reader: Reader, manifest: Manifest, contents: Contents) -> None:
    """Each rank's own at the world size they were saved with, rank 0's at any other."""
    comm = contents.runtime.comm
    rank = comm.rank if comm.size == manifest.world_size else 0
    for name, buffer in persistent_buffers(contents.runtime.model).items():
        if reader.has(BUFFER, name) and manifest.buffers[name]["shape"] == list(buffer.shape):
            buffer.data.copy_(reader.of_rank(name, rank).view(buffer.shape))


def states_of(
    reader: Reader, manifest: Manifest, optimizer: ShardedOptimizer, before: dict[Tensor, dict[str, Any]]
) -> Iterator[GroupStates]:
    """What the optimizer will have, group by group.  before: what it had, whose memory is taken again."""
    for group, pieces in groupby(_by_group(optimizer), key=lambda item: item[1].group):
        yield (
            group,
            {number: _piece_state(reader, manifest, piece, before.pop(piece.param, {})) for number, piece in pieces},
        )


def fill_optimizer(
    reader: Reader,
    manifest: Manifest,
    groups: list[dict[str, Any]],
    optimizer: ShardedOptimizer,
    states: Iterable[GroupStates] | None = None,
) -> None:
    """Through the inner optimizer's own load_state_dict, which knows where each of its states must be; group by group,
    so that states stand here twice for one group at most.  states: where they have been read.
    """
    count, restored = 0, []
    for mine, saved in zip(optimizer.param_groups, groups, strict=True):
        numbers = list(range(count, count + len(mine["params"])))
        count += len(numbers)
        kept = {key: value for key, value in mine.items() if key in KEPT_OPTIONS}
        restored.append({**mine, **saved, **kept, "params": numbers})
    before = forget_states(optimizer)
    for group, found in states if states is not None else states_of(reader, manifest, optimizer, before):
        state = {number: values for number, values in found.items() if values}
        optimizer.load_inner({"state": state, "param_groups": restored})
        if group.plan.moments_external:
            found = state = {}
            give_back_holes()


def cut_as_saved(manifest: Manifest, keys: Callable[[str], Iterable[str]], optimizer: ShardedOptimizer) -> None:
    """Cut pieces where the parameters that share one were saved with different counters or kinds of moments: some were
    frozen for a time, or their gradients dropped.  Local.  keys: the kinds of a parameter's moments.
    """

    def saved(cover: Cover) -> tuple[dict[str, Any], frozenset[str]]:
        return manifest.scalars.get(cover.slot.name, {}), frozenset(keys(cover.slot.name))

    optimizer.cut_apart(saved)


def fill_owed(reader: Reader, optimizer: ShardedOptimizer) -> None:
    """Gradients whose update comes a step late; whether one is owed is the trainer's to say."""
    for group in optimizer.runtime.trained_groups:
        known = [number for number, member in enumerate(group.members) if reader.has(OWED, member.name)]
        group.gradient.waiting.absent = set(range(len(group.members))) - set(known) if known else None
        for member in group.members:
            if reader.has(OWED, member.name):
                start, stop = group.layout.owned(member.slot, group.route.comm.rank)
                low, view = start - member.slot.start, group.gradient.waiting.of(member.slot)
                for at, part in reader.read(OWED, member.name, "", low, max(low, stop - member.slot.start)):
                    view[at - low : at - low + part.numel()].copy_(part)


def _piece_state(reader: Reader, manifest: Manifest, piece: Piece, before: dict[str, Any]) -> dict[str, Any]:
    covers = list(piece.covers())
    state: dict[str, Any] = {}
    for key in _keys(reader, covers):
        state[key] = _moment(reader, piece, covers, key, before.get(key))
    for cover in covers:
        state |= {key: reader.whole(cover.slot.name, key) for key in reader.keys(WHOLE, cover.slot.name)}
    return state | _numbers(manifest, [cover.slot.name for cover in covers])


def _moment(reader: Reader, piece: Piece, covers: list[Cover], key: str, before: Any) -> Tensor:
    """One state of a piece, put together from what its parameters have; zeros between them."""
    value: Tensor | None = None
    for cover in covers:
        for low, part in reader.read(MOMENT, cover.slot.name, key, cover.start, cover.stop):
            if value is None:
                value = _memory_for(piece, part.dtype, before)
                if sum(each.stop - each.start for each in covers) < piece.numel:
                    value.zero_()
            at = cover.offset + low - cover.start
            value[at : at + part.numel()].copy_(part)
    assert value is not None
    return value.view(piece.param.shape)


def _memory_for(piece: Piece, dtype: torch.dtype, before: Any) -> Tensor:
    """Where a moment goes: over the one before it, if that lies here as it is, since new pages cost as much as the
    copy does.
    """
    if (
        isinstance(before, Tensor)
        and (before.device.type, before.dtype, before.numel()) == ("cpu", dtype, piece.numel)
        and before.is_contiguous()
        and not piece.group.plan.moments_external
    ):
        return before.view(-1)
    return torch.empty(piece.numel, dtype=dtype)


def _numbers(manifest: Manifest, names: list[str]) -> dict[str, Any]:
    """The counters of a piece, which its parameters share (`cut_as_saved`)."""
    saved = [manifest.scalars.get(name, {}) for name in names]
    different = next((k for k, each in enumerate(saved) if each != saved[0]), None)
    if different is not None:
        raise CheckpointError(
            f"'{names[0]}' and '{names[different]}' were saved with different optimizer counters "
            f"({saved[0]} and {saved[different]}) and share one stretch of optimizer state here.",
            "They were not always trained together.",
            "give them separate parameter groups, or load with load_optimizer_states=False.",
        )
    return {key: _number(number) for key, number in saved[0].items()} if saved else {}


def _number(number: dict[str, Any]) -> Any:
    if number["dtype"] is None:
        return number["value"]
    return torch.tensor(number["value"], dtype=dtype_named(number["dtype"]))
