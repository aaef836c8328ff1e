"""Saves an engine in DeepSpeed's layout: our own slices first, then each rank turns them into its DeepSpeed files.

The slices are read back by range, so no rank gathers anything but what its own files hold.  They are removed when the
checkpoint has its name.  Called by engine/saving.py.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..base.errors import CheckpointError
from ..precision.loss_scale import LossScaleSettings
from . import files
from .catalogue import remove_replaced
from .deepspeed_read import RESERVED_KEYS
from .deepspeed_write import SCRIPT, DeepSpeedTarget, write_rank
from .format import run_and_gather
from .read import open_source
from .save import SaveSettings, publish, refuse_foreign_files, save
from .staging import StagedOutput
from .state import Contents, is_scalar_state


def unsupported_reason(contents: Contents) -> str:
    """What of this rank's states DeepSpeed's layout has no place for; empty where it holds all."""
    taken = sorted(RESERVED_KEYS & dict(contents.client or {}).keys())
    if taken:
        return f"client_state has the key '{taken[0]}', which is DeepSpeed's own in its layout"
    if contents.trainer.get("owed") is not None:
        return "an update is owed (delayed_update_after), which DeepSpeed's layout has no place for"
    optimizer = contents.optimizer
    states = optimizer.inner.state if optimizer is not None else {}
    for piece in optimizer.pieces() if optimizer is not None else ():
        for key, value in states.get(piece.param, {}).items():
            if (
                isinstance(value, Tensor)
                and not is_scalar_state(value, piece.param)
                and value.shape != piece.param.shape
            ):
                return f"the optimizer's state '{key}' of '{piece.names[0]}' has a shape of its own"
    return ""


def save_deepspeed(directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
    """Write `directory/tag` in DeepSpeed's layout and return it.  Collective; needs room for two checkpoints."""
    comm, slices = contents.runtime.comm, directory / ".slices.saving"
    run_and_gather(
        comm, "saving: what DeepSpeed's layout holds", lambda: _refuse(unsupported_reason(contents), directory / tag)
    )
    made: list[Path] = []
    draft: StagedOutput | None = None
    try:
        folder = save(slices, tag, contents, replace(settings, latest=False, wait=True))
        final = directory / folder.name
        made, opened = [folder], StagedOutput(final)
        draft = opened
        _rewrite(folder, draft, contents)
        run_and_gather(comm, "saving: the name", lambda: _finish(opened, slices, settings) if comm.rank == 0 else "")
    except CheckpointError:
        if comm.rank == 0:
            if draft is not None:
                draft.discard()
            _abandon(made, slices)
        raise
    return final


def _abandon(made: list[Path], slices: Path) -> None:
    """What was written takes room and is good for nothing."""
    for folder in made:
        with suppress(OSError):
            files.remove_folder(folder)
    with suppress(OSError):  # another job's may be there
        files.remove_empty_folder(slices)


def _refuse(problem: str, final: Path) -> str:
    refuse_foreign_files(final)
    if problem:
        raise CheckpointError(
            f"{problem}.", "It would be lost.", 'give the key another name, or set checkpoint.layout to "slices".'
        )
    return ""


def _rewrite(folder: Path, draft: StagedOutput, contents: Contents) -> None:
    """Make DeepSpeed's files of the slices in `folder`."""
    comm = contents.runtime.comm
    scaler = contents.optimizer.scaler if contents.optimizer is not None else None
    scaling = scaler.settings if scaler is not None else LossScaleSettings()

    def write() -> str:
        with ExitStack() as stack:
            source = open_source(folder, None, stack, checks=False)  # written just now
            layout = replace(DeepSpeedTarget.of(source), scaling=scaling)
            if comm.rank in layout.files:
                with files.describing_errors(f"writing '{draft.path}'"):
                    write_rank(source, draft.path, layout, comm.rank)
        return ""

    run_and_gather(comm, "saving: DeepSpeed's folder", lambda: _open(draft) if comm.rank == 0 else "")
    run_and_gather(comm, "saving: DeepSpeed's files", write)


def _open(draft: StagedOutput) -> str:
    draft.open()
    return ""


def _finish(draft: StagedOutput, slices: Path, settings: SaveSettings) -> str:
    final = draft.final
    with files.describing_errors(f"completing '{final}'"):
        draft.finish()
        files.replace_text(final.parent / "zero_to_fp32.py", SCRIPT)
        publish(draft.path, final, latest=settings.latest)
        draft.unlock()
        remove_replaced(final)
        files.remove_folder(slices)
    return ""
