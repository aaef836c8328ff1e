"""A safetensors file read and written piece by piece, so that nobody need hold a whole tensor, let alone the file.

The header comes first, since names, shapes and dtypes are known before any value is; then each piece goes to its place.
Called by shard.py, shards.py, export.py and convert.py.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..precision.policy import cast_master
from . import files

# The format's names of what torch calls its dtypes.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
NAMED = {name: dtype for dtype, name in DTYPES.items()}
# The dtypes that a file may name in torch's words: a name from a file is looked up here, never in torch.
ALLOWED: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
        "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64 complex32".split()
    )
    if hasattr(torch, name)
}
# Of an export, in the metadata of its header: which export it is of; the CRC-32 of the header, with zeros in its own
# place; the CRC-32 of each tensor's bytes.  Readers that know nothing of them pass them over.
RUN, HEAD, SUMS = "deepseek_zero.run", "deepseek_zero.header", "deepseek_zero.crc32"
NO_SUM = "0" * 8
MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
SPOKEN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The head of a file that has these tensors one after another, padded so that they begin at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for entry in entries:
        ends = [place, place + entry.nbytes]
        header[entry.name] = {"dtype": _name(entry), "shape": list(entry.shape), "data_offsets": ends}
        place = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dtype_named(name: Any) -> torch.dtype:
    """The dtype that a file names in torch's words; a CheckpointError where it is none that a file may name."""
    found = ALLOWED.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{name!r:.80} is no dtype that a checkpoint may name.",
            "The file is damaged, or was written by a newer version.",
            "load another tag.",
        )
    return found


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie in its file."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself.  crc: CRC-32 of the header's own bytes, its length included."""

    places: dict[str, Place]
    metadata: dict[str, str]
    crc: int = 0

    @property
    def sums(self) -> dict[str, int]:
        """CRC-32 of the tensors' bytes, as far as the file has them; a ValueError where it has nonsense."""
        told = json.loads(self.metadata.get(SUMS, "{}"))
        return {name: int(text, 16) for name, text in told.items()}


def read_header(path: Path) -> Header:
    """The header of a safetensors file; a CheckpointError unless the file is there and exactly as long as it says."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            begin = 8 + size
            if length < 8 or begin > length or size > MOST_HEADER_BYTES:
                raise broken(path, f"ends inside its header, at {length:,} bytes: it was cut short or overwritten")
            text = file.read(size)
        document = json.loads(text)
        metadata = dict(document.pop("__metadata__", None) or {})
        places = {name: _place(begin, facts) for name, facts in document.items()}
        header = Header(places, metadata, zlib.crc32(size.to_bytes(8, "little") + text))
        _ = header.sums
    except FileNotFoundError:
        raise broken(path, "is missing") from None
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise broken(path, "has a header that cannot be understood: it was overwritten") from None
    own = metadata.get(HEAD)
    if own is not None and f"{zlib.crc32(_without_sum(size, text, own)):08x}" != own:
        raise broken(path, "has another header than was written: its checksum differs")
    reached = begin
    for place in sorted(places.values(), key=lambda each: (each.start, each.stop)):
        if place.start != reached or place.num_bytes != place.numel * place.dtype.itemsize:
            raise broken(path, "has a header whose tensors do not lie end to end: it was overwritten")
        reached = place.stop
    end = max((place.stop for place in places.values()), default=begin)
    if end != length:
        how = "it was cut short" if length < end else "something was added to it"
        raise broken(path, f"is {length:,} bytes long, its header says {end:,}: {how}")
    return header


def _without_sum(size: int, text: bytes, own: str) -> bytes:
    """A header's bytes as they were summed."""
    field = f'"{HEAD}": "{{}}"'
    return size.to_bytes(8, "little") + text.replace(field.format(own).encode(), field.format(NO_SUM).encode(), 1)


def _place(begin: int, facts: dict[str, Any]) -> Place:
    start, stop = facts["data_offsets"]
    shape = tuple(int(size) for size in facts["shape"])
    if min((int(start), *shape)) < 0:
        raise ValueError(f"{shape} from {start} on")
    return Place(begin + int(start), begin + int(stop), NAMED[facts["dtype"]], shape)


def broken(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path.name} {problem}", fix="use another checkpoint, or bring the file back from a copy.")


class TensorReader:
    """A safetensors file: its header, its descriptor for those who read ranges (ahead.py), and tensors that were never
    cut.  Errors are CheckpointErrors.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def whole(self, name: str) -> Tensor:
        """A tensor in its own shape."""
        place = self.header.places[name]
        values = torch.empty(place.numel, dtype=place.dtype)
        offset, left = place.start, values.view(torch.uint8).numpy().data
        while len(left):
            try:
                count = os.preadv(self.descriptor, [left], offset)
            except OSError as error:
                raise broken(self.path, f"cannot be read: {error.strerror or error}") from None
            if not count:
                raise broken(self.path, "was cut short while it was read")
            offset, left = offset + count, left[count:]
        return values.view(place.shape)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


class TensorFile:
    """A safetensors file under construction; on the disk when its block ends without an error.

    The header comes last, since it has the checksums of what was written.  Errors are CheckpointErrors.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], run: str = "") -> None:
        """run: the identity of the export that the file is of."""
        # Wide elements first: then each tensor starts at a multiple of its element's size, as a mapped view must.
        self._entries = sorted(entries, key=lambda each: -each.dtype.itemsize)
        self.path, self._run, self._places, place = path, run, dict[str, tuple[Entry, int]](), 0
        self._sums = dict.fromkeys((entry.name for entry in entries), 0)
        self._done = dict.fromkeys(self._sums, 0)
        self._start = len(self._head(NO_SUM))
        for entry in self._entries:
            self._places[entry.name] = (entry, self._start + place)
            place += entry.nbytes
        with self._saying():
            self._descriptor = files.create(path)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements from `start` on of a tensor, flat, in C order, from its first to its last; cast to what the file
        says.
        """
        entry, place = self._places[name]
        if start != self._done[name]:
            raise AssertionError(f"'{name}' is written at {start}, its next element is {self._done[name]}")
        if not values.numel():
            return
        flat = cast(values.detach().reshape(-1).to("cpu"), entry.dtype).contiguous()
        data = flat.view(torch.uint8).numpy().data
        with self._saying():
            files.write(self._descriptor, data, place + start * entry.dtype.itemsize)
        self._sums[name] = zlib.crc32(data, self._sums[name])
        self._done[name] += flat.numel()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(is_complete=kind is None)

    def close(self, *, is_complete: bool = True) -> None:
        """Have it on the disk, if it is to be used."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if is_complete:
                head = self._head(f"{zlib.crc32(self._head(NO_SUM)):08x}")
                with self._saying():
                    files.write(descriptor, memoryview(head), 0)
                    files.sync(descriptor)
        finally:
            os.close(descriptor)

    def _head(self, own: str) -> bytes:
        sums = json.dumps({name: f"{crc:08x}" for name, crc in self._sums.items()})
        return header_of(self._entries, {"format": "pt", RUN: self._run, HEAD: own, SUMS: sums})

    def _saying(self) -> AbstractContextManager[None]:
        return files.saying(f"writing '{self.path}'")


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Flat values in another dtype, by the house's one cast from fp32 to bf16."""
    if values.dtype == dtype:
        return values
    out = torch.empty(values.numel(), dtype=dtype, device=values.device)
    cast_master(values.contiguous(), out)
    return out


def dtype_of(asked: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by any of its names: torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"; None stays None."""
    if asked is None or isinstance(asked, torch.dtype):
        return asked
    found = SPOKEN.get(asked) or ALLOWED.get(asked.removeprefix("torch."))
    if found is None:
        raise CheckpointError(f"{asked!r:.80} is no dtype.", fix=f"use one of {', '.join(SPOKEN)}, or a torch.dtype.")
    return found


def _name(entry: Entry) -> str:
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"'{entry.name}' is {entry.dtype}, which the safetensors format has no name for.",
            fix="export to a .pth file, or keep it in another dtype.",
        )
    return DTYPES[entry.dtype]
