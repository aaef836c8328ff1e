"""Whole weights of an engine, out and in: the words of both doors for checkpoint/export.py and
checkpoint/weights.py.

Knows by what suffix which kind of file is meant, and what Hugging Face wants beside the weights.
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
    """Write the whole weights for others to read.  Collective; every rank needs the same `path`.

    path: a folder of safetensors as Hugging Face lays it out (with the model's config.json, if it
    has one), or one file that ends in .safetensors, .pth, .pt or .bin.  dtype: of floating-point
    tensors; None: what they compute in.
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


def load_weights(runtime: Runtime, path: str | Path, strict: bool = True) -> None:
    """Take weights (and masters) from safetensors, each rank only what it will hold.
    Collective.
    """
    checkpoint.load_weights_into(runtime, path_of("load_weights", "path", path), strict=strict)


def _write_config(runtime: Runtime, settings: checkpoint.ExportSettings, folder: Path) -> None:
    """The files that `from_pretrained` wants beside the weights, of a model that has Hugging Face's
    configuration.
    """
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
