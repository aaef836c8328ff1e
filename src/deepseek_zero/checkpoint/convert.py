"""Turns a checkpoint folder into files that other programs read, on one process and with little memory.

The checkpoint may be of any known layout (layouts.py); any number of ranks may have written it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ..base.errors import CheckpointError
from .deepspeed_write import DeepSpeedTarget, write_rank
from .export import save_torch
from .hf_folder import EXPORT_PATTERNS, INDEX, MAX_SHARD_BYTES, plan_shards, shard_names, write_index
from .layouts import layout_of
from .read import open_source, tensors_of
from .safetensors_file import SafetensorsWriter, dtype_of
from .staging import StagedOutput


@contextmanager
def _staged(out: Path) -> Iterator[StagedOutput]:
    """Nothing of it is left where the block fails."""
    draft = StagedOutput(out)
    draft.open()
    try:
        yield draft
    finally:
        draft.discard()  # nothing, once it is in place


def convert_to_safetensors(
    path: Path,
    out: Path,
    dtype: torch.dtype | str | None = None,
    *,
    tag: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    exclude_frozen: bool = False,
) -> list[str]:
    """Write a checkpoint's weights and buffers as a folder that `from_pretrained` loads; the files' names.

    dtype: of floating-point tensors; None: the most precise form that was saved.  Memory: one stretch of one tensor.
    """
    with ExitStack() as stack:
        tensors = tensors_of(open_source(path, tag, stack), dtype_of(dtype), exclude_frozen=exclude_frozen)
        shards = plan_shards([lazy.entry for lazy in tensors.values()], max_shard_bytes)
        names, run = shard_names(len(shards)), secrets.token_hex(8)
        draft = stack.enter_context(_staged(out))
        for name, entries in zip(names, shards, strict=True):
            with SafetensorsWriter(draft.path / name, entries, run) as file:
                for entry in entries:
                    for low, part in tensors[entry.name].parts():
                        file.write(entry.name, low, part)
        if len(names) > 1:
            write_index(draft.path / INDEX, shards, names)
        draft.publish_folder(EXPORT_PATTERNS, INDEX)
        return names


def convert_to_pth(
    path: Path,
    out: Path,
    dtype: torch.dtype | str | None = None,
    *,
    tag: str | None = None,
    exclude_frozen: bool = False,
) -> None:
    """Write a checkpoint's weights and buffers as one file for `torch.load`, tied weights under each name.

    Memory: the whole model in `dtype`, since torch.save wants everything at once.
    """
    with ExitStack() as stack:
        source = open_source(path, tag, stack)
        tensors = tensors_of(source, dtype_of(dtype), exclude_frozen=exclude_frozen)
        state = {name: lazy.contiguous() for name, lazy in tensors.items()}
        state |= {name: state[first] for name, first in source.tied.items() if first in state}
    with _staged(out) as draft:
        save_torch(state, draft.path / out.name)
        draft.publish_file()


def convert_to_deepspeed(
    path: Path, out: Path, *, tag: str | None = None, stage: int | None = None, ranks: int | None = None
) -> None:
    """Write a checkpoint in DeepSpeed's layout into the folder `out`.

    stage, ranks: those DeepSpeed will run with, which must match; left out: the checkpoint's own.  Memory: one rank's
    part of masters and moments, and at stages 0 to 2 all weights.
    """
    with ExitStack() as stack:
        source = open_source(path, tag, stack)
        found = layout_of(source.folder)
        if found is not None and not found.has_states:
            raise CheckpointError(
                f"{source.folder} holds weights alone.",
                "DeepSpeed's layout is of masters and moments, and DeepSpeed does not load it without them.",
                "convert the checkpoint that these weights are of, or load them with engine.load_weights and save.",
            )
        layout = DeepSpeedTarget.of(source, stage, ranks)
        draft = stack.enter_context(_staged(out))
        for rank in layout.files:
            write_rank(source, draft.path, layout, rank)
        draft.publish_folder()
