"""Saves an engine in DeepSpeed's layout: our own slices first, then each rank turns them into its DeepSpeed files.

The slices are read back by range, so no rank gathers anything but what its own files hold.  They are removed when the
checkpoint has its name.  Called by engine/saving.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..precision.loss_scale import LossScaleSettings
from . import files
from .catalogue import remove_replaced
from .deepspeed_write import SCRIPT, Layout, write_rank
from .manifest import together
from .save import SaveSettings, publish, save
from .shards import hidden_beside, open_hidden
from .source import open_source
from .state import Contents


def save_deepspeed(directory: Path, tag: str, contents: Contents, settings: SaveSettings) -> Path:
    """Write `directory/tag` in DeepSpeed's layout and return it.  Collective; needs room for two checkpoints."""
    comm, slices = contents.runtime.comm, directory / ".slices.saving"
    folder = save(slices, tag, contents, replace(settings, latest=False, wait=True))
    final = directory / folder.name
    scaler = contents.optimizer.scaler if contents.optimizer is not None else None
    scaling = scaler.settings if scaler is not None else LossScaleSettings()

    def write() -> str:
        with ExitStack() as stack:
            source = open_source(folder, None, stack)
            layout = replace(Layout.of(source), scaling=scaling)
            if comm.rank in layout.files:
                write_rank(source, hidden_beside(final), layout, comm.rank)
        return ""

    together(comm, "saving: DeepSpeed's folder", lambda: _open(final) if comm.rank == 0 else "")
    together(comm, "saving: DeepSpeed's files", write)
    together(comm, "saving: the name", lambda: _finish(final, slices, settings) if comm.rank == 0 else "")
    return final


def _open(final: Path) -> str:
    open_hidden(final)
    return ""


def _finish(final: Path, slices: Path, settings: SaveSettings) -> str:
    hidden = hidden_beside(final)
    with files.saying(f"completing '{final}'"):
        files.sync_folder(hidden)
        files.replace_text(final.parent / "zero_to_fp32.py", SCRIPT)
        publish(hidden, final, latest=settings.latest)
        remove_replaced(final)
        files.remove_folder(slices)
    return ""
