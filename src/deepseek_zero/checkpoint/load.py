"""Reads a checkpoint into an engine of any world size and stage: by name, by intersection of flat ranges.

Each rank reads only the elements it will hold.  Everything that can be refused is refused before anything changes, on
every rank.  Called by engine/saving.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base.errors import CheckpointError
from ..optim.sharded import ShardedOptimizer, forget_ahead
from ..sharding.runtime import Runtime
from . import rng
from .catalogue import folder_of, tags_in
from .filling import (
    GroupStates,
    cut_as_saved,
    fill_buffers,
    fill_optimizer,
    fill_owed,
    fill_weights,
    states_of,
    wanted_moments,
    wanted_weights,
)
from .manifest import MANIFEST, MOMENT, RNG, VALUE, Manifest, checked_tag, together
from .plain import decode
from .reading import Reader
from .state import Contents
from .verify import Share, refuse, some, verify

NEW_MOMENTS = "moments into new memory"


@dataclass(frozen=True)
class LoadSettings:
    """strict: names of the model and of the checkpoint must be the same.  moments: restore the optimizer's state.

    rng: restore random generators, at the world size they were saved with.  verify: compare every byte with its
    checksum before anything changes; each rank reads its share of the files, and moments twice only where they replace
    others.
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
    runtime.follow_requires_grad()

    def look() -> str:
        folder = existing(directory, tag)
        manifest = Manifest.read(folder / MANIFEST)
        check(manifest, contents, settings)
        if settings.moments and contents.optimizer is not None:
            kinds: dict[str, set[str]] = {}
            for chunk in manifest.chunks:
                if chunk.kind == MOMENT:
                    kinds.setdefault(chunk.name, set()).add(chunk.key)
            cut_as_saved(manifest, lambda name: kinds.get(name, ()), contents.optimizer)
        loaded.append((manifest, folder))
        return NEW_MOMENTS if settings.moments and _takes_new_moments(folder, manifest, contents) else ""

    answers = together(runtime.comm, f"loading {tag}: the manifest", look)
    manifest, folder = loaded[0]
    checks_moments = settings.verify and set(answers) == {NEW_MOMENTS}
    if settings.verify:
        share, but = Share(runtime.comm.rank, runtime.comm.size), MOMENT if checks_moments else ""
        together(runtime.comm, f"loading {tag}: checksums", lambda: _refuse_damaged(folder, share, but))
    plain: dict[str, Any] = {}
    states: list[GroupStates] = []

    def look_inside() -> str:
        plain.update(plain_values(folder, manifest))
        if checks_moments:
            states.extend(_new_states(folder, manifest, contents))
        return ""

    together(runtime.comm, f"loading {tag}: values", look_inside)
    known = states if checks_moments else None
    refill(contents, tag, lambda: _fill(folder, manifest, plain, contents, settings, known), manifest.lifted)
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


def _refuse_damaged(folder: Path, share: Share, but: str) -> str:
    """Read this rank's share of the files."""
    refuse(folder, verify(folder, share, again=True, but=but))
    return ""


def check(manifest: Manifest, contents: Contents, settings: LoadSettings) -> None:
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
            f"{len(shapes)} shape(s) differ: {some(shapes)}.", fix="build the model with the sizes it was saved with."
        )
    excluded = set(manifest.excluded)
    missing = [
        name for name, (_, trained) in own.items() if name not in manifest.parameters or (name in excluded and trained)
    ]
    unexpected = [name for name in manifest.parameters if name not in own]
    if settings.strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint lacks {some(missing) or 'nothing'} and has {some(unexpected) or 'nothing'} too many.",
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


# -- filling


def _takes_new_moments(folder: Path, manifest: Manifest, contents: Contents) -> bool:
    """Whether this rank's moments come, chunk by chunk, into memory that holds nothing yet.

    Then they are compared as they are read: until all ranks have theirs, nothing has changed.
    """
    optimizer = contents.optimizer
    if optimizer is None or optimizer.inner.state or contents.runtime.route.pool.device.type != "cpu":
        return False
    if any(group.plan.moments_external for group in contents.runtime.trained_groups):
        return False
    with ExitStack() as stack:
        reader = Reader(folder, manifest.chunks, stack)
        return reader.reads_whole(wanted_moments(reader, optimizer))


def _new_states(folder: Path, manifest: Manifest, contents: Contents) -> Iterator[GroupStates]:
    assert contents.optimizer is not None
    with ExitStack() as stack:
        reader = Reader(folder, manifest.chunks, stack, compares=True)
        reader.expect(wanted_moments(reader, contents.optimizer))
        yield from states_of(reader, manifest, contents.optimizer, {})


def _fill(
    folder: Path,
    manifest: Manifest,
    plain: dict[str, Any],
    contents: Contents,
    settings: LoadSettings,
    states: list[GroupStates] | None,
) -> str:
    """states: of the optimizer, where they have been read."""
    with ExitStack() as stack:
        reader, optimizer = Reader(folder, manifest.chunks, stack), contents.optimizer if settings.moments else None
        moments = wanted_moments(reader, optimizer) if optimizer is not None and states is None else ()
        reader.expect([*wanted_weights(reader, contents), *moments])
        fill_weights(reader, contents)
        fill_buffers(reader, manifest, contents)
        if optimizer is not None:
            fill_optimizer(reader, manifest, plain["groups"], optimizer, states)
            fill_owed(reader, optimizer)
        if settings.rng:
            _restore_rng(folder, manifest, contents.runtime, stack)
    return ""
