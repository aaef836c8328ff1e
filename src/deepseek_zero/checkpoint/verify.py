"""Verify that a checkpoint is complete and unchanged since it was saved.

`check_headers` reads the manifest and the headers of the files. `verify` also compares every byte
with its checksum, a few MiB at a time. Both return the faults that they find and work for every
registered layout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import CheckpointError
from .boxes import ParamPart, first_gap
from .format import MANIFEST, MOMENT, WEIGHT, FileRecord, Manifest, SavedChunk
from .layouts import ForeignLayout, layout_of
from .readahead import ByteRange, ReadPart, read_ahead
from .safetensors_file import SafetensorsHeader, TensorLocation, read_header

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Fault:
    """A fault of a checkpoint.

    Attributes:
        file: Name of the file.
        problem: Description of the fault.
        tensor: The affected parameter or buffer; empty if the fault concerns the file itself.
    """

    file: str
    problem: str
    tensor: str = ""

    def __str__(self) -> str:
        return (
            f"{self.file}, '{self.tensor}': {self.problem}"
            if self.tensor
            else f"{self.file} {self.problem}"
        )


@dataclass(frozen=True)
class FileSubset:
    """Every `of`-th file, starting at file number `rank`.

    It divides the files of a checkpoint among several readers.
    """

    rank: int = 0
    of: int = 1


ALL_FILES = FileSubset()
NO_FILES = FileSubset(rank=1 << 30, of=1 << 31)  # matches no file


def check_headers(
    folder: Path, subset: FileSubset = ALL_FILES
) -> tuple[Manifest | None, list[Fault]]:
    """Check the manifest and the headers of a subset of the files.

    Args:
        folder: The checkpoint.
        subset: The files to check.

    Returns:
        The manifest, or None if it cannot be read, and all faults found.
    """
    layout = layout_of(folder)
    if isinstance(layout, ForeignLayout):
        return _check_foreign(folder, layout)
    manifest = _manifest_or_fault(folder)
    if isinstance(manifest, Fault):
        return None, [manifest]
    faults = list(_missing_elements(manifest)) if subset.rank == 0 else []
    for file, chunks in _files(folder, manifest, subset):
        faults += _check_header(folder / file, chunks, manifest)[1]
    return manifest, faults


def verify(
    folder: Path,
    subset: FileSubset = ALL_FILES,
    on_bytes: OnBytes | None = None,
    *,
    read_again: bool = False,
    except_kind: str = "",
) -> list[Fault]:
    """Read every byte of a subset of a checkpoint's files and return all faults.

    Args:
        folder: The checkpoint.
        subset: The files to read.
        on_bytes: Called with the number of bytes that were just read.
        read_again: The files will be read again soon, so the page cache may keep them.
        except_kind: Kind of chunk that is skipped, because the caller verifies it while reading.
    """
    layout = layout_of(folder)
    if isinstance(layout, ForeignLayout):
        faults = _check_foreign(folder, layout)[1] if subset.rank == 0 else []
        paths = layout.files(folder)[subset.rank :: subset.of]
        return faults + [
            fault for path in paths for fault in _check_records(path, layout, on_bytes or _ignore)
        ]
    manifest = _manifest_or_fault(folder)
    if isinstance(manifest, Fault):
        return [manifest]
    faults = list(_missing_elements(manifest)) if subset.rank == 0 else []
    for file, chunks in _files(folder, manifest, subset):
        header, found = _check_header(folder / file, chunks, manifest)
        faults += found
        if header is not None:
            later = {chunk.tensor_name for chunk in chunks if chunk.kind == except_kind}
            locations = {
                entry: location
                for entry, location in header.locations.items()
                if entry not in later
            }
            faults += _check_tensors(
                folder / file, locations, chunks, on_bytes or _ignore, read_again=read_again
            )
    return faults


def _manifest_or_fault(folder: Path) -> Manifest | Fault:
    if not (folder / MANIFEST).exists():
        return Fault(MANIFEST, "is missing")
    try:
        return Manifest.read(folder / MANIFEST)
    except CheckpointError as error:
        return Fault(MANIFEST, f"cannot be used: {error.what}")


def _check_foreign(path: Path, layout: ForeignLayout) -> tuple[Manifest | None, list[Fault]]:
    try:
        found = layout.manifest(path)
    except CheckpointError as error:
        return None, [Fault(path.name, f"cannot be used: {error.what}")]
    return found, []


def checksum_coverage(path: Path) -> str:
    """Explain what `verify` covers if not every chunk of a checkpoint has a checksum.

    Returns:
        The explanation; empty if every chunk has a checksum.
    """
    layout = layout_of(path)
    return layout.checksum_coverage(path) if isinstance(layout, ForeignLayout) else ""


def _check_records(path: Path, layout: ForeignLayout, on_bytes: OnBytes) -> Iterator[Fault]:
    """Compare every record of a file with its CRC-32, if it has one."""
    try:
        records = sorted(layout.records(path), key=lambda each: each.start)
    except CheckpointError as error:
        yield Fault(path.name, error.what.removeprefix(f"{path.name} "))
        return
    with open(path, "rb", buffering=0) as file:
        ranges = {ByteRange(file.fileno(), each.start, each.stop): each for each in records}
        sums: dict[FileRecord, int | OSError] = dict.fromkeys(records, 0)
        label = "checking the checkpoint" if on_bytes is _ignore else ""
        for part in read_ahead(ranges, label):
            sums[ranges[part.range]] = _checksum(part, sums[ranges[part.range]])
            on_bytes(part.stop - part.start)
    for record, found in sums.items():
        if isinstance(found, OSError):
            yield Fault(path.name, f"cannot be read: {found.strerror or found}", record.name)
        elif record.crc is not None and found != record.crc:
            problem = f"differs from what was saved (checksum {found:08x}, saved {record.crc:08x})"
            yield Fault(path.name, problem, record.name)


def num_without_checksum(manifest: Manifest) -> int:
    """Count the chunks without a checksum; older versions of the library saved them."""
    return sum(chunk.crc is None for chunk in manifest.chunks)


def _ignore(count: int) -> None:
    pass


def _files(
    folder: Path, manifest: Manifest, subset: FileSubset
) -> Iterator[tuple[str, list[SavedChunk]]]:
    """Yield a subset's files with the chunks that they must contain.

    Other safetensors files of the folder are included, because they must be whole, too.
    """
    chunks: dict[str, list[SavedChunk]] = {path.name: [] for path in folder.glob("*.safetensors")}
    for chunk in manifest.chunks:
        chunks.setdefault(chunk.file, []).append(chunk)
    for number, file in enumerate(sorted(chunks)):
        if number % subset.of == subset.rank:
            yield file, chunks[file]


def _missing_elements(manifest: Manifest) -> Iterator[Fault]:
    """Yield a fault for missing elements and for wrong shapes in a manifest."""
    excluded = set(manifest.excluded)
    reached: dict[tuple[str, str, str], dict[ParamPart | None, int]] = {
        (WEIGHT, name, ""): {} for name in manifest.parameters if name not in excluded
    }
    for chunk in sorted(manifest.chunks, key=lambda each: each.start):
        if chunk.kind in (WEIGHT, MOMENT):
            ends = reached.setdefault((chunk.kind, chunk.name, chunk.key), {})
            if chunk.start <= ends.setdefault(chunk.part, 0):
                ends[chunk.part] = max(ends[chunk.part], chunk.stop)
    for (kind, name, key), ends in reached.items():
        shape = tuple(manifest.parameters[name]["shape"]) if name in manifest.parameters else (0,)
        what = f"the {kind} {key}".rstrip()
        for part, stop in (ends or {None: 0}).items():
            numel = math.prod(shape) if part is None else part.numel
            if stop != numel:
                of = "" if part is None else f" of its part {part}"
                yield Fault(MANIFEST, f"{what}{of} ends at element {stop:,} of {numel:,}", name)
        parts = [part for part in ends if part is not None]
        if any(part.shape != shape for part in parts):
            yield Fault(MANIFEST, f"{what} has parts of another shape than {list(shape)}", name)
        elif parts and None not in ends and (gap := first_gap(parts)) is not None:
            yield Fault(MANIFEST, f"{what} lacks index {gap} of dimension {parts[0].dim}", name)


def _check_header(
    path: Path, chunks: Sequence[SavedChunk], manifest: Manifest
) -> tuple[SafetensorsHeader | None, list[Fault]]:
    """Check the header of a file.

    Returns:
        The header, or None if it cannot be used, and the faults found.
    """
    try:
        header = read_header(path)
    except CheckpointError as error:
        return None, [Fault(path.name, error.what.removeprefix(f"{path.name} "))]
    own_run = manifest.run
    file_run = header.metadata.get("run")
    if own_run and file_run and own_run != file_run:
        return None, [
            Fault(path.name, f"is of another save: it has {file_run}, the manifest {own_run}")
        ]
    saved = manifest.extra.get("heads", {}).get(path.name)
    faults = []
    for chunk in chunks:
        location = header.locations.get(chunk.tensor_name)
        if location is None:
            faults.append(Fault(path.name, f"{_describe(chunk)} is not in the file", chunk.name))
        elif location.numel != chunk.stop - chunk.start:
            faults.append(
                Fault(
                    path.name,
                    f"{_describe(chunk)} has {location.numel:,} elements in the file",
                    chunk.name,
                )
            )
    # For example a changed dtype, which the checksums of the chunks do not cover
    if saved is not None and header.crc != saved:
        problem = (
            f"has another header than was written (checksum {header.crc:08x}, saved {saved:08x})"
        )
        return None, faults or [Fault(path.name, problem)]
    return header, faults


def _describe(chunk: SavedChunk) -> str:
    """Return a chunk's state and element range, to be used at the start of a sentence."""
    return f"{chunk.kind} {chunk.key}".rstrip() + f", elements {chunk.start:,} to {chunk.stop:,},"


def _check_tensors(
    path: Path,
    locations: Mapping[str, TensorLocation],
    chunks: Sequence[SavedChunk],
    on_bytes: OnBytes,
    *,
    read_again: bool,
) -> Iterator[Fault]:
    """Read these tensors in file order, and compare those that have a checksum."""
    known = {chunk.tensor_name: chunk for chunk in chunks}
    entries = sorted(locations.items(), key=lambda item: item[1].start)
    sums: dict[str, int | OSError] = dict.fromkeys(locations, 0)
    with open(path, "rb", buffering=0) as file:
        ranges = {
            ByteRange(file.fileno(), location.start, location.stop, read_again): entry
            for entry, location in entries
        }
        label = "checking the checkpoint" if on_bytes is _ignore else ""
        for part in read_ahead(ranges, label):
            sums[ranges[part.range]] = _checksum(part, sums[ranges[part.range]])
            on_bytes(part.stop - part.start)
    for entry, _ in entries:
        chunk = known.get(entry)
        found = sums[entry]
        if isinstance(found, OSError):
            name = chunk.name if chunk is not None else entry
            yield Fault(path.name, f"cannot be read: {found.strerror or found}", name)
        elif chunk is not None:
            yield from compare_checksum(chunk, found)


def compare_checksum(chunk: SavedChunk, found: int) -> Iterator[Fault]:
    """Yield a fault if a chunk's checksum differs from the saved one.

    Args:
        chunk: The chunk, with the saved checksum.
        found: CRC-32 of the bytes that were read.
    """
    if chunk.crc is not None and found != chunk.crc:
        problem = (
            f"{_describe(chunk)} differs from what was saved (checksum {found:08x}, saved "
            f"{chunk.crc:08x})"
        )
        yield Fault(chunk.file, problem, chunk.name)


def raise_faults(folder: Path, faults: Iterable[Fault]) -> None:
    """Raise an error that names the first few faults, if there are any.

    Args:
        folder: The checkpoint.
        faults: The faults found in it.

    Raises:
        CheckpointError: There is at least one fault.
    """
    descriptions = [str(fault) for fault in faults]
    if descriptions:
        raise CheckpointError(
            f"{folder} is damaged: {first_few(descriptions)}.",
            "Nothing of the run has changed.",
            'load another tag; "newest" takes the newest one of which every byte is right.',
        )


def first_few(names: Sequence[str]) -> str:
    """Join the first five names; further ones are only counted."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _checksum(part: ReadPart, before: int | OSError) -> int | OSError:
    """Continue a tensor's CRC-32 with this part, or return the error of a failed read."""
    if isinstance(before, OSError):
        return before
    try:
        return zlib.crc32(part.data.numpy().data, before)
    except OSError as error:
        return error
