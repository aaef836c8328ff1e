"""Read and write safetensors files piece by piece.

No process needs to hold a whole file or tensor.

    8 bytes     length of the header
    header      JSON: tensor name -> dtype, shape, offsets; "__metadata__": text by name
    data        the tensors without gaps, larger dtypes first, so that each is aligned

A rank's file of a checkpoint is written sequentially: the header (`encode_header`), then the
tensors (writebehind.py). `SafetensorsWriter` serves exports and conversions. It accepts ranges of
several tensors in any order and writes the header last, with a checksum of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..precision.policy import cast_master
from . import files
from .numpy_values import Plain

# The names that the format uses for torch dtypes.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
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
DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# The torch dtypes that a file may name. A name from a file is looked up here, never with getattr.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
        "float8_e5m2fnuz float8_e8m0fnu int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
        "complex128 complex64 complex32".split()
    )
}
# Metadata of an export: its identity; the CRC-32 of the header, computed with zeros in the place of
# the CRC itself; the CRC-32 of each tensor's bytes. Other readers ignore these keys.
RUN_KEY = "deepseek_zero.run"
HEADER_CRC_KEY = "deepseek_zero.header"
TENSOR_CRCS_KEY = "deepseek_zero.crc32"
NO_CRC = "0" * 8
NO_RUN = "0" * 16
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_ALIASES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in the file, in bytes."""
        return self.numel * self.dtype.itemsize


def encode_header(infos: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file as bytes, padded to a multiple of 8.

    Args:
        infos: The tensors, in file order.
        metadata: Text by name, which the header stores next to the tensors.

    Returns:
        The bytes at the start of the file, including the length of the header.

    Raises:
        CheckpointError: The format has no name for a dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for info in infos:
        ends = [offset, offset + info.nbytes]
        header[info.name] = {
            "dtype": _format_dtype(info),
            "shape": list(info.shape),
            "data_offsets": ends,
        }
        offset = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """Return the dtype for a torch name that was read from a file.

    Raises:
        CheckpointError: It is not the name of a permitted dtype.
    """
    found = TORCH_DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{name!r:.80} is no dtype that a checkpoint may name.",
            "The file is damaged, or was written by a newer version.",
            "load another tag.",
        )
    return found


@dataclass(frozen=True)
class TensorLocation:
    """Byte range, dtype and shape of a tensor in a safetensors file."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in the file, in bytes."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a safetensors file.

    Attributes:
        locations: The location of each tensor.
        metadata: Text by name.
        crc: CRC-32 of the header's bytes, including the length.
    """

    locations: dict[str, TensorLocation]
    metadata: dict[str, str]
    crc: int = 0

    @property
    def tensor_crcs(self) -> dict[str, int]:
        """Return the CRC-32 of each tensor that has one in the metadata.

        Raises:
            ValueError: The metadata cannot be parsed.
        """
        crcs = json.loads(self.metadata.get(TENSOR_CRCS_KEY, "{}"))
        return {name: int(text, 16) for name, text in crcs.items()}


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Returns:
        The location, dtype and shape of each tensor, and the metadata.

    Raises:
        CheckpointError: The file is missing, the header is invalid, or the length of the file does
            not match the header.
    """
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little")
            begin = 8 + size
            if length < 8 or begin > length or size > MAX_HEADER_BYTES:
                raise damaged_file(
                    path,
                    f"ends inside its header, at {length:,} bytes: it was cut short or overwritten",
                )
            text = file.read(size)
        document = json.loads(text)
        metadata = dict(document.pop("__metadata__", None) or {})
        places = {name: _location(begin, facts) for name, facts in document.items()}
        header = SafetensorsHeader(places, metadata, zlib.crc32(size.to_bytes(8, "little") + text))
        _ = header.tensor_crcs
    except FileNotFoundError:
        raise damaged_file(path, "is missing") from None
    except OSError as error:
        raise damaged_file(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise damaged_file(
            path, "has a header that cannot be understood: it was overwritten"
        ) from None
    own = metadata.get(HEADER_CRC_KEY)
    if own is not None and f"{zlib.crc32(_without_crc(size, text, own)):08x}" != own:
        raise damaged_file(path, "has another header than was written: its checksum differs")
    reached = begin
    for offset in sorted(places.values(), key=lambda each: (each.start, each.stop)):
        if offset.start != reached or offset.num_bytes != offset.numel * offset.dtype.itemsize:
            raise damaged_file(
                path, "has a header whose tensors are not contiguous: it was overwritten"
            )
        reached = offset.stop
    if reached != length:
        how = "it was cut short" if length < reached else "something was added to it"
        raise damaged_file(path, f"is {length:,} bytes long instead of {reached:,}: {how}")
    return header


def _without_crc(size: int, text: bytes, own: str) -> bytes:
    """Return a header's bytes with zeros in place of its own checksum."""
    field = f'"{HEADER_CRC_KEY}": "{{}}"'
    return size.to_bytes(8, "little") + text.replace(
        field.format(own).encode(), field.format(NO_CRC).encode(), 1
    )


def _location(begin: int, facts: Plain) -> TensorLocation:
    start, stop = facts["data_offsets"]
    shape = tuple(int(size) for size in facts["shape"])
    if min((int(start), *shape)) < 0:
        raise ValueError(f"{shape} from {start} on")
    return TensorLocation(
        begin + int(start), begin + int(stop), DTYPE_OF_NAME[facts["dtype"]], shape
    )


def damaged_file(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file that cannot be used.

    Args:
        path: File that cannot be used.
        problem: What is wrong, as the end of a sentence that starts with the file name.

    Returns:
        The error, which the caller raises.
    """
    return CheckpointError(
        f"{path.name} {problem}", fix="use another checkpoint, or bring the file back from a copy."
    )


class SafetensorsReader:
    """An open safetensors file.

    Opening reads only the header. Errors are of type `CheckpointError`.

    Attributes:
        path: Path of the file.
        header: Locations of the tensors, and metadata.
        descriptor: An open descriptor, for reading ahead.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._map: Tensor | None = None

    def whole(self, name: str) -> Tensor:
        """Return a tensor in its own shape and dtype, read into new memory."""
        location = self.header.locations[name]
        values = torch.empty(location.numel, dtype=location.dtype, device="cpu")
        offset = location.start
        left = values.view(torch.uint8).numpy().data
        while len(left):
            try:
                count = os.preadv(self.descriptor, [left], offset)
            except OSError as error:
                raise damaged_file(
                    self.path, f"cannot be read: {error.strerror or error}"
                ) from None
            if not count:
                raise damaged_file(self.path, "was cut short while it was read")
            offset = offset + count
            left = left[count:]
        return values.view(location.shape)

    def mapped(self, name: str) -> Tensor:
        """Return a memory-mapped tensor, flat.

        Only the pages that are accessed are read from the disk. A tensor that is not aligned to its
        element size is copied.
        """
        location = self.header.locations[name]
        if not location.numel:
            return torch.empty(0, dtype=location.dtype, device="cpu")
        if self._map is None:  # private, so a write does not reach the file
            self._map = torch.frombuffer(
                mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE), dtype=torch.uint8
            )
        data = self._map[location.start : location.stop]
        # Files of other programs need not be aligned
        is_aligned = location.start % location.dtype.itemsize == 0
        return (data if is_aligned else data.clone()).view(location.dtype)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


def run_of(checksums: Iterable[str]) -> str:
    """Return the identity of an export, a hash of its tensors' checksums."""
    return hashlib.sha256("\n".join(sorted(checksums)).encode()).hexdigest()[: len(NO_RUN)]


class SafetensorsWriter:
    """A safetensors file under construction.

    The file is complete and synced when the `with` block ends without an error. The header is
    written last, because it contains the tensors' checksums and the identity of the export. Set
    `run` before the block ends. Errors are of type `CheckpointError`.
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        # Larger elements first, so that each tensor starts at a multiple of its element size. A
        # mapped view requires this.
        self._tensors = sorted(infos, key=lambda each: -each.dtype.itemsize)
        self.path = path
        self.run = NO_RUN
        self._locations = dict[str, tuple[TensorInfo, int]]()
        offset = 0
        self._crcs = dict.fromkeys((info.name for info in infos), 0)
        self._start = len(self._header(NO_CRC))
        for info in self._tensors:
            self._locations[info.name] = (info, self._start + offset)
            offset += info.nbytes
        with self._describing_errors():
            self._descriptor = files.create(path)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor, cast to the dtype of the file.

        Each tensor must be written from its first element to its last. Different tensors may be
        interleaved.

        Args:
            name: Name of the tensor.
            start: Position of the first element.
            values: The elements, flattened in C order.
        """
        info, offset = self._locations[name]
        if not values.numel():
            return
        flat = cast(values.detach().reshape(-1).to("cpu"), info.dtype).contiguous()
        data = flat.view(torch.uint8).numpy().data
        with self._describing_errors():
            files.write(self._descriptor, data, offset + start * info.dtype.itemsize)
        self._crcs[name] = zlib.crc32(data, self._crcs[name])

    @property
    def checksums(self) -> list[str]:
        """Return a description of each tensor, with the checksum of the bytes so far."""
        return [
            f"{info.name} {info.dtype} {info.shape} {self._crcs[info.name]:08x}"
            for info in self._tensors
        ]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                head = self._header(f"{zlib.crc32(self._header(NO_CRC)):08x}")
                with self._describing_errors():
                    files.write(self._descriptor, memoryview(head), 0)
                    files.sync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _header(self, own: str) -> bytes:
        sums = json.dumps({name: f"{crc:08x}" for name, crc in self._crcs.items()})
        return encode_header(
            self._tensors,
            {"format": "pt", RUN_KEY: self.run, HEADER_CRC_KEY: own, TENSOR_CRCS_KEY: sums},
        )

    def _describing_errors(self) -> AbstractContextManager[None]:
        return files.describing_errors(f"writing '{self.path}'")


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast flat values to a dtype with the rounding of an optimizer update.

    Args:
        values: Flat tensor to cast.
        dtype: Dtype of the result.

    Returns:
        The cast values; the same tensor if the dtype does not change.
    """
    if values.dtype == dtype:
        return values
    out = torch.empty(values.numel(), dtype=dtype, device=values.device)
    cast_master(values.contiguous(), out)
    return out


def dtype_of(asked: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype by one of its names, such as "bfloat16" or "bf16".

    A dtype or None is returned unchanged.

    Raises:
        CheckpointError: The name is unknown, or the dtype is not a floating-point dtype.
    """
    if asked is None:
        return None
    found = asked if isinstance(asked, torch.dtype) else None
    if isinstance(asked, str):
        found = DTYPE_ALIASES.get(asked) or TORCH_DTYPES.get(asked.removeprefix("torch."))
    fix = f"use one of {', '.join(DTYPE_ALIASES)}, or a torch.dtype."
    if found is None:
        raise CheckpointError(f"{asked!r:.80} is no dtype.", fix=fix)
    if not found.is_floating_point:
        raise CheckpointError(
            f"{asked!r:.80} is no floating-point dtype.", "Weights would lose their fractions.", fix
        )
    return found


def _format_dtype(info: TensorInfo) -> str:
    if info.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"'{info.name}' is {info.dtype}, which the safetensors format has no name for.",
            fix="export to a .pth file, or keep it in another dtype.",
        )
    return DTYPE_NAMES[info.dtype]
