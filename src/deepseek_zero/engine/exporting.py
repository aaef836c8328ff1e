"""Export and import the whole weights of an engine.

The suffix of the path decides the kind of file. Files that Hugging Face needs are added.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import checkpoint
from ..base.given import path_of, whole_number
from ..checkpoint import files
from ..checkpoint.hf_folder import MAX_SHARD_BYTES
from ..checkpoint.piece import refuse_same_names
from ..checkpoint.safetensors_file import dtype_of
from ..sharding.runtime import Runtime


class HasRuntime(Protocol):
    """An object, such as an engine, that has the runtime of a sharded model."""

    @property
    def runtime(self) -> Runtime: ...


class Exports:
    """Methods that write and read the full weights of a sharded model."""

    def export(
        self: HasRuntime,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        exclude_frozen: bool = False,
    ) -> Path:
        """Write the full weights, either for `from_pretrained` or as one file.

        Args:
            path: A folder of safetensors, or a file with the suffix .safetensors, .pth, .pt or
                .bin.
            dtype: "fp32", "bf16" or a torch.dtype. By default the dtype that the weights compute
                in.
            max_shard_bytes: Largest size of one file in a folder, in bytes.
            exclude_frozen: Whether to omit parameters that no pipeline stage trains.

        Returns:
            `path` as a `Path`; all files are complete.

        Note:
            Collective: every rank must call it with the same path.
        """
        runtime = self.runtime
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

    def load_weights(self: HasRuntime, path: str | Path, strict: bool = True) -> None:
        """Load weights from safetensors; each rank reads only its shards.

        Args:
            path: A folder in the layout of Hugging Face, or one file.
            strict: Whether to raise an error if the names of parameters in the files and in the
                model differ.

        Note:
            Collective: every rank must call it.
        """
        folder = path_of("load_weights", "path", path)
        checkpoint.load_weights_into(self.runtime, folder, strict=strict)


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
