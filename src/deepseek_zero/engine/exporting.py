"""Export and import the whole weights of an engine.

The suffix of the path decides the kind of file. Files that Hugging Face needs are added.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint
from ..base.given import path_of, whole_number
from ..checkpoint import files
from ..checkpoint.hf_folder import MAX_SHARD_BYTES
from ..checkpoint.piece import refuse_same_names
from ..checkpoint.safetensors_file import dtype_of
from ..sharding.runtime import Runtime


def export(
    runtime: Runtime,
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    exclude_frozen: bool = False,
) -> Path:
    """Write the whole weights for other programs.

    Args:
        runtime: The runtime of the model.
        path: A folder of safetensors as Hugging Face lays it out (with the model's config.json, if
            it has one), or one file that ends in .safetensors, .pth, .pt or .bin. The same on every
            rank.
        dtype: The dtype of floating-point tensors; None for the dtype in which they compute.
        max_shard_bytes: The most bytes of one file of a folder.
        exclude_frozen: Leave out frozen parameters.

    Note:
        Collective: every rank must call it.
    """
    refuse_same_names(runtime.model)
    target = path_of("export", "path", path)
    largest = whole_number("export", "max_shard_bytes", max_shard_bytes, 1)
    settings = checkpoint.ExportSettings(dtype_of(dtype), largest, exclude_frozen)
    if target.suffix in checkpoint.FILE_SUFFIXES:
        checkpoint.export_file(runtime, target, settings)
    else:
        checkpoint.export_safetensors(
            runtime, target, settings, partial(_write_config, runtime, settings)
        )
    return target


def _write_config(runtime: Runtime, settings: checkpoint.ExportSettings, folder: Path) -> None:
    """Write the files that `from_pretrained` needs next to the weights."""
    model = runtime.model
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
    path = folder / "config.json"
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        document["architectures"] = [type(model).__name__]
        dtypes = [group.weight.spec.dtype for group in runtime.groups]
        dtype = next(
            (settings.dtype_for(each) for each in dtypes if each.is_floating_point), torch.float32
        )
        document["dtype"] = str(dtype).removeprefix("torch.")
        files.replace_text(path, json.dumps(document, indent=2, sort_keys=True) + "\n")
