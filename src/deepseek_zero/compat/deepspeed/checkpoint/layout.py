"""DeepSpeed's layout as an object: how the core recognises, checks and opens it, and how an engine
saves and loads it.

A save writes our own slices first; then each rank turns them into its DeepSpeed files, reading the
slices back by range, so that no rank gathers anything but what its own files hold.  The slices are
removed when the checkpoint has its name.  A load is the same reshape as a load of ours: by name and
flat range, at any world size and stage.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....base.errors import CheckpointError
from ....checkpoint import files
from ....checkpoint.catalogue import remove_replaced
from ....checkpoint.contents import Contents, Loaded, LoadSettings, SaveSettings
from ....checkpoint.format import MOMENT, FileRecord, Manifest
from ....checkpoint.layouts import EngineLayout, OpenCheckpoint
from ....checkpoint.load import (
    check,
    replace_states,
    restore_buffers,
    restore_optimizer,
    restore_weights,
    split_as_saved,
)
from ....checkpoint.lockstep import run_and_gather
from ....checkpoint.piece import ModelPiece, names_of_all
from ....checkpoint.read import open_checkpoint
from ....checkpoint.save import publish, refuse_foreign_files, save
from ....checkpoint.staging import StagedOutput
from ....checkpoint.state import is_scalar_state
from ....checkpoint.torch_file import torch_records
from ....checkpoint.verify import FileSubset, raise_faults, verify
from ....optim.sharded import ShardedOptimizer
from ....optim.tensor_subclasses import is_subclass
from ....optimizers.lamb import Lamb
from ....optimizers.lion import Lion
from ....precision.loss_scale import LossScaleSettings
from ....sharding.regroup import follow_requires_grad
from .reader import RESERVED_KEYS, DeepSpeedCheckpoint, deepspeed_files, read_deepspeed
from .writer import SCRIPT, DeepSpeedTarget, write_rank

# The states with elements of torch's and this library's classes: a file does not name the
# optimizer's class. Another library's class may have the same name and other states (bitsandbytes'
# AdamW).
STATES: dict[type[Optimizer], set[str]] = {
    torch.optim.Adam: {"exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"exp_avg", "exp_avg_sq"},
    Lamb: {"exp_avg", "exp_avg_sq"},
    Lion: {"exp_avg"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.SGD: {"momentum_buffer"},
}


class DeepSpeedLayout(EngineLayout):
    """The layout of DeepSpeed's own checkpoints, stages 0 to 3, as the core asks for it."""

    name = "deepspeed"
    title = "DeepSpeed's layout"

    def is_at(self, path: Path) -> bool:
        return bool(deepspeed_files(path))

    def files(self, path: Path) -> list[Path]:
        return deepspeed_files(path)

    def records(self, file: Path) -> list[FileRecord]:
        return torch_records(file)

    def manifest(self, path: Path) -> Manifest:
        found = read_deepspeed(path)
        found.manifest.plain = {"trainer": found.plain.get("trainer", {})}
        return found.manifest

    def checksum_coverage(self, path: Path) -> str:
        with suppress(CheckpointError):
            if read_deepspeed(path).manifest.run:
                return ""
        return (
            "torch's CRC-32 of each record is all these files have: one of another rank or save is "
            "not told apart"
        )

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        found = read_deepspeed(path)
        return OpenCheckpoint(path, found.manifest, found.plain, found)

    def unsupported_reason(self, contents: Contents) -> str:
        return unsupported_reason(contents)

    def save(self, directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
        return save_deepspeed(directory, tag, contents, settings)

    def load(self, directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
        return load_deepspeed(directory, tag, contents, settings)


DEEPSPEED = DeepSpeedLayout()


# -- loading


def load_deepspeed(directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
    """Fill weights, masters and moments from DeepSpeed's files in `directory/tag`, at any world
    size and stage. Collective.

    settings.verify: first compare the records of the files with the CRC-32s in them, the only
    checksums they have; each rank reads its part of the files.  CheckpointError on every rank, and
    an unchanged engine, where the files are damaged or do not fit.
    """
    runtime = contents.runtime
    folder = directory / tag
    opened: list[DeepSpeedCheckpoint] = []
    follow_requires_grad(runtime)
    piece = ModelPiece.of(runtime)
    trained = frozenset(
        piece.name(member) for group in runtime.trained_groups for member in group.members
    )
    names = names_of_all(runtime)
    comm = runtime.comm.whole

    def read_files() -> str:
        found = read_deepspeed(folder, trained)
        check(found.manifest, contents, replace(settings, moments=False), names)
        if settings.moments and contents.optimizer is not None:
            _check_states(found, contents.optimizer)
            split_as_saved(
                found.manifest, lambda name: found.keys(MOMENT, name), contents.optimizer
            )
        opened.append(found)
        return ""

    def fill() -> str:
        restore_weights(found, contents)
        restore_buffers(found, found.manifest, contents)
        if settings.moments and contents.optimizer is not None:
            groups = _known(found.plain["groups"], contents.optimizer)
            restore_optimizer(found, found.manifest, groups, contents.optimizer)
        return ""

    def check_bytes() -> str:
        raise_faults(folder, verify(folder, FileSubset(comm.rank, comm.size)))
        return ""

    if settings.verify:
        run_and_gather(comm, f"loading {tag}: checksums", check_bytes)
    run_and_gather(comm, f"loading {tag}: DeepSpeed's files", read_files)
    found = opened[0]
    replace_states(contents, tag, fill)
    client = found.plain["client"]
    if found.manifest.world_size == comm.size:
        client = {**client, **found.clients.get(comm.rank, {})}
    return Loaded(folder, found.plain["trainer"], client)


def _check_states(found: DeepSpeedCheckpoint, optimizer: ShardedOptimizer) -> None:
    """Raise CheckpointError if the files' moments are another optimizer's."""
    fix = "load with load_optimizer_states=False, or use the optimizer that was saved."
    if found.moments_problem:
        raise CheckpointError(
            f"the moments in {found.folder} cannot be used: {found.moments_problem}.", fix=fix
        )
    mine = type(optimizer.inner)
    there = {
        key for (kind, _), states in found.segments.items() if kind == MOMENT for key in states
    }
    wanted = STATES.get(mine)
    if wanted is not None and there and there != wanted:
        raise CheckpointError(
            f"the checkpoint has the states {', '.join(sorted(there))}; "
            f"{mine.__name__} has {', '.join(sorted(wanted))}.",
            fix=fix,
        )
    groups = len(found.plain["groups"])
    if groups != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {groups} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}.",
            fix=fix,
        )


def _known(groups: list[dict[str, Any]], optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """Keep those of the saved hyper-parameters that the optimizer has too; DeepSpeed's kernels have
    more.
    """
    return [
        {key: value for key, value in saved.items() if key in mine}
        for saved, mine in zip(groups, optimizer.param_groups, strict=True)
    ]


# -- saving


def unsupported_reason(contents: Contents) -> str:
    """Say which of this rank's states DeepSpeed's layout has no place for; empty where it holds
    all.
    """
    mesh = contents.runtime.plan.mesh
    if mesh.tp > 1 or mesh.pp > 1:
        return (
            f"the mesh is {mesh}, and its layout is written without tp and pp (save slices, and "
            "convert them)"
        )
    taken = sorted(RESERVED_KEYS & dict(contents.client or {}).keys())
    if taken:
        return f"client_state has the key '{taken[0]}', which is DeepSpeed's own in its layout"
    if contents.trainer.get("owed") is not None:
        return "an update is owed (delayed_update_after), which DeepSpeed's layout has no place for"
    optimizer = contents.optimizer
    states = optimizer.inner.state if optimizer is not None else {}
    for shard in optimizer.shards() if optimizer is not None else ():
        for key, value in states.get(shard.param, {}).items():
            if is_subclass(value):
                return (
                    f"the optimizer's state '{key}' of '{shard.names[0]}' is a "
                    f"{type(value).__name__}"
                )
            if (
                isinstance(value, Tensor)
                and not is_scalar_state(value, shard.param)
                and value.shape != shard.param.shape
            ):
                return f"the optimizer's state '{key}' of '{shard.names[0]}' has a shape of its own"
    return ""


def save_deepspeed(directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
    """Write `directory/tag` in DeepSpeed's layout and return it.  Collective; needs room for two
    checkpoints.

    CheckpointError on every rank where one cannot write, or has a state that the layout has no
    place for; the checkpoint before stays.
    """
    comm = contents.runtime.comm.whole
    slices_folder = directory / ".slices.saving"
    run_and_gather(
        comm,
        "saving: what DeepSpeed's layout holds",
        lambda: _refuse(unsupported_reason(contents), directory / tag),
    )
    written: list[Path] = []
    output: StagedOutput | None = None
    try:
        folder = save(slices_folder, tag, contents, replace(settings, latest=False, wait=True))
        final = directory / folder.name
        written = [folder]
        opened = StagedOutput(final)
        output = opened
        _rewrite(folder, output, contents)
        run_and_gather(
            comm,
            "saving: the name",
            lambda: _finish(opened, slices_folder, settings) if comm.rank == 0 else "",
        )
    except CheckpointError:
        if comm.rank == 0:
            if output is not None:
                output.discard()
            _remove_written(written, slices_folder)
        raise
    return final


def _remove_written(written: list[Path], slices_folder: Path) -> None:
    """Remove the slices that were written, and their directory if no other job's are there."""
    for folder in written:
        with suppress(OSError):
            files.remove_folder(folder)
    with suppress(OSError):  # another job's may be there
        files.remove_empty_folder(slices_folder)


def _refuse(problem: str, final: Path) -> str:
    """Raise CheckpointError if `final` is something else than a checkpoint, or `problem` says what
    would be lost.
    """
    refuse_foreign_files(final)
    if problem:
        raise CheckpointError(
            f"{problem}.",
            "It would be lost.",
            'give the key another name, or set checkpoint.layout to "slices".',
        )
    return ""


def _rewrite(folder: Path, output: StagedOutput, contents: Contents) -> None:
    """Write DeepSpeed's files from the slices in `folder`, each rank its own.  Collective."""
    comm = contents.runtime.comm.whole
    scaler = contents.optimizer.scaler if contents.optimizer is not None else None
    scaling = scaler.settings if scaler is not None else LossScaleSettings()

    def write() -> str:
        with ExitStack() as stack:
            source = open_checkpoint(folder, None, stack, checks=False)  # written just now
            layout = replace(DeepSpeedTarget.of(source), scaling=scaling)
            if comm.rank in layout.files:
                with files.describing_errors(f"writing '{output.path}'"):
                    write_rank(source, output.path, layout, comm.rank)
        return ""

    run_and_gather(
        comm, "saving: DeepSpeed's folder", lambda: _open(output) if comm.rank == 0 else ""
    )
    run_and_gather(comm, "saving: DeepSpeed's files", write)


def _open(output: StagedOutput) -> str:
    output.open()
    return ""


def _finish(output: StagedOutput, slices_folder: Path, settings: SaveSettings) -> str:
    """Complete the folder, give it its name, and remove the slices it was made of.  Rank 0 alone
    calls it.
    """
    final = output.final
    with files.describing_errors(f"completing '{final}'"):
        output.finish()
        files.replace_text(final.parent / "zero_to_fp32.py", SCRIPT)
        publish(output.path, final, latest=settings.latest)
        output.unlock()
        remove_replaced(final)
        files.remove_folder(slices_folder)
    return ""
