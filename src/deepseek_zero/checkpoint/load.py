"""Reads a checkpoint into an engine of any world size and stage: by name, by intersection of flat ranges.

Each rank reads only the elements it will hold.  Everything that can be refused is refused before anything changes, on
every rank.  Called by engine/saving.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.memory import give_back_holes
from ..comm.collectives import Comm
from ..optim.piece import Cover, Piece
from ..optim.sharded import ShardedOptimizer, forget_ahead, forget_states
from ..precision.policy import cast_master
from ..sharding.group import FlatGroup, Member
from ..sharding.runtime import Runtime
from . import rng
from .catalogue import folder_of, tags_in
from .manifest import (
    BUFFER,
    MANIFEST,
    MOMENT,
    OWED,
    RNG,
    VALUE,
    WEIGHT,
    WHOLE,
    Manifest,
    checked_tag,
    together,
)
from .plain import decode
from .reading import Reader, Wanted
from .state import Contents, persistent_buffers
from .verify import Share, verify

# What a group says about how to compute, not about what was learnt: the running program decides.
KEPT_OPTIONS = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})


@dataclass(frozen=True)
class LoadSettings:
    """strict: names of the model and of the checkpoint must be the same.  moments: restore the optimizer's state.

    rng: restore random generators, at the world size they were saved with.  verify: read every byte first, so that a
    damaged file is refused before anything changes; each rank reads its share of the files.
    """

    strict: bool = True
    moments: bool = True
    rng: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Loaded:
    """The plain values of a checkpoint, as they were saved."""

    folder: Path
    trainer: dict[str, Any]
    client: Any


def existing(directory: Path, tag: str) -> Path:
    """Where a checkpoint is; CheckpointError where there is none of that tag."""
    folder = folder_of(directory, checked_tag(tag))
    if folder.exists():
        return folder
    raise CheckpointError(
        f"{directory} holds no checkpoint {tag!r}.",
        fix=f"choose one of: {', '.join(sorted(tags_in(directory))) or 'none is there'}.",
    )


def load(directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
    """Fill weights, masters and moments from `directory/tag`.  Collective."""
    runtime, loaded = contents.runtime, []

    def look() -> str:
        folder = existing(directory, tag)
        manifest = Manifest.read(folder / MANIFEST)
        _check(manifest, contents, settings)
        loaded.append((manifest, folder))
        return ""

    together(runtime.comm, f"loading {tag}: the manifest", look)
    manifest, folder = loaded[0]
    if settings.verify:
        together(runtime.comm, f"loading {tag}: checksums", lambda: _refuse_damaged(folder, runtime.comm))
    plain: dict[str, Any] = {}

    def look_inside() -> str:
        plain.update(plain_values(folder, manifest))
        return ""

    together(runtime.comm, f"loading {tag}: values", look_inside)
    refill(contents, tag, lambda: _fill(folder, manifest, plain, contents, settings), manifest.lifted)
    return Loaded(folder, plain["trainer"], plain["client"])


def refill(contents: Contents, tag: str, fill: Callable[[], str], lifted: Sequence[str] = ()) -> None:
    """Have every rank write new weights, masters and moments, whatever the run was in the midst of.  Collective."""
    runtime, optimizer = contents.runtime, contents.optimizer
    with torch.no_grad():
        runtime.gatherer.release_all()
        runtime.drop_grads()
        runtime.backwards = 0
        if optimizer is not None:
            forget_ahead(optimizer)
            if optimizer.lifter is not None:
                optimizer.lifter.restore(lifted)
        together(runtime.comm, f"loading {tag}: slices", fill)
        for unit in runtime.units:
            for group in unit.trained:
                group.refresh(unit.name).wait()


def plain_values(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What was saved beside the slices: {"groups": ..., "trainer": ..., "client": ...}."""
    with ExitStack() as stack:
        reader = Reader(folder, manifest.chunks, stack)
        tensors = {chunk.name: reader.value(VALUE, chunk.name) for chunk in manifest.chunks if chunk.kind == VALUE}
    found: dict[str, Any] = decode(manifest.plain, tensors)
    return found


def _restore_rng(folder: Path, manifest: Manifest, runtime: Runtime, stack: ExitStack) -> None:
    if manifest.world_size != runtime.comm.size:
        return  # nobody's sequence here goes on one of those
    own = [chunk for chunk in manifest.chunks if chunk.kind == RNG and chunk.rank == runtime.comm.rank]
    reader = Reader(folder, own, stack)
    rng.restore({chunk.name: reader.value(RNG, chunk.name) for chunk in own}, runtime.route.pool.device)


# -- what is refused


def _refuse_damaged(folder: Path, comm: Comm) -> str:
    """Read this rank's share of the files."""
    faults = verify(folder, Share(comm.rank, comm.size), again=True)
    if faults:
        raise CheckpointError(
            f"{folder} is damaged: {_some([str(fault) for fault in faults])}.",
            "Nothing of the run has changed.",
            'load another tag; "newest" takes the newest one of which every byte is right.',
        )
    return ""


def _check(manifest: Manifest, contents: Contents, settings: LoadSettings) -> None:
    """Raise if the checkpoint does not fit; the same on every rank."""
    own = {
        member.name: (list(member.slot.shape), group.trainable)
        for group in contents.runtime.groups
        for member in group.members
    }
    shapes = [
        f"'{name}' is {manifest.parameters[name]['shape']} in the checkpoint and {shape} in the model"
        for name, (shape, _) in own.items()
        if name in manifest.parameters and manifest.parameters[name]["shape"] != shape
    ]
    if shapes:
        raise CheckpointError(
            f"{len(shapes)} shape(s) differ: {_some(shapes)}.", fix="build the model with the sizes it was saved with."
        )
    excluded = set(manifest.excluded)
    missing = [
        name for name, (_, trained) in own.items() if name not in manifest.parameters or (name in excluded and trained)
    ]
    unexpected = [name for name in manifest.parameters if name not in own]
    if settings.strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint lacks {_some(missing) or 'nothing'} and has {_some(unexpected) or 'nothing'} too many.",
            "load_module_strict wants the same names on both sides.",
            "load into the model that was saved, or pass load_module_strict=False.",
        )
    if settings.moments and contents.optimizer is not None:
        _check_optimizer(manifest, contents.optimizer)


def _check_optimizer(manifest: Manifest, optimizer: ShardedOptimizer) -> None:
    mine, fix = (
        type(optimizer.inner).__name__,
        "load with load_optimizer_states=False, or use the optimizer that was saved.",
    )
    if manifest.optimizer != mine:
        raise CheckpointError(f"the checkpoint has the state of {manifest.optimizer}, the engine runs {mine}.", fix=fix)
    groups = len(manifest.plain["groups"])
    if groups != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {groups} parameter groups, the optimizer has {len(optimizer.param_groups)}.", fix=fix
        )
    if manifest.plain["trainer"].get("owed") is not None and optimizer.delay is None:
        raise CheckpointError(
            "the checkpoint owes an update that was delayed.",
            "It was saved with delayed_update_after, which this run does not have.",
            "set delayed_update_after, save after engine.optimizer.flush(), or load with load_optimizer_states=False.",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- filling


def _fill(folder: Path, manifest: Manifest, plain: dict[str, Any], contents: Contents, settings: LoadSettings) -> str:
    with ExitStack() as stack:
        reader, optimizer = Reader(folder, manifest.chunks, stack), contents.optimizer
        moments = _wanted_moments(reader, optimizer) if settings.moments and optimizer is not None else []
        reader.expect([*_wanted_weights(reader, contents), *moments])
        _fill_weights(reader, contents)
        _fill_buffers(reader, manifest, contents)
        if settings.moments and contents.optimizer is not None:
            _fill_optimizer(reader, manifest, plain["groups"], contents.optimizer)
            _fill_owed(reader, contents.optimizer)
        if settings.rng:
            _restore_rng(folder, manifest, contents.runtime, stack)
    return ""


def _wanted_weights(reader: Reader, contents: Contents) -> Iterator[Wanted]:
    for group in contents.runtime.groups:
        for member in group.members:
            if reader.has(WEIGHT, member.name):
                yield WEIGHT, member.name, "", *_held(group, member)[:2]


def _wanted_moments(reader: Reader, optimizer: ShardedOptimizer) -> Iterator[Wanted]:
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


def _fill_weights(reader: Reader, contents: Contents) -> None:
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


def _fill_buffers(reader: Reader, manifest: Manifest, contents: Contents) -> None:
    """Each rank's own at the world size they were saved with, rank 0's at any other."""
    comm = contents.runtime.comm
    rank = comm.rank if comm.size == manifest.world_size else 0
    for name, buffer in persistent_buffers(contents.runtime.model).items():
        if reader.has(BUFFER, name) and manifest.buffers[name]["shape"] == list(buffer.shape):
            buffer.data.copy_(reader.of_rank(name, rank).view(buffer.shape))


def _fill_optimizer(
    reader: Reader, manifest: Manifest, groups: list[dict[str, Any]], optimizer: ShardedOptimizer
) -> None:
    """Through the inner optimizer's own load_state_dict, which knows where each of its states must be; group by group,
    so that states stand here twice for one group at most.
    """
    count, restored = 0, []
    for mine, saved in zip(optimizer.param_groups, groups, strict=True):
        numbers = list(range(count, count + len(mine["params"])))
        count += len(numbers)
        kept = {key: value for key, value in mine.items() if key in KEPT_OPTIONS}
        restored.append({**mine, **saved, **kept, "params": numbers})
    forget_states(optimizer)
    for group, pieces in groupby(_by_group(optimizer), key=lambda item: item[1].group):
        found = {number: _piece_state(reader, manifest, piece) for number, piece in pieces}
        state = {number: values for number, values in found.items() if values}
        optimizer.load_inner({"state": state, "param_groups": restored})
        if group.plan.moments_rest:
            found = state = {}
            give_back_holes()


def _fill_owed(reader: Reader, optimizer: ShardedOptimizer) -> None:
    """Gradients whose update comes a step late; whether one is owed is the trainer's to say."""
    for group in optimizer.runtime.trained_groups:
        for member in group.members:
            if reader.has(OWED, member.name):
                start, stop = group.layout.owned(member.slot, group.route.comm.rank)
                low, view = start - member.slot.start, group.gradient.waiting.of(member.slot)
                for at, part in reader.read(OWED, member.name, "", low, max(low, stop - member.slot.start)):
                    view[at - low : at - low + part.numel()].copy_(part)


def _piece_state(reader: Reader, manifest: Manifest, piece: Piece) -> dict[str, Any]:
    covers = list(piece.covers())
    state: dict[str, Any] = {}
    for key in _keys(reader, covers):
        state[key] = _moment(reader, piece, covers, key)
    for cover in covers:
        state |= {key: reader.whole(cover.slot.name, key) for key in reader.keys(WHOLE, cover.slot.name)}
    return state | _numbers(manifest, [cover.slot.name for cover in covers])


def _moment(reader: Reader, piece: Piece, covers: list[Cover], key: str) -> Tensor:
    """One state of a piece, put together from what its parameters have; zeros between them."""
    value: Tensor | None = None
    for cover in covers:
        for low, part in reader.read(MOMENT, cover.slot.name, key, cover.start, cover.stop):
            if value is None:
                whole = sum(each.stop - each.start for each in covers) == piece.numel
                value = (torch.empty if whole else torch.zeros)(piece.numel, dtype=part.dtype)
            at = cover.offset + low - cover.start
            value[at : at + part.numel()].copy_(part)
    assert value is not None
    return value.view(piece.param.shape)


def _numbers(manifest: Manifest, names: list[str]) -> dict[str, Any]:
    """The counters of a piece, which its parameters must share."""
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
    return torch.tensor(number["value"], dtype=getattr(torch, number["dtype"]))
