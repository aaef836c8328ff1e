"""A folder of safetensors files as Hugging Face lays it out.

model.safetensors                                 where everything fits one file
model-00001-of-00003.safetensors ...              otherwise, and
model.safetensors.index.json                      which tensor is in which
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, brief
from . import files
from .tensor_file import Entry

STEM, INDEX = "model", "model.safetensors.index.json"
OURS = ("model.safetensors", "model-*-of-*.safetensors", INDEX)  # what an export before this one may have left
MAX_SHARD_BYTES = 5_000_000_000


def plan_shards(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Entries in order, cut into files of at most so many bytes; a larger tensor has a file of its own."""
    if most < 1:
        raise CheckpointError(
            f"files of at most {most} bytes hold nothing.", fix="ask for max_shard_bytes of 1 or more."
        )
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def shard_names(count: int, stem: str = STEM, suffix: str = "safetensors") -> list[str]:
    """The files' names, as transformers expects them."""
    if count == 1:
        return [f"{stem}.{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def write_index(path: Path, shards: Sequence[Sequence[Entry]], names: Sequence[str]) -> None:
    """Say which tensor is in which file."""
    total = sum(entry.nbytes for shard in shards for entry in shard)
    where = {entry.name: name for shard, name in zip(shards, names, strict=True) for entry in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    files.write_text(path, text + "\n")


def files_of(path: Path) -> list[Path]:
    """The safetensors files that a path means: itself, those of its index, or its only one."""
    if path.is_file():
        return [path]
    index, single = path / INDEX, path / f"{STEM}.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        return [path / _inside(name, index) for name in _named(index)]
    raise CheckpointError(
        f"{path} holds no {single.name} and no {INDEX}.",
        "Weights are read from safetensors only, so that reading them never runs code.",
        "name a safetensors file or a folder of them; `save_pretrained` writes such a folder.",
    )


def _named(index: Path) -> list[str]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(where.values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is no index: {brief(error)}.", "", "download or export the weights again."
        ) from None


def _inside(name: Any, index: Path) -> str:
    """A file's name that stays in the index's own folder."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..") or "\0" in name:
        raise CheckpointError(
            f"{index} names the file {name!r:.80}, which is not in its folder.",
            "An index that leads elsewhere would have other files read than those you named.",
            "get the weights from where you trust them, or mend the index by hand.",
        )
    return name
