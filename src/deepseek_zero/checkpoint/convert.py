"""Convert a checkpoint to files that other programs read, in one process.

The checkpoint may have any known layout (layouts.py) and may have been written by any number of
ranks.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ..base.given import path_of
from .export import ShardFiles, save_torch
from .hf_folder import (
    EXPORT_PATTERNS,
    INDEX,
    MAX_SHARD_BYTES,
    plan_shards,
    write_index,
)
from .read import open_checkpoint, tensors_of
from .safetensors_file import dtype_of, run_of
from .staging import staged_output


def convert_to_safetensors(
    path: Path,
    out: Path,
    dtype: torch.dtype | str | None = None,
    *,
    tag: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    exclude_frozen: bool = False,
) -> list[str]:
    """Write a checkpoint's weights and buffers as a folder for `from_pretrained`.

    At most `READ_NUMEL` elements of a tensor are in memory at a time.

    Args:
        path: A checkpoint, or a directory of checkpoints.
        out: The folder to write; it is unchanged if an error occurs.
        dtype: Dtype of floating-point tensors; None keeps the most precise saved form.
        tag: The checkpoint in the directory; None selects the one named by `latest`.
        max_shard_bytes: Maximum size of one file in bytes.
        exclude_frozen: Whether to omit parameters that are not trained.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: The checkpoint is damaged, or the disk returned an error.
    """
    with ExitStack() as stack:
        tensors = tensors_of(
            open_checkpoint(path, tag, stack), dtype_of(dtype), exclude_frozen=exclude_frozen
        )
        shards = plan_shards([lazy.entry for lazy in tensors.values()], max_shard_bytes)
        output = stack.enter_context(staged_output(out))
        with ExitStack() as written:
            files = ShardFiles(output.path, shards, written)
            for name, lazy in tensors.items():
                for low, part in lazy.parts():
                    files.put(name, low, part)
            files.set_run(run_of(files.checksums()))
        write_index(output.path / INDEX, shards)
        output.publish_folder(EXPORT_PATTERNS, INDEX)
        return list(shards)


def state_dict_of(
    path: Path | str,
    dtype: torch.dtype | str | None = None,
    *,
    tag: str | None = None,
    exclude_frozen: bool = False,
) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint as a full state dict.

    Tied weights appear under each of their names.

    Args:
        path: A checkpoint, or a directory of checkpoints.
        dtype: Dtype of floating-point tensors, or its name, such as "bf16"; None keeps the most
            precise dtype that was saved.
        tag: Name of the checkpoint in the directory; None selects the one that the file `latest`
            names.
        exclude_frozen: Whether to omit parameters that are not trained.

    Returns:
        A dict from each name to the full tensor, in host memory.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged, or the name of the dtype is
            unknown.
        UsageError: `path` is neither a string nor a path.
    """
    path = path_of("state_dict_of", "path", path)
    with ExitStack() as stack:
        source = open_checkpoint(path, tag, stack)
        tensors = tensors_of(source, dtype_of(dtype), exclude_frozen=exclude_frozen)
        state = {name: lazy.contiguous() for name, lazy in tensors.items()}
        return state | {name: state[first] for name, first in source.tied.items() if first in state}


def convert_to_pth(
    path: Path,
    out: Path,
    dtype: torch.dtype | str | None = None,
    *,
    tag: str | None = None,
    exclude_frozen: bool = False,
) -> None:
    """Write a checkpoint's weights and buffers as one file for `torch.load`.

    Tied weights appear under each of their names. The whole model is in memory in `dtype`, because
    torch.save needs all tensors at the same time.

    Args:
        path: A checkpoint, or a directory of checkpoints.
        out: The file to write; it is unchanged if an error occurs.
        dtype: Dtype of floating-point tensors; None keeps the most precise saved form.
        tag: The checkpoint in the directory; None selects the one named by `latest`.
        exclude_frozen: Whether to omit parameters that are not trained.

    Raises:
        CheckpointError: The checkpoint is damaged, or the disk returned an error.
    """
    state = state_dict_of(path, dtype, tag=tag, exclude_frozen=exclude_frozen)
    with staged_output(out) as output:
        save_torch(state, output.path / out.name)
        output.publish_file()
