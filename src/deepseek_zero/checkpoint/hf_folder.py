"""A folder of safetensors files as Hugging Face lays it out.

model.safetensors                                 where everything fits one file
model-00001-of-00003.safetensors ...              otherwise, and
model.safetensors.index.json                      which tensor is in which
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.errors import CheckpointError, brief
from . import files
from .boxes import ParamPart, read_part
from .safetensors_file import SafetensorsReader, TensorInfo

STEM = "model"
INDEX = "model.safetensors.index.json"
# What an export before this one may have left
EXPORT_PATTERNS = ("model.safetensors", "model-*-of-*.safetensors", INDEX)
MAX_SHARD_BYTES = 5_000_000_000


def plan_shards(infos: Sequence[TensorInfo], most: int) -> list[list[TensorInfo]]:
    """Cut tensors, in their order, into files of at most `most` bytes; a larger tensor gets a file
    of its own.

    CheckpointError where `most` is below 1.
    """
    if most < 1:
        raise CheckpointError(
            f"files of at most {most} bytes hold nothing.",
            fix="ask for max_shard_bytes of 1 or more.",
        )
    shards: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in infos:
        if shards[-1] and filled + info.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.nbytes
    return shards


def shard_names(count: int, stem: str = STEM, suffix: str = "safetensors") -> list[str]:
    """Return the names of `count` files, as transformers expects them."""
    if count == 1:
        return [f"{stem}.{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def write_index(path: Path, shards: Sequence[Sequence[TensorInfo]], names: Sequence[str]) -> None:
    """Write the JSON file that says which tensor is in which file."""
    total = sum(info.nbytes for shard in shards for info in shard)
    where = {info.name: name for shard, name in zip(shards, names, strict=True) for info in shard}
    text = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True
    )
    files.write_text(path, text + "\n")


def safetensors_files(path: Path) -> list[Path]:
    """Return the safetensors files that a path means: itself, those of its index, or its only one.

    CheckpointError where there is none, or the index cannot be understood or leads elsewhere.
    """
    if path.is_file():
        return [path]
    index = path / INDEX
    single = path / f"{STEM}.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        return [path / _checked_file_name(name, index) for name in _files_in_index(index)]
    raise CheckpointError(
        f"{path} holds no {single.name} and no {INDEX}.",
        "Weights are read from safetensors only, so that reading them never runs code.",
        "name a safetensors file or a folder of them; `save_pretrained` writes such a folder.",
    )


def _files_in_index(index: Path) -> list[str]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(where.values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is no index: {brief(error)}.", "", "download or export the weights again."
        ) from None


def _checked_file_name(name: Any, index: Path) -> str:
    """Return a file's name from an index.  CheckpointError unless it stays in the index's own
    folder.
    """
    if (
        not isinstance(name, str)
        or name != Path(name).name
        or name in ("", ".", "..")
        or "\0" in name
    ):
        raise CheckpointError(
            f"{index} names the file {name!r:.80}, which is not in its folder.",
            "An index that leads elsewhere would have other files read than those you named.",
            "get the weights from where you trust them, or mend the index by hand.",
        )
    return name


class SafetensorsFolder:
    """Tensors by name over the safetensors files of a folder; nothing but headers is read before it
    is asked for.

    CheckpointError where a file is missing or damaged, or where two files have a tensor of the same
    name.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open the files until `stack` closes."""
        self._file_of: dict[str, SafetensorsReader] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.metadata: dict[str, str] = {}  # of all the files
        for file in safetensors_files(path):
            try:
                reader = stack.enter_context(SafetensorsReader(file))
            except (OSError, CheckpointError) as error:
                raise CheckpointError(
                    f"{file} cannot be read: "
                    f"{error.what if isinstance(error, CheckpointError) else brief(error)}.",
                    "It is missing, damaged or no safetensors file.",
                    "get it again.",
                ) from None
            self.metadata |= reader.header.metadata
            for name, location in reader.header.locations.items():
                if name in self._file_of:
                    raise CheckpointError(
                        f"'{name}' is in {file.name} and in another file of {path} too.",
                        "An export that was cut off may have left files of an older one.",
                        "get the weights again, into an empty folder.",
                    )
                self._file_of[name] = reader
                self.shapes[name] = location.shape

    def read(
        self, name: str, start: int, stop: int, part: ParamPart | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (position, flat values) parts of the elements [start, stop) of a tensor, or of a
        part of it: mapped and one, where the tensor is whole.
        """
        if part is not None:
            yield from read_part(part, start, stop, partial(self.read, name))
        else:
            yield start, self._file_of[name].mapped(name)[start:stop]

    def whole(self, name: str) -> Tensor:
        """Read a tensor in its own shape and dtype, into memory of its own."""
        return self._file_of[name].whole(name)
