"""Verify that a checkpoint is complete and unchanged since it was saved.

`check_headers` reads the manifest and the headers of the files. `verify` also compares every byte
with its checksum, a few MiB at a time. Both return the faults that they find and work for every
registered layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ..base.errors import CheckpointError
from .boxes import ParamPart, first_gap
from .format import MANIFEST, MOMENT, WEIGHT, Manifest, SavedChunk
from .layouts import ForeignLayout, layout_of
from .readahead import ByteRange, read_ahead
from .safetensors_file import SafetensorsHeader, read_header

OnBytes = Callable[[int], None]
Place = TypeVar("Place")


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
        if self.tensor:
            return f"{self.file}, '{self.tensor}': {self.problem}"
        return f"{self.file} {self.problem}"


@dataclass(frozen=True)
class FileSubset:
    """Every `of`-th file, starting at file number `rank`.

    It divides the files of a checkpoint among several readers.
    """

    rank: int = 0
    of: int = 1


CheckTensors = Callable[[Path, SafetensorsHeader, Sequence[SavedChunk]], Iterable[Fault]]
ALL_FILES = FileSubset()
NO_FILES = FileSubset(rank=1 << 30, of=1 << 31)  # matches no file


def check_headers(
    folder: Path, subset: FileSubset = ALL_FILES, check_tensors: CheckTensors | None = None
) -> tuple[Manifest | None, list[Fault]]:
    """Check the manifest and the headers of a subset of the files.

    Args:
        folder: Folder of the checkpoint.
        subset: The files of the folder to check; other files are not opened.
        check_tensors: Checks the tensors of a file with a good header, if given.

    Returns:
        The manifest, or None if it cannot be read, and all faults found.
    """
    layout = layout_of(folder)
    if not isinstance(layout, ForeignLayout) and not (folder / MANIFEST).exists():
        return None, [Fault(MANIFEST, "is missing")]
    try:
        if isinstance(layout, ForeignLayout):
            return layout.manifest(folder), []
        manifest = Manifest.read(folder / MANIFEST)
    except CheckpointError as error:
        name = folder.name if isinstance(layout, ForeignLayout) else MANIFEST
        return None, [Fault(name, f"cannot be used: {error.what}")]
    faults = list(_missing_elements(manifest)) if subset.rank == 0 else []
    for file, chunks in _files(folder, manifest, subset):
        header, found = _check_header(folder / file, chunks, manifest)
        faults += found
        if header is not None and check_tensors is not None:
            faults += check_tensors(folder / file, header, chunks)
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
        folder: Folder of the checkpoint.
        subset: The files to read.
        on_bytes: Called with the number of bytes that were just read.
        read_again: Whether the files will be read again soon, so the page cache may keep them.
        except_kind: Kind of chunk that is skipped, because the caller verifies it while reading.

    Returns:
        The faults; an empty list if every byte has its checksum.
    """
    layout = layout_of(folder)
    if isinstance(layout, ForeignLayout):
        faults = check_headers(folder)[1] if subset.rank == 0 else []
        for path in layout.files(folder)[subset.rank :: subset.of]:
            faults += _check_records(path, layout, on_bytes)
        return faults

    def check_tensors(
        path: Path, header: SafetensorsHeader, chunks: Sequence[SavedChunk]
    ) -> Iterator[Fault]:
        """Yield the faults of a file's tensors; those of unknown tensors are read errors."""
        known = {chunk.tensor_name: chunk for chunk in chunks}
        places = {
            entry: (location.start, location.stop)
            for entry, location in header.locations.items()
            if entry not in known or known[entry].kind != except_kind
        }
        for entry, found in _checksums(path, places, on_bytes, read_again=read_again).items():
            if entry in known:
                yield from compare_checksum(known[entry], found)
            else:
                yield from _compare(Fault(path.name, "", entry), found, None)

    return check_headers(folder, subset, check_tensors)[1]


def checksum_coverage(path: Path) -> str:
    """Return what `verify` covers if not every chunk of a checkpoint has a checksum.

    Returns:
        The explanation; empty if every chunk has a checksum.
    """
    layout = layout_of(path)
    return layout.checksum_coverage(path) if isinstance(layout, ForeignLayout) else ""


def _check_records(path: Path, layout: ForeignLayout, on_bytes: OnBytes | None) -> Iterator[Fault]:
    """Compare every record of a file with its CRC-32, if it has one."""
    try:
        places = {each: (each.start, each.stop) for each in layout.records(path)}
    except CheckpointError as error:
        yield Fault(path.name, error.what.removeprefix(f"{path.name} "))
        return
    for record, found in _checksums(path, places, on_bytes).items():
        yield from _compare(Fault(path.name, "", record.name), found, record.crc)


def num_without_checksum(manifest: Manifest) -> int:
    """Return the number of chunks without a checksum, which older versions saved."""
    return sum(chunk.crc is None for chunk in manifest.chunks)


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
    # The end of the elements without a gap, by state and part
    reached: dict[tuple[str, str, str], dict[ParamPart | None, int]] = {
        (WEIGHT, name, ""): {} for name in manifest.parameters if name not in manifest.excluded
    }
    for chunk in sorted(manifest.chunks, key=lambda each: each.start):
        if chunk.kind in (WEIGHT, MOMENT):
            ends = reached.setdefault((chunk.kind, chunk.name, chunk.key), {})
            if chunk.start <= ends.setdefault(chunk.part, 0):
                ends[chunk.part] = max(ends[chunk.part], chunk.stop)
    for (kind, name, key), ends in reached.items():
        shape = tuple(manifest.parameters.get(name, {"shape": [0]})["shape"])
        what = f"the {kind} {key}".rstrip()
        problems = []
        for part, stop in (ends or {None: 0}).items():
            numel = (part or ParamPart.whole(shape)).numel
            if stop != numel:
                of = f" of its part {part}" if part is not None else ""
                problems.append(f"{of} ends at element {stop:,} of {numel:,}")
        parts = [part for part in ends if part is not None]
        if any(part.shape != shape for part in parts):
            problems.append(f" has parts of another shape than {list(shape)}")
        elif parts and None not in ends and (gap := first_gap(parts)) is not None:
            problems.append(f" lacks index {gap} of dimension {parts[0].dim}")
        for problem in problems:
            yield Fault(MANIFEST, what + problem, name)


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
        problem = f"is of another save: it has {file_run}, the manifest {own_run}"
        return None, [Fault(path.name, problem)]
    faults = []
    for chunk in chunks:
        location = header.locations.get(chunk.tensor_name)
        problem = ""
        if location is None:
            problem = "is not in the file"
        elif location.numel != chunk.stop - chunk.start:
            problem = f"has {location.numel:,} elements in the file"
        if problem:
            faults.append(Fault(path.name, f"{_describe(chunk)} {problem}", chunk.name))
    # For example a changed dtype, which the checksums of the chunks do not cover
    saved = manifest.extra.get("heads", {}).get(path.name)
    if saved is not None and header.crc != saved:
        checksums = f"(checksum {header.crc:08x}, saved {saved:08x})"
        problem = f"has another header than was written {checksums}"
        return None, faults or [Fault(path.name, problem)]
    return header, faults


def _describe(chunk: SavedChunk) -> str:
    """Return a chunk's state and element range, to be used at the start of a sentence."""
    return f"{chunk.kind} {chunk.key}".rstrip() + f", elements {chunk.start:,} to {chunk.stop:,},"


def compare_checksum(chunk: SavedChunk, found: int | OSError) -> Iterator[Fault]:
    """Yield a fault if a chunk's checksum differs from the saved one.

    Args:
        chunk: The chunk, with the saved checksum.
        found: CRC-32 of the bytes that were read, or the error of a failed read.
    """
    return _compare(Fault(chunk.file, f"{_describe(chunk)} ", chunk.name), found, chunk.crc)


def _compare(at: Fault, found: int | OSError, saved: int | None) -> Iterator[Fault]:
    """Yield a fault if bytes could not be read or differ from a saved checksum.

    `at` has the place, and the start of the description of a difference.
    """
    if isinstance(found, OSError):
        yield replace(at, problem=f"cannot be read: {found.strerror or found}")
    elif saved is not None and found != saved:
        checksums = f"(checksum {found:08x}, saved {saved:08x})"
        yield replace(at, problem=f"{at.problem}differs from what was saved {checksums}")


def raise_faults(folder: Path, faults: Iterable[Fault]) -> None:
    """Raise an error that names the first few faults, if there are any.

    Args:
        folder: Folder of the checkpoint.
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
    """Return the first five names as text; further ones are only counted."""
    text = ", ".join(names[:5])
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text


def _checksums(
    path: Path,
    places: Mapping[Place, tuple[int, int]],
    on_bytes: OnBytes | None,
    *,
    read_again: bool = False,
) -> dict[Place, int | OSError]:
    """Read byte ranges of a file in file order.

    Returns:
        The CRC-32 of each range, or the error of a failed read, in file order.
    """
    ordered = sorted(places.items(), key=lambda item: item[1])
    sums: dict[Place, int | OSError] = {place: 0 for place, _ in ordered}
    with open(path, "rb", buffering=0) as file:
        ranges = {}
        for place, (start, stop) in ordered:
            ranges[ByteRange(file.fileno(), start, stop, read_again)] = place
        label = "checking the checkpoint" if on_bytes is None else ""
        for part in read_ahead(ranges, label):
            place = ranges[part.range]
            before = sums[place]
            if not isinstance(before, OSError):
                try:
                    sums[place] = zlib.crc32(part.data.numpy().data, before)
                except OSError as error:
                    sums[place] = error
            if on_bytes is not None:
                on_bytes(part.stop - part.start)
    return sums
