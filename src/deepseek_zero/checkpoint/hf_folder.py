"""Read and plan folders of safetensors files in the layout of Hugging Face.

A folder has one of two forms:

    model.safetensors                            one file, if everything fits into it
    model-00001-of-00003.safetensors ...         several files, and
    model.safetensors.index.json                 an index that maps each tensor to its file
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from ..base.errors import CheckpointError, brief
from . import files
from .boxes import ParamPart, PlacedValues, assemble
from .format import WEIGHT, StateRange, StateReader
from .safetensors_file import RUN_KEY, SafetensorsReader, TensorInfo, TensorLocation

STEM = "model"
INDEX = "model.safetensors.index.json"
# File patterns that an earlier export may have written
EXPORT_PATTERNS = ("model.safetensors", "model-*-of-*.safetensors", INDEX)
MAX_SHARD_BYTES = 5_000_000_000


def plan_shards(
    infos: Sequence[TensorInfo], most: int, stem: str = STEM, suffix: str = "safetensors"
) -> dict[str, list[TensorInfo]]:
    """Assign tensors to files of limited size, in the given order.

    A tensor larger than `most` gets its own file. The files have the names that transformers
    expects, for example "model-00001-of-00002.safetensors".

    Args:
        infos: The tensors to write.
        most: Maximum size of one file in bytes.
        stem: First part of each file name.
        suffix: File name extension, without the dot.

    Returns:
        The tensors of each file by file name.

    Raises:
        CheckpointError: `most` is below 1.
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
    if len(shards) == 1:
        return {f"{stem}.{suffix}": shards[0]}
    of = f"of-{len(shards):05d}.{suffix}"
    return {f"{stem}-{number:05d}-{of}": shard for number, shard in enumerate(shards, start=1)}


def write_index(
    path: Path, shards: Mapping[str, Sequence[TensorInfo]], tied: Mapping[str, str] | None = None
) -> None:
    """Write the JSON index that maps each tensor to its file, if there are several files.

    Args:
        path: Path of the index.
        shards: The tensors of each file, as `plan_shards` returns them.
        tied: Other names of these tensors, each with the tensor's name in `shards`.
    """
    if len(shards) == 1:
        return
    total = sum(info.nbytes for shard in shards.values() for info in shard)
    where = {info.name: file for file, shard in shards.items() for info in shard}
    where |= {name: where[stored] for name, stored in (tied or {}).items()}
    text = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True
    )
    files.write_text(path, text + "\n")


def safetensors_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model at a path.

    The path may be a file, a folder with one file, or a folder with an index.

    Raises:
        CheckpointError: There is no such file, or the index is invalid or names a file outside its
            folder.
    """
    if path.is_file():
        return [path]
    index = path / INDEX
    single = path / f"{STEM}.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        return _files_in_index(index)
    raise CheckpointError(
        f"{path} holds no {single.name} and no {INDEX}.",
        "Weights are read from safetensors only, so that reading them never runs code.",
        "name a safetensors file or a folder of them; `save_pretrained` writes such a folder.",
    )


def _files_in_index(index: Path) -> list[Path]:
    """Return the files that an index names, which must be in its folder."""
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(where.values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is no index: {brief(error)}.", "", "download or export the weights again."
        ) from None
    for name in names:
        if (
            not isinstance(name, str)
            or name != Path(name).name
            or name in ("", "..")
            or "\0" in name
        ):
            raise CheckpointError(
                f"{index} names the file {name!r:.80}, which is not in its folder.",
                "An index that leads elsewhere would have other files read than those you named.",
                "get the weights from where you trust them, or mend the index by hand.",
            )
    return [index.with_name(name) for name in names]


class SafetensorsFolder(StateReader):
    """Read tensors by name from the safetensors files of a folder.

    Opening reads only the headers.

    Raises:
        CheckpointError: A file is missing or damaged, or two files contain a tensor of the same
            name.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Open the files; they are closed together with `stack`."""
        self.states: dict[tuple[str, str], dict[str, SafetensorsReader]] = {}
        self.locations: dict[str, TensorLocation] = {}
        self.runs = set[str | None]()  # identities of the exports that wrote the files
        for file in safetensors_files(path):
            try:
                reader = stack.enter_context(SafetensorsReader(file))
            except (OSError, CheckpointError) as error:
                reason = error.what if isinstance(error, CheckpointError) else brief(error)
                raise CheckpointError(
                    f"{file} cannot be read: {reason}.",
                    "It is missing, damaged or no safetensors file.",
                    "get it again.",
                ) from None
            self.runs.add(reader.header.metadata.get(RUN_KEY))
            for name, location in reader.header.locations.items():
                if name in self.locations:
                    raise CheckpointError(
                        f"'{name}' is in {file.name} and in another file of {path} too.",
                        "An export that was cut off may have left files of an older one.",
                        "get the weights again, into an empty folder.",
                    )
                self.states[WEIGHT, name] = {"": reader}
                self.locations[name] = location

    def read(self, wanted: StateRange) -> PlacedValues:
        """Yield the elements of a range of a weight; without a part, as one memory-mapped view."""
        whole = self.states[WEIGHT, wanted.name][""].mapped(wanted.name)
        if wanted.part is None:
            yield wanted.start, whole[wanted.start : wanted.stop]
        else:
            source = (ParamPart.whole(wanted.part.shape), 0, whole)
            yield from assemble(wanted.part, wanted.start, wanted.stop, [source])

    def of_rank(self, name: str, rank: int) -> Tensor:
        """Return a tensor, flat, which is the same for every rank.

        Args:
            name: Name of the tensor.
            rank: Ignored.

        Returns:
            A 1-D tensor with the dtype of the file.
        """
        return self.tensor(name).reshape(-1)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in its own shape and dtype, read into new memory."""
        return self.states[WEIGHT, name][""].whole(name)
