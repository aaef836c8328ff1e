"""A folder of safetensors files as Hugging Face lays it out, and how it appears all at once.

    model.safetensors                                 where everything fits one file
    model-00001-of-00003.safetensors ...              otherwise, and
    model.safetensors.index.json                      which tensor is in which

Called by export.py (all ranks of an engine) and convert.py (one process).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import CheckpointError
from . import files
from .tensor_file import Entry, private

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
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text + "\n")


def hidden_beside(final: Path) -> Path:
    """Where something is made that will be called `final`."""
    return final.with_name(f".{final.name}.saving")


def open_hidden(final: Path) -> None:
    """Make the folder in which a folder is made."""
    hidden = hidden_beside(final)
    if final.exists() and not final.is_dir():
        raise CheckpointError(
            f"{final} is a file.", "An export is a folder.", "name a folder, or a file that ends in .pth."
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    if hidden.exists():  # an export that never finished
        shutil.rmtree(hidden)
    hidden.mkdir(mode=0o700)


def put_in_place(final: Path) -> None:
    """Let a finished folder have its name; into a folder that exists its files move one by one, the index last.

    A folder that exists may hold what is not ours (a tokenizer), so it is not replaced; weights of an export before
    this one are removed, since a reader would take them first.
    """
    hidden = hidden_beside(final)
    made = sorted(path.name for path in hidden.iterdir())
    for name in made:
        os.chmod(hidden / name, 0o600)
        files.sync_file(hidden / name)
    files.sync_folder(hidden)
    if not final.exists():
        os.rename(hidden, final)
    else:
        old = {path.name for pattern in OURS for path in final.glob(pattern)}
        for name in sorted(old - set(made)):
            (final / name).unlink()
        for name in sorted(made, key=lambda each: each == INDEX):
            os.replace(hidden / name, final / name)
        hidden.rmdir()
    files.sync_folder(final.parent)
