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
from .boxes import READ_NUMEL, ParamPart, boxes_of, copy_shared
from .catalogue import is_single_checkpoint, latest_tag
from .format import (
    BUFFER,
    MANIFEST,
    VALUE,
    WEIGHT,
    WHOLE,
    Manifest,
    SavedChunk,
    checked_tag,
    decode,
    missing_elements,
)
from .layouts import ForeignLayout, OpenCheckpoint, StateRange, layout_of
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


class CheckpointReader:
    """Read ranges of states from the slices of all ranks, in the order of any part.

    Files are opened on first use.

    Args:
        folder: The checkpoint.
        chunks: The chunks to read from.
        stack: Closes the files.
        verifies: Compare a chunk with its checksum if it is read from start to end.
    """

    def __init__(
        self, folder: Path, chunks: list[SavedChunk], stack: ExitStack, *, verifies: bool = False
    ) -> None:
        self.folder = folder
        self._stack = stack
        self._verifies = verifies
        self._chunks: dict[tuple[str, str, str], dict[ParamPart | None, list[SavedChunk]]] = {}
        self._keys: dict[tuple[str, str], dict[str, None]] = {}
        self._files: dict[str, SafetensorsReader] = {}
        self._prefetched: Iterator[ReadPart] = iter(())
        self._head: ReadPart | None = None
        for chunk in sorted(chunks, key=lambda each: each.start):
            of_state = self._chunks.setdefault((chunk.kind, chunk.name, chunk.key), {})
            of_state.setdefault(chunk.part, []).append(chunk)
            self._keys.setdefault((chunk.kind, chunk.name), {})[chunk.key] = None

    def has(self, kind: str, name: str, key: str = "") -> bool:
        """Return whether a state has any chunk.

        Args:
            kind: Kind of state.
            name: Name of the parameter or buffer.
            key: The optimizer's name of the state.
        """
        return (kind, name, key) in self._chunks

    def keys(self, kind: str, name: str) -> list[str]:
        """Return the optimizer's names of the states of one parameter.

        Args:
            kind: Kind of state.
            name: Name of the parameter.
        """
        return list(self._keys.get((kind, name), ()))

    def prefetch(self, wanted: Iterable[StateRange]) -> None:
        """Read ahead the ranges that the next calls of `read` will request.

        A different order of these calls is correct but slower.
        """
        spans = [
            self._byte_range(chunk, low, high)
            for each in wanted
            for chunk, low, high in self._chunks_of(*each)
        ]
        coming = read_ahead(spans, "reading the checkpoint")
        self._stack.callback(coming.close)
        self._prefetched = coming
        self._head = next(coming, None)

    def read(
        self, kind: str, name: str, key: str, start: int, stop: int, part: ParamPart | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements [start, stop) of a part of a state, in order.

        Args:
            kind: Kind of state.
            name: Name of the parameter.
            key: The optimizer's name of the state.
            start: First element.
            stop: End of the range.
            part: The part in whose order elements are counted; None means the whole parameter.

        Yields:
            Pairs of position and flat values; each is valid until the next one is requested.

        Raises:
            CheckpointError: Elements are missing or cannot be read.
        """
        if not self._is_saved_so(kind, name, key, part):
            yield from self._put_together(kind, name, key, start, stop, part)
            return
        reached = start
        for chunk, low, high in self._chunks_of(kind, name, key, start, stop, part):
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
        if reached < stop:
            raise missing_elements(
                self.folder, f"elements {reached} to {stop} of '{name}' ({kind} {key})"
            )

    def _put_together(
        self, kind: str, name: str, key: str, start: int, stop: int, part: ParamPart | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield elements of a part, assembled from chunks of other parts; padding is zero."""
        saved = self._chunks.get((kind, name, key), {})
        if not saved:
            raise missing_elements(
                self.folder, f"elements {start} to {stop} of '{name}' ({kind} {key})"
            )
        shape = next(each.shape for each in (part, *saved) if each is not None)
        wanted = part or ParamPart.whole(shape)
        known = list(saved.items())
        dtype = self._location(known[0][1][0]).dtype
        for low in range(start, stop, READ_NUMEL):
            high = min(stop, low + READ_NUMEL)
            to = boxes_of(wanted, low, high)
            into = torch.zeros(high - low, dtype=dtype)
            filled = torch.zeros(high - low, dtype=torch.bool)
            for of, chunks in known:
                for chunk in chunks:
                    source = self._file(chunk).mapped(chunk.tensor_name)
                    copy_shared(
                        into,
                        to,
                        source,
                        boxes_of(of or ParamPart.whole(shape), chunk.start, chunk.stop),
                        filled,
                    )
            if int(filled.sum()) != sum(box.numel for box in to):
                raise missing_elements(
                    self.folder, f"some of the elements of '{name}' ({kind} {key})"
                )
            yield low, into

    def reads_whole(self, wanted: Iterable[StateRange]) -> bool:
        """Return whether the ranges are whole chunks, which can be verified while reading."""
        wanted = list(wanted)
        if not all(
            self._is_saved_so(kind, name, key, part) for kind, name, key, _, _, part in wanted
        ):
            return False
        cuts = (cut for each in wanted for cut in self._chunks_of(*each))
        return all((low, high) == (chunk.start, chunk.stop) for chunk, low, high in cuts)

    def _is_saved_so(self, kind: str, name: str, key: str, part: ParamPart | None) -> bool:
        """Return whether a state was saved in the order of this part."""
        saved = self._chunks.get((kind, name, key), {})
        return part in saved or not (saved or part)

    def _chunks_of(
        self, kind: str, name: str, key: str, start: int, stop: int, part: ParamPart | None
    ) -> Iterator[tuple[SavedChunk, int, int]]:
        """Yield chunks with elements [start, stop) and their ranges, up to the first gap."""
        reached = start
        for chunk in self._chunks.get((kind, name, key), {}).get(part, []):
            low = max(chunk.start, reached)
            high = min(chunk.stop, stop)
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
        """Read an optimizer state that has a shape different from its parameter.

        Args:
            name: Name of the parameter.
            key: The optimizer's name of the state.
            part: The part of the parameter that the state belongs to; None means all of it.

        Raises:
            CheckpointError: The state was saved for another part.
        """
        return self.value(WHOLE, name, key, part)

    def value(self, kind: str, name: str, key: str = "", part: ParamPart | None = None) -> Tensor:
        """Read a state that is stored whole, in its own shape.

        Args:
            kind: Kind of state.
            name: Name of the parameter or value.
            key: The optimizer's name of the state.
            part: The part of the parameter that the state belongs to; None means all of it.

        Raises:
            CheckpointError: The state was saved for another part.
        """
        saved = self._chunks[kind, name, key]
        if part not in saved:
            raise CheckpointError(
                f"the optimizer's state '{key}' of '{name}' was saved of {_described(*saved)}, not "
                f"of {_described(part)}.",
                "Its shape differs from the parameter's, and depends on the split along tp.",
                "load with the number of tp ranks that saved it, or with "
                "load_optimizer_states=False.",
            )
        chunk = saved[part][0]
        return self._file(chunk).whole(chunk.tensor_name)

    def of_rank(self, name: str, rank: int) -> Tensor:
        """Read the buffer that a rank saved, as a flat tensor.

        Args:
            name: Name of the buffer.
            rank: The rank that saved it. If that rank saved no value, the first saved one is
                returned.
        """
        chunks = self._chunks[BUFFER, name, ""][None]
        chunk = next((chunk for chunk in chunks if chunk.rank == rank), chunks[0])
        return self._file(chunk).whole(chunk.tensor_name)

    def _file(self, chunk: SavedChunk) -> SafetensorsReader:
        if chunk.file not in self._files:
            self._files[chunk.file] = self._stack.enter_context(
                SafetensorsReader(self.folder / chunk.file)
            )
        return self._files[chunk.file]


def _described(*parts: ParamPart | None) -> str:
    """Describe parts of a parameter for an error message."""
    return ", ".join("the whole parameter" if each is None else str(each) for each in parts)


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
            yield from self.source.values.read(
                WEIGHT, self.name, "", low, min(low + READ_NUMEL, numel)
            )

    def contiguous(self) -> Tensor:
        """Read the whole tensor in its own shape into new memory.

        DeepSpeed's lazy tensors have a method of this name.
        """
        whole = torch.empty(self.shape.numel(), dtype=self.dtype)
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
        stack: Closes the checkpoint.
        checks: Verify every byte first.

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
    """Map the first name of every weight and buffer to a lazy tensor.

    The order is that of the model if the checkpoint records it.

    Args:
        source: The open checkpoint.
        dtype: Dtype of floating-point tensors; None keeps the most precise saved form.
        exclude_frozen: Omit parameters that are not trained.
    """
    manifest = source.manifest
    found = {}
    for name, facts in manifest.parameters.items():
        is_there = source.values.has(WEIGHT, name) or not prod(facts["shape"])
        if is_there and (facts["trained"] or not exclude_frozen):
            found[name] = _lazy_tensor(source, name, facts, dtype)
    for name, facts in manifest.buffers.items():
        if source.values.has(BUFFER, name):
            found[name] = _lazy_tensor(source, name, facts, dtype)
    order = {name: place for place, name in enumerate(manifest.extra.get("names", ()))}
    return {
        name: found[name] for name in sorted(found, key=lambda each: order.get(each, len(order)))
    }


def _lazy_tensor(
    source: OpenCheckpoint, name: str, facts: dict[str, Any], dtype: torch.dtype | None
) -> LazyTensor:
    own: torch.dtype = dtype_named(facts["dtype"])
    wanted = dtype if dtype is not None and own.is_floating_point else own
    return LazyTensor(source, name, torch.Size(facts["shape"]), wanted)


def plain_values(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the plain values of a checkpoint.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.

    Returns:
        A dict with the keys "groups", "trainer" and "client".
    """
    found: dict[str, Any] = decode(manifest.plain, _values_of_rank(folder, manifest, 0))
    return found


def client_of_rank(folder: Path, manifest: Manifest, rank: int, first: Any) -> Any:
    """Return the client state that a rank passed to the save.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        rank: The rank.
        first: Rank 0's client state, which supplies missing values.
    """
    own = manifest.extra.get("clients", {}).get(str(rank))
    if own is None:
        return first
    found = decode(own, _values_of_rank(folder, manifest, rank))
    return (
        {**first, **found} if isinstance(first, Mapping) and isinstance(found, Mapping) else found
    )


def _values_of_rank(folder: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    chunks = [chunk for chunk in manifest.chunks if chunk.kind == VALUE and chunk.rank == rank]
    with ExitStack() as stack:
        reader = CheckpointReader(folder, chunks, stack)
        return {chunk.name: reader.value(VALUE, chunk.name) for chunk in chunks}
