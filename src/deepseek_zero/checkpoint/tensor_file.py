"""A safetensors file read and written piece by piece, so that nobody need hold a whole tensor, let alone the file.

The header comes first, since names, shapes and dtypes are known before any value is; then each piece goes to its place.
Called by shard.py, shards.py, export.py and convert.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..precision.policy import cast_master

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
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
NAMED = {name: dtype for dtype, name in DTYPES.items()}
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


def private(path: str, flags: int) -> int:
    """An opener for `open`: what it creates is its owner's alone."""
    return os.open(path, flags, 0o600)


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
    """What a safetensors file says of itself."""

    places: dict[str, Place]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of a safetensors file; a CheckpointError unless the file is there and exactly as long as it says."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            begin = 8 + size
            if length < 8 or begin > length or size > MOST_HEADER_BYTES:
                raise broken(path, f"ends inside its header, at {length:,} bytes: it was cut short or overwritten")
            document = json.loads(file.read(size))
        metadata = dict(document.pop("__metadata__", None) or {})
        places = {name: _place(begin, facts) for name, facts in document.items()}
    except FileNotFoundError:
        raise broken(path, "is missing") from None
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise broken(path, "has a header that cannot be understood: it was overwritten") from None
    end = max((place.stop for place in places.values()), default=begin)
    if end != length:
        how = "it was cut short" if length < end else "something was added to it"
        raise broken(path, f"is {length:,} bytes long, its header says {end:,}: {how}")
    return Header(places, metadata)


def _place(begin: int, facts: dict[str, Any]) -> Place:
    start, stop = facts["data_offsets"]
    shape = tuple(int(size) for size in facts["shape"])
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
    """A safetensors file under construction; on the disk when its block ends without an error."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> None:
        # Wide elements first: then each tensor starts at a multiple of its element's size, as a mapped view must.
        ordered = sorted(entries, key=lambda each: -each.dtype.itemsize)
        head = header_of(ordered, metadata or {"format": "pt"})
        self._start, self._places, place = len(head), dict[str, tuple[Entry, int]](), 0
        for entry in ordered:
            self._places[entry.name] = (entry, place)
            place += entry.nbytes
        self._file = open(path, "wb", opener=private)  # noqa: SIM115 (closed by __exit__)
        self._file.write(head)
        self._file.truncate(self._start + place)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements from `start` on of a tensor, flat, in C order; cast to what the file says."""
        if not values.numel():
            return
        entry, place = self._places[name]
        self._file.seek(self._start + place + start * entry.dtype.itemsize)
        flat = cast(values.detach().reshape(-1).to("cpu"), entry.dtype).contiguous()
        self._file.write(flat.view(torch.uint8).numpy().data)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(is_complete=kind is None)

    def close(self, *, is_complete: bool = True) -> None:
        """Have it on the disk, if it is to be used."""
        try:
            if is_complete:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


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
    found = SPOKEN.get(asked) or getattr(torch, asked.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{asked!r} is no dtype.", fix=f"use one of {', '.join(SPOKEN)}, or a torch.dtype.")
    return found


def _name(entry: Entry) -> str:
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"'{entry.name}' is {entry.dtype}, which the safetensors format has no name for.",
            fix="export to a .pth file, or keep it in another dtype.",
        )
    return DTYPES[entry.dtype]
