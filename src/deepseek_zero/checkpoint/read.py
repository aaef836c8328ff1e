"""Read the states of a checkpoint folder by name, for any number of saving ranks.

`CheckpointReader` reads the library's own layout over the files of all ranks. Ranges that are known
in advance are read ahead (readahead.py). If a parameter was saved in other parts than requested,
the result is assembled from mapped files (boxes.py). `open_checkpoint` opens a folder of any layout
in one process. Data are read on request, at most `READ_NUMEL` elements at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.given import refuse_url
from .boxes import READ_NUMEL, ParamPart, PlacedValues, assemble
from .catalogue import is_single_checkpoint, latest_tag
from .format import (
    BUFFER,
    MANIFEST,
    VALUE,
    WEIGHT,
    WHOLE,
    Manifest,
    SavedChunk,
    StateRange,
    StateReader,
    checked_tag,
    decode,
)
from .layouts import ForeignLayout, OpenCheckpoint, layout_of
from .numpy_values import Plain
from .readahead import ByteRange, ReadPart, read_ahead
from .safetensors_file import (
    SafetensorsReader,
    TensorInfo,
    TensorLocation,
    cast,
    damaged_file,
    dtype_named,
)
from .verify import compare_checksum, raise_faults, verify

ChunksByPart = dict[ParamPart | None, list[SavedChunk]]


class CheckpointReader(StateReader):
    """Read ranges of states from the slices of all ranks, in the order of any part.

    Files are opened on first use.

    Args:
        folder: Folder of the checkpoint.
        chunks: The chunks to read from.
        stack: Exit stack that closes the files when it is left.
        verifies: Whether to compare a chunk with its checksum if it is read from start to end.
    """

    def __init__(
        self, folder: Path, chunks: list[SavedChunk], stack: ExitStack, *, verifies: bool = False
    ) -> None:
        self.folder = folder
        self._stack = stack
        self._verifies = verifies
        self.states: dict[tuple[str, str], dict[str, ChunksByPart]] = {}
        self._files: dict[str, SafetensorsReader] = {}
        self._prefetched: Iterator[ReadPart] = iter(())
        self._head: ReadPart | None = None
        for chunk in sorted(chunks, key=lambda each: each.start):
            by_key = self.states.setdefault((chunk.kind, chunk.name), {})
            by_key.setdefault(chunk.key, {}).setdefault(chunk.part, []).append(chunk)

    def _chunks_by_part(self, wanted: StateRange) -> ChunksByPart:
        return self.states.get((wanted.kind, wanted.name), {}).get(wanted.key, {})

    def prefetch(self, wanted: Iterable[StateRange]) -> None:
        """Read ahead the ranges that the next calls of `read` will request.

        A different order of these calls is correct but slower.
        """
        spans = [
            self._byte_range(chunk, low, high)
            for each in wanted
            for chunk, low, high in self._cuts(each)
        ]
        coming = read_ahead(spans, "reading the checkpoint")
        self._stack.callback(coming.close)
        self._prefetched = coming
        self._head = next(coming, None)

    def read(self, wanted: StateRange) -> PlacedValues:
        """Yield the elements of a range, whatever parts of the parameter the files contain.

        Raises:
            CheckpointError: Elements are missing or cannot be read.
        """
        saved = self._chunks_by_part(wanted)
        if saved and wanted.part not in saved:
            yield from self._assemble(wanted, saved)
            return
        reached = wanted.start
        for chunk, low, high in self._cuts(wanted):
            byte_range = self._byte_range(chunk, low, high)
            dtype = self._location(chunk).dtype
            found = 0
            for came in self._parts_of(byte_range):
                values = self._values_of(chunk, came, dtype)
                if self._verifies:
                    found = zlib.crc32(values.view(torch.uint8).numpy().data, found)
                yield low + (came.start - byte_range.start) // dtype.itemsize, values
            if self._verifies and (low, high) == (chunk.start, chunk.stop):
                raise_faults(self.folder, compare_checksum(chunk, found))
            reached = high
        if reached < wanted.stop:
            raise wanted.missing_from(self.folder, reached)

    def _assemble(self, wanted: StateRange, saved: ChunksByPart) -> PlacedValues:
        """Yield elements of a part that was not saved, from chunks of other parts."""
        shape = next(each.shape for each in (wanted.part, *saved) if each is not None)
        whole = ParamPart.whole(shape)
        sources = [
            (of or whole, chunk.start, self._file(chunk).mapped(chunk.tensor_name))
            for of, chunks in saved.items()
            for chunk in chunks
        ]
        missing = wanted.missing_from(self.folder, wanted.start)
        return assemble(wanted.part or whole, wanted.start, wanted.stop, sources, missing)

    def reads_whole(self, wanted: Iterable[StateRange]) -> bool:
        """Return whether the ranges are whole chunks, which can be verified while reading."""
        for each in wanted:
            if each.part not in self._chunks_by_part(each):
                return False
            for chunk, low, high in self._cuts(each):
                if (low, high) != (chunk.start, chunk.stop):
                    return False
        return True

    def _cuts(self, wanted: StateRange) -> Iterator[tuple[SavedChunk, int, int]]:
        """Yield chunks with elements of a range, and their ranges, up to the first gap."""
        reached = wanted.start
        for chunk in self._chunks_by_part(wanted).get(wanted.part, []):
            low = max(chunk.start, reached)
            high = min(chunk.stop, wanted.stop)
            if low == reached and low < high:
                yield chunk, low, high
                reached = high

    def _location(self, chunk: SavedChunk) -> TensorLocation:
        return self._file(chunk).header.locations[chunk.tensor_name]

    def _byte_range(self, chunk: SavedChunk, low: int, high: int) -> ByteRange:
        file = self._file(chunk)
        place = self._location(chunk)
        start, stop = (
            place.start + (at - chunk.start) * place.dtype.itemsize for at in (low, high)
        )
        return ByteRange(file.descriptor, start, stop)

    def _parts_of(self, byte_range: ByteRange) -> Iterator[ReadPart]:
        if self._head is None or self._head.range != byte_range:
            yield from read_ahead([byte_range])
        while self._head is not None and self._head.range == byte_range:
            yield self._head
            self._head = next(self._prefetched, None)

    def _values_of(self, chunk: SavedChunk, part: ReadPart, dtype: torch.dtype) -> Tensor:
        try:
            data = part.data
        except OSError as error:
            raise damaged_file(
                self.folder / chunk.file, f"cannot be read: {error.strerror or error}"
            ) from None
        # files of other programs need not be aligned
        is_aligned = data.data_ptr() % dtype.itemsize == 0
        return (data if is_aligned else data.clone()).view(dtype)

    def whole(self, name: str, key: str, part: ParamPart | None = None) -> Tensor:
        """Return an optimizer state that has a shape different from its parameter.

        Args:
            name: Name of the parameter.
            key: The optimizer's name of the state.
            part: The part of the parameter that the state belongs to; None means all of it.

        Returns:
            The state in its own shape, read into new memory.

        Raises:
            CheckpointError: The state was saved for another part.
        """
        saved = self.states[WHOLE, name][key]
        if part not in saved:
            parts = ", ".join(map(_described, saved))
            raise CheckpointError(
                f"the optimizer's state '{key}' of '{name}' was saved of {parts}, not of "
                f"{_described(part)}.",
                "Its shape differs from the parameter's, and depends on the split along tp.",
                "load with the number of tp ranks that saved it, or with "
                "load_optimizer_states=False.",
            )
        return self.tensor(saved[part][0])

    def of_rank(self, name: str, rank: int) -> Tensor:
        """Return the buffer that a rank saved, or else the first saved one, as a flat tensor.

        Args:
            name: Name of the buffer.
            rank: Rank that saved it.

        Returns:
            A 1-D tensor with the dtype in which the buffer was saved.
        """
        chunks = self.states[BUFFER, name][""][None]
        return self.tensor(next((chunk for chunk in chunks if chunk.rank == rank), chunks[0]))

    def tensor(self, chunk: SavedChunk) -> Tensor:
        """Read all elements of a chunk, and return them in the shape in which they were saved."""
        return self._file(chunk).whole(chunk.tensor_name)

    def _file(self, chunk: SavedChunk) -> SafetensorsReader:
        if chunk.file not in self._files:
            self._files[chunk.file] = self._stack.enter_context(
                SafetensorsReader(self.folder / chunk.file)
            )
        return self._files[chunk.file]


def _described(part: ParamPart | None) -> str:
    """Describe a part of a parameter for an error message."""
    return "the whole parameter" if part is None else str(part)


@dataclass(frozen=True)
class LazyTensor:
    """A weight or buffer of a checkpoint that is read on request."""

    source: OpenCheckpoint
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (position, flat values) in order, in the saved dtype."""
        if self.name in self.source.manifest.buffers:
            yield 0, self.source.values.of_rank(self.name, 0)
            return
        numel = self.shape.numel()
        for low in range(0, numel, READ_NUMEL):
            high = min(low + READ_NUMEL, numel)
            yield from self.source.values.read(StateRange(WEIGHT, self.name, "", low, high))

    def contiguous(self) -> Tensor:
        """Return the whole tensor in its own shape, read into new memory.

        DeepSpeed's lazy tensors have a method of this name.
        """
        whole = torch.empty(self.shape.numel(), dtype=self.dtype, device="cpu")
        for low, part in self.parts():
            whole[low : low + part.numel()] = cast(part.reshape(-1), self.dtype)
        return whole.view(self.shape)

    @property
    def entry(self) -> TensorInfo:
        """Return the name, shape and dtype for writing it to a file."""
        return TensorInfo(self.name, tuple(self.shape), self.dtype)


def open_checkpoint(
    path: Path, tag: str | None, stack: ExitStack, *, checks: bool = True
) -> OpenCheckpoint:
    """Open a checkpoint or export for reading.

    Args:
        path: A checkpoint or export, or a directory of checkpoints.
        tag: The checkpoint in the directory; None selects the one named by `latest`.
        stack: Exit stack that closes the files when it is left.
        checks: Whether to verify every byte first.

    Returns:
        The open checkpoint, whose tensors are read on demand.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    folder = resolve_checkpoint(path, tag)
    if checks:
        raise_faults(folder, verify(folder, read_again=True))
    layout = layout_of(folder)
    if isinstance(layout, ForeignLayout):
        return layout.open_at(folder, stack)
    manifest = Manifest.read(folder / MANIFEST)
    return OpenCheckpoint(
        folder,
        manifest,
        plain_values(folder, manifest),
        CheckpointReader(folder, manifest.chunks, stack),
    )


def resolve_checkpoint(path: Path, tag: str | None) -> Path:
    """Return the folder of a checkpoint.

    Args:
        path: A checkpoint or export, or a directory of checkpoints.
        tag: The checkpoint in the directory; None selects the one named by `latest`.

    Returns:
        The folder that contains the files of the checkpoint.

    Raises:
        CheckpointError: `path` is not a checkpoint and no tag is given or named by `latest`.
    """
    refuse_url(f"'{path}'", path)
    if tag is None and is_single_checkpoint(path):
        return path
    chosen = tag if tag is not None else latest_tag(path)
    if not chosen:
        raise CheckpointError(
            f"{path} is no checkpoint and has no file `latest` that names one.",
            fix="name the folder that save_checkpoint was given, or a tag in it.",
        )
    return path / checked_tag(chosen)


def tensors_of(
    source: OpenCheckpoint, dtype: torch.dtype | None = None, *, exclude_frozen: bool = False
) -> dict[str, LazyTensor]:
    """Return a lazy tensor for the first name of every weight and buffer.

    The order is that of the model if the checkpoint records it.

    Args:
        source: Open checkpoint to read from.
        dtype: Dtype of floating-point tensors; None keeps the most precise saved form.
        exclude_frozen: Whether to omit parameters that are not trained.

    Returns:
        Lazy tensors by name. Nothing is read before their values are requested.
    """
    manifest = source.manifest
    found = {}
    for name, facts in (manifest.parameters | manifest.buffers).items():
        kind = BUFFER if name in manifest.buffers else WEIGHT
        is_there = source.values.has(kind, name) or not prod(facts["shape"])
        if is_there and (facts.get("trained", True) or not exclude_frozen):
            own = dtype_named(facts["dtype"])
            wanted = dtype if dtype is not None and own.is_floating_point else own
            found[name] = LazyTensor(source, name, torch.Size(facts["shape"]), wanted)
    order = {name: place for place, name in enumerate(manifest.extra.get("names", ()))}
    names = sorted(found, key=lambda name: order.get(name, len(order)))
    return {name: found[name] for name in names}


def plain_values(folder: Path, manifest: Manifest) -> Plain:
    """Read the plain values of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        manifest: Names, shapes and chunks of the checkpoint.

    Returns:
        A dict with the keys "groups", "trainer" and "client".
    """
    found: Plain = decode(manifest.plain, tensors_of_rank(folder, manifest, VALUE, 0))
    return found


def client_of_rank(folder: Path, manifest: Manifest, rank: int, first: Any) -> Any:
    """Return the client state that a rank passed to the save.

    Args:
        folder: Folder of the checkpoint.
        manifest: Names, shapes and chunks of the checkpoint.
        rank: Rank that saved the state.
        first: Rank 0's client state, which supplies missing values.

    Returns:
        The value that the rank passed, merged into `first` if both are mappings; `first` if it
        passed none.
    """
    own = manifest.extra.get("clients", {}).get(str(rank))
    if own is None:
        return first
    found = decode(own, tensors_of_rank(folder, manifest, VALUE, rank))
    is_joined = isinstance(first, Mapping) and isinstance(found, Mapping)
    return {**first, **found} if is_joined else found


def tensors_of_rank(folder: Path, manifest: Manifest, kind: str, rank: int) -> dict[str, Tensor]:
    """Return the tensors of a kind that a rank saved, by name.

    Args:
        folder: Folder of the checkpoint.
        manifest: Names, shapes and chunks of the checkpoint.
        kind: `VALUE` or `RNG`.
        rank: Rank that saved the tensors.

    Returns:
        The tensors by name.
    """
    with ExitStack() as stack:
        reader = CheckpointReader(folder, [], stack)
        return {
            chunk.name: reader.tensor(chunk)
            for chunk in manifest.chunks
            if (chunk.kind, chunk.rank) == (kind, rank)
        }
