"""Read files written by torch.save without executing code from them.

Such a file is an uncompressed zip archive: every record has a position and a CRC-32. Tensors are
memory-mapped, so a rank reads only the bytes that it copies.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..base.errors import CheckpointError, brief
from .boxes import ParamPart, PlacedValues, assemble
from .format import BUFFER, WEIGHT, FileRecord, Manifest, StateRange, StateReader
from .numpy_values import Plain
from .safetensors_file import dtype_name


def torch_records(path: Path) -> list[FileRecord]:
    """Return the records of a file written by torch.save, in directory order.

    Returns:
        The records; empty for the format before torch 1.6, which has no checksums.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"\x80\x02":  # the format before torch 1.6, a bare pickle
                return []
            with zipfile.ZipFile(file) as archive:
                return [_record(file, info) for info in archive.infolist()]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is missing.", fix="copy the whole folder, or load another tag."
        ) from None
    except (OSError, ValueError, RuntimeError, struct.error, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path.name} is no file of torch.save: {brief(error)}.",
            "It is damaged, or was cut short.",
            "bring it back from a copy, or load another tag.",
        ) from error


def _record(file: BinaryIO, info: zipfile.ZipInfo) -> FileRecord:
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise zipfile.BadZipFile(f"'{info.filename}' is compressed")
    file.seek(info.header_offset)
    head = file.read(30)
    name, extra = struct.unpack_from("<HH", head, 26)
    if head[:4] != b"PK\3\4" or file.read(name) != info.orig_filename.encode(
        "utf-8", "surrogateescape"
    ):
        raise zipfile.BadZipFile(f"'{info.filename}' is not where the directory says")
    start = info.header_offset + 30 + name + extra
    # torch.serialization.set_crc32_options(False) leaves zero.
    return FileRecord(info.filename, start, start + info.file_size, info.CRC or None)


def load_mapped(
    path: Path, stand_ins: Mapping[Any, str] | None = None, of_others: str = ""
) -> Plain:
    """Load a file written by torch.save with memory-mapped tensors.

    It calls `torch.load` with weights_only=True, so no code of the file is executed.

    Args:
        path: File that torch.save wrote.
        stand_ins: Maps a replacement class to the name of the class that it replaces in the file.
        of_others: Describes the replaced classes in the error message about another class.

    Returns:
        The dictionary in the file.

    Raises:
        CheckpointError: The file cannot be loaded.
    """
    try:
        with torch.serialization.safe_globals(list((stand_ins or {}).items())):
            found: Plain = torch.load(
                path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
            )
            return found
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing.",
            "Every rank writes its own files.",
            "copy the whole folder, or load another tag.",
        ) from None
    except Exception as error:  # a damaged pickle can raise any exception
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds a {refused[1]}" if refused else f"cannot be read: {brief(error)}"
        raise CheckpointError(
            f"{path} {what}.",
            f"Only tensors and plain values{of_others} are taken, so that a file cannot run code.",
            "save it again with a client_state of plain values, or load another tag.",
        ) from None


@dataclass(frozen=True)
class StorageSegment:
    """Flat elements of a state in a mapped file.

    Attributes:
        start: Position of the first element within the state.
        values: The mapped elements.
    """

    start: int
    values: Tensor


@dataclass
class MappedCheckpoint(StateReader):
    """States in mapped files, with a `Manifest` that describes them."""

    folder: Path
    manifest: Manifest
    plain: Plain = field(default_factory=dict)
    states: dict[tuple[str, str], dict[str, list[StorageSegment]]] = field(default_factory=dict)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, kind: str, name: str, key: str, start: int, values: Tensor) -> None:
        """Add elements of a state.

        Args:
            kind: Kind of state, for example "weight", "buffer" or "moment".
            name: Name of the parameter.
            key: The optimizer's name of the state.
            start: Position of the first element within the state.
            values: The elements, in any shape; they are flattened.
        """
        flat = values.detach().reshape(-1)
        if flat.numel():
            self.states.setdefault((kind, name), {}).setdefault(key, []).append(
                StorageSegment(start, flat)
            )

    def add_weights(self, state: Mapping[str, Any], leave_out: Collection[str] = ()) -> None:
        """Add the tensors of a state dict as weights.

        Tensors with the same memory are stored once, and the further names are recorded as tied.

        Args:
            state: The state dict; values that are not tensors are skipped.
            leave_out: Names to skip.
        """
        places: dict[Any, str] = {}
        for name, value in state.items():
            if name in leave_out or not isinstance(value, Tensor):
                continue
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape)
            same = places.setdefault(place, name) if value.numel() else name
            if same != name:
                self.manifest.extra["names"][name] = same
                continue
            self.manifest.parameters[name] = parameter_facts(
                value.shape, value.dtype, trained=False
            )
            self.add(WEIGHT, name, "", 0, value)

    def has(self, kind: str, name: str, key: str = "") -> bool:
        """Return whether the files contain any elements of a state.

        Args:
            kind: Kind of state, such as `WEIGHT` or `MOMENT`.
            name: Name of the parameter or buffer.
            key: The optimizer's name of the state; empty for other kinds.

        Returns:
            True if `read` can return at least one element of the state.
        """
        return name in self.buffers[0] if kind == BUFFER else super().has(kind, name, key)

    def read(self, wanted: StateRange) -> PlacedValues:
        """Yield the elements of a range, in order; without a part, they are mapped."""
        segments = self.states.get((wanted.kind, wanted.name), {}).get(wanted.key, [])
        reached = wanted.start
        if wanted.part is not None and segments:
            whole = ParamPart.whole(wanted.part.shape)
            sources = [(whole, each.start, each.values) for each in segments]
            missing = wanted.missing_from(self.folder, reached)
            yield from assemble(wanted.part, wanted.start, wanted.stop, sources, missing)
            return
        for segment in sorted(segments, key=lambda each: each.start):
            high = min(segment.start + segment.values.numel(), wanted.stop)
            if segment.start <= reached < high:
                yield reached, segment.values[reached - segment.start : high - segment.start]
                reached = high
        if reached < wanted.stop:
            raise wanted.missing_from(self.folder, reached)

    def of_rank(self, name: str, rank: int) -> Tensor:
        """Return the buffer that a rank saved, as a flat tensor.

        If that rank saved no buffers, rank 0's is returned.

        Args:
            name: Name of the buffer.
            rank: Rank that saved it.

        Returns:
            A 1-D tensor with the dtype in which the buffer was saved.
        """
        return self.buffers[rank if rank < len(self.buffers) else 0][name].reshape(-1)


def parameter_facts(shape: Sequence[int], dtype: torch.dtype, *, trained: bool) -> Plain:
    """Return the description of a parameter that a manifest stores.

    Args:
        shape: Shape of the whole parameter.
        dtype: Dtype of the parameter in the checkpoint.
        trained: Whether the optimizer updates the parameter.

    Returns:
        Plain values that can be stored as JSON.
    """
    return {"shape": list(shape), "dtype": dtype_name(dtype), "trained": trained}


def read_state_dict(path: Path) -> MappedCheckpoint:
    """Map the tensors of a file in which torch.save stored a state dict.

    Returns:
        The tensors of the state dict, as weights that are read on demand.

    Raises:
        CheckpointError: The file contains no state dict.
    """
    state = load_mapped(path)
    if not isinstance(state, Mapping) or not any(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise CheckpointError(
            f"{path} holds no state dict.", "It has no tensors by name.", "name a file of weights."
        )
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    manifest = Manifest(
        1,
        0,
        {},
        {},
        {},
        [],
        None,
        {},
        [],
        format="torch.save",
        version=1,
        extra={"names": {name: name for name in tensors}},
    )
    plain: Plain = {"groups": [], "trainer": {}, "client": {}}
    found = MappedCheckpoint(path, manifest, plain, buffers=[{}])
    found.add_weights(tensors)
    for facts in manifest.parameters.values():
        facts["trained"] = True
    return found
