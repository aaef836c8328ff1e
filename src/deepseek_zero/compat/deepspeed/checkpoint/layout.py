"""Detect, verify, save and load checkpoints in DeepSpeed's layout.

To save, each rank first writes its own slices. It then reads the ranges that its DeepSpeed files
need, so no rank gathers more than its files hold. The slices are removed after the checkpoint is
published. Loading addresses states by name and flat range, at any world size and stage.
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
from ....base.nested import is_subclass
from ....checkpoint import files
from ....checkpoint.catalogue import remove_replaced
from ....checkpoint.contents import Contents, Loaded, LoadSettings, SaveSettings
from ....checkpoint.format import MOMENT, FileRecord
from ....checkpoint.layouts import EngineLayout, OpenCheckpoint
from ....checkpoint.load import (
    check,
    check_buffers,
    replace_states,
    restore_buffers,
    restore_optimizer,
    restore_weights,
    split_as_saved,
)
from ....checkpoint.lockstep import run_and_gather, run_on_all, run_on_first_rank
from ....checkpoint.piece import ModelPiece, names_of_all
from ....checkpoint.read import open_checkpoint
from ....checkpoint.save import publish, refuse_foreign_files, save
from ....checkpoint.staging import StagedOutput
from ....checkpoint.state import is_scalar_state
from ....checkpoint.torch_file import torch_records
from ....checkpoint.verify import FileSubset, raise_faults, verify
from ....extensions.model_changes import follow_requires_grad
from ....optim.sharded import ShardedOptimizer
from ....optimizers.lamb import Lamb
from ....optimizers.lion import Lion
from ....precision.loss_scale import LossScaleSettings
from .reader import RESERVED_KEYS, DeepSpeedCheckpoint, deepspeed_files, read_deepspeed
from .writer import SCRIPT, SCRIPT_NAME, DeepSpeedTarget, write_rank

# Per-element states of the optimizers of torch and this library. A file does not name the optimizer
# class. The exact class is the key because another library's class may have the same name and other
# states (bitsandbytes' AdamW).
STATES: dict[type[Optimizer], set[str]] = {
    torch.optim.Adam: {"exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"exp_avg", "exp_avg_sq"},
    Lamb: {"exp_avg", "exp_avg_sq"},
    Lion: {"exp_avg"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.SGD: {"momentum_buffer"},
}


class DeepSpeedLayout(EngineLayout):
    """Layout that reads and writes DeepSpeed's checkpoints of ZeRO stages 0 to 3."""

    name = "deepspeed"
    title = "DeepSpeed's layout"
    patterns = ("*model_states.pt", "*optim_states.pt", "zero")

    def is_at(self, path: Path) -> bool:
        return bool(deepspeed_files(path))

    def files(self, path: Path) -> list[Path]:
        return deepspeed_files(path)

    def records(self, file: Path) -> list[FileRecord]:
        return torch_records(file)

    def checksum_coverage(self, path: Path) -> str:
        with suppress(CheckpointError):
            if read_deepspeed(path).manifest.run:
                return ""
        return (
            "these files have only torch's CRC-32 of each record: a file of another rank or save "
            "is not detected"
        )

    def open_at(self, path: Path, stack: ExitStack) -> OpenCheckpoint:
        """Open a checkpoint for reading by name and range.

        Args:
            path: Folder of the checkpoint.
            stack: Exit stack that closes the files when it is left.

        Returns:
            The open checkpoint, which reads ranges of states by name.
        """
        found = read_deepspeed(path)
        return OpenCheckpoint(path, found.manifest, found.plain, found)

    def unsupported_reason(self, contents: Contents) -> str:
        mesh = contents.runtime.plan.mesh
        if mesh.tp > 1 or mesh.pp > 1:
            return (
                f"the mesh is {mesh}, and its layout is written without tp and pp (save slices, "
                "and convert them)"
            )
        taken = sorted(RESERVED_KEYS & dict(contents.client or {}).keys())
        if taken:
            return f"client_state has the key '{taken[0]}', which is DeepSpeed's own in its layout"
        if contents.trainer.get("owed") is not None:
            return "an update is owed (delayed_update_after), which DeepSpeed's layout cannot store"
        if stateful := sorted(contents.trainer.get("extra_state", ())):
            return f"the module '{stateful[0]}' has an extra state, which this layout cannot store"
        if lifted := [unit.name for unit in contents.runtime.units if unit.is_promoted]:
            return f"the unit '{lifted[0]}' computes in fp32 (auto), which this layout cannot store"
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
                    return (
                        f"the optimizer's state '{key}' of '{shard.names[0]}' does not have the "
                        "parameter's shape"
                    )
        return ""

    def save(self, directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
        """Write `directory/tag` in DeepSpeed's layout.

        It needs disk space for two checkpoints. If it raises, the previous checkpoint is kept.

        Args:
            directory: Directory of the checkpoints.
            tag: Name of the new checkpoint.
            contents: The engine's states to write.
            settings: How to save, such as whether to return before the files are complete.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: A rank cannot write, or has a state that the layout cannot hold. Every
                rank raises it.

        Note:
            Collective: every rank must call it.
        """
        comm = contents.runtime.comm.whole
        slices_folder = directory / ".slices.saving"
        run_and_gather(
            comm,
            "saving: what DeepSpeed's layout holds",
            lambda: _refuse(self.unsupported_reason(contents), directory / tag),
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
            run_on_first_rank(
                comm, "saving: the name", lambda: _finish(opened, slices_folder, settings)
            )
        except BaseException:  # also Ctrl-C: the lock would refuse the next save of this process
            if comm.rank == 0:
                if output is not None:
                    output.discard()
                _remove_written(written, slices_folder)
            raise
        return final

    def load(self, directory: Path, tag: str, contents: Contents, settings: LoadSettings) -> Loaded:
        """Load weights, main weights and moments from DeepSpeed's files.

        The world size and stage may differ from those of the save.

        If it raises, the engine is unchanged.

        Args:
            directory: Directory of the checkpoints.
            tag: Name of the checkpoint in `directory`.
            contents: The engine's states to fill.
            settings: What to load. With `verify`, each rank first checks a part of the files
                against their CRC-32 values, which are the only checksums they have.

        Returns:
            The path of the checkpoint, the counters and schedules of the run, and the
            `client_state`.

        Raises:
            CheckpointError: The files are damaged or do not fit. Every rank raises it.

        Note:
            Collective: every rank must call it.
        """
        runtime = contents.runtime
        optimizer = contents.optimizer if settings.moments else None
        folder = directory / tag
        follow_requires_grad(runtime)
        piece = ModelPiece.of(runtime)
        trained = frozenset(
            piece.name(member) for group in runtime.trained_groups for member in group.members
        )
        names = names_of_all(runtime)
        comm = runtime.comm.whole

        def read_files() -> DeepSpeedCheckpoint:
            found = read_deepspeed(folder, trained)
            check(found.manifest, contents, replace(settings, moments=False), names)
            check_buffers(found.manifest, contents, settings)
            if optimizer is not None:
                _check_states(found, optimizer)
                split_as_saved(found.manifest, found, optimizer)
            return found

        def fill() -> None:
            restore_weights(found, contents)
            restore_buffers(found, found.manifest, contents)
            if optimizer is not None:
                groups = _known(found.plain["groups"], optimizer)
                restore_optimizer(found, found.manifest, groups, optimizer)

        def check_bytes() -> None:
            raise_faults(folder, verify(folder, FileSubset(comm.rank, comm.size)))

        if settings.verify:
            run_and_gather(comm, f"loading {tag}: checksums", check_bytes)
        found = run_on_all(comm, f"loading {tag}: DeepSpeed's files", read_files)
        replace_states(contents, tag, fill)
        client = found.plain["client"]
        if found.manifest.world_size == comm.size:
            client = {**client, **found.clients.get(comm.rank, {})}
        return Loaded(folder, found.plain["trainer"], client)


DEEPSPEED = DeepSpeedLayout()


def _check_states(found: DeepSpeedCheckpoint, optimizer: ShardedOptimizer) -> None:
    """Raise CheckpointError if the files hold the states of another optimizer."""
    fix = "load with load_optimizer_states=False, or use the optimizer that was saved."
    if found.moments_problem:
        raise CheckpointError(
            f"the moments in {found.folder} cannot be used: {found.moments_problem}.", fix=fix
        )
    mine = type(optimizer.inner)
    there = {key for (kind, _), states in found.states.items() if kind == MOMENT for key in states}
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
    """Drop the saved hyper-parameters that the optimizer does not have.

    DeepSpeed's optimizer kernels have more hyper-parameters.
    """
    return [
        {key: value for key, value in saved.items() if key in mine}
        for saved, mine in zip(groups, optimizer.param_groups, strict=True)
    ]


def _remove_written(written: list[Path], slices_folder: Path) -> None:
    """Remove the written slices, and their directory if it is empty."""
    for folder in written:
        with suppress(OSError):
            files.remove_folder(folder)
    # Another job's slices may be there.
    with suppress(OSError):
        files.remove_empty_folder(slices_folder)


def _refuse(problem: str, final: Path) -> None:
    """Raise CheckpointError if there is a problem or `final` is no checkpoint."""
    refuse_foreign_files(final)
    if problem:
        raise CheckpointError(
            f"{problem}.",
            "It would be lost.",
            'give the key another name, or set checkpoint.layout to "slices".',
        )


def _rewrite(folder: Path, output: StagedOutput, contents: Contents) -> None:
    """Write this rank's DeepSpeed files from the slices in `folder`.

    Note:
        Collective: every rank must call it.
    """
    comm = contents.runtime.comm.whole
    scaler = contents.optimizer.scaler if contents.optimizer is not None else None
    scaling = scaler.settings if scaler is not None else LossScaleSettings()

    def write() -> None:
        with ExitStack() as stack:
            source = open_checkpoint(folder, None, stack, checks=False)  # written above
            layout = replace(DeepSpeedTarget.of(source), scaling=scaling)
            if comm.rank in layout.files:
                with files.describing_errors(f"writing '{output.path}'"):
                    write_rank(source, output.path, layout, comm.rank)

    run_on_first_rank(comm, "saving: DeepSpeed's folder", output.open)
    run_and_gather(comm, "saving: DeepSpeed's files", write)


def _finish(output: StagedOutput, slices_folder: Path, settings: SaveSettings) -> None:
    """Complete and publish the folder, and remove its slices. Called on rank 0 only."""
    final = output.final
    with files.describing_errors(f"completing '{final}'"):
        output.finish()
        files.replace_text(final.parent / SCRIPT_NAME, SCRIPT)
        publish(output.path, final, latest=settings.latest)
        output.unlock()
        remove_replaced(final)
        files.remove_folder(slices_folder)
