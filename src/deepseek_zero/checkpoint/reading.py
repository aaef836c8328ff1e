"""Flat ranges of the states in a checkpoint's folder, by kind, name and the optimizer's name of the state.

Files open on first use; what is known to be wanted is read ahead (ahead.py).  Called by load.py and source.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from .ahead import Piece, Span, pieces
from .manifest import BUFFER, WHOLE, Chunk, lacking
from .tensor_file import TensorReader, broken
from .verify import compare, refuse

Wanted = tuple[str, str, str, int, int]  # kind, name, key, and elements [start, stop)


class Reader:
    """Finds and reads flat ranges over the files of all ranks; files open on first use.

    compares: whether a chunk that is read from end to end is compared with its checksum.
    """

    def __init__(self, folder: Path, chunks: list[Chunk], stack: ExitStack, *, compares: bool = False) -> None:
        self.folder, self._stack, self._compares = folder, stack, compares
        self._chunks: dict[tuple[str, str, str], list[Chunk]] = {}
        self._keys: dict[tuple[str, str], dict[str, None]] = {}
        self._files: dict[str, TensorReader] = {}
        self._expected: Iterator[Piece] = iter(())
        self._head: Piece | None = None
        for chunk in sorted(chunks, key=lambda each: each.start):
            self._chunks.setdefault((chunk.kind, chunk.name, chunk.key), []).append(chunk)
            self._keys.setdefault((chunk.kind, chunk.name), {})[chunk.key] = None

    def has(self, kind: str, name: str, key: str = "") -> bool:
        return (kind, name, key) in self._chunks

    def keys(self, kind: str, name: str) -> list[str]:
        """The optimizer's names of the states of one parameter."""
        return list(self._keys.get((kind, name), ()))

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Read ahead what `read` will be asked for next.  Another order costs time, nothing else."""
        spans = [self._span(chunk, low, high) for each in wanted for chunk, low, high in self._cut(*each)]
        coming = pieces(spans)
        self._stack.callback(coming.close)
        self._expected, self._head = coming, next(coming, None)

    def read(self, kind: str, name: str, key: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The elements [start, stop) in parts, each with its place, to be looked at before the next is asked for; a
        CheckpointError if some are missing.
        """
        reached = start
        for chunk, low, high in self._cut(kind, name, key, start, stop):
            span, dtype = self._span(chunk, low, high), self._file(chunk).header.places[chunk.entry].dtype
            found = 0
            for piece in self._pieces(span):
                values = self._look(chunk, piece, dtype)
                if self._compares:
                    found = zlib.crc32(values.view(torch.uint8).numpy().data, found)
                yield low + (piece.start - span.start) // dtype.itemsize, values
            if self._compares and (low, high) == (chunk.start, chunk.stop):
                refuse(self.folder, compare(chunk, found))
            reached = high
        if reached < stop:
            raise lacking(self.folder, f"elements {reached} to {stop} of '{name}' ({kind} {key})")

    def reads_whole(self, wanted: Iterable[Wanted]) -> bool:
        """Whether all that is wanted is whole chunks, which can be compared as they are read."""
        cuts = (cut for each in wanted for cut in self._cut(*each))
        return all((low, high) == (chunk.start, chunk.stop) for chunk, low, high in cuts)

    def _cut(self, kind: str, name: str, key: str, start: int, stop: int) -> Iterator[tuple[Chunk, int, int]]:
        """Where elements [start, stop) are, as far as they are anywhere."""
        reached = start
        for chunk in self._chunks.get((kind, name, key), []):
            low, high = max(chunk.start, reached), min(chunk.stop, stop)
            if low == reached and low < high:
                yield chunk, low, high
                reached = high

    def _span(self, chunk: Chunk, low: int, high: int) -> Span:
        file = self._file(chunk)
        place = file.header.places[chunk.entry]
        start, stop = (place.start + (at - chunk.start) * place.dtype.itemsize for at in (low, high))
        return Span(file.descriptor, start, stop)

    def _pieces(self, span: Span) -> Iterator[Piece]:
        if self._head is None or self._head.span != span:
            yield from pieces([span])
        while self._head is not None and self._head.span == span:
            yield self._head
            self._head = next(self._expected, None)

    def _look(self, chunk: Chunk, piece: Piece, dtype: torch.dtype) -> Tensor:
        try:
            data = piece.data
        except OSError as error:
            raise broken(self.folder / chunk.file, f"cannot be read: {error.strerror or error}") from None
        is_aligned = data.data_ptr() % dtype.itemsize == 0  # other writers' files need not be
        return (data if is_aligned else data.clone()).view(dtype)

    def whole(self, name: str, key: str) -> Tensor:
        """A state with a shape of its own."""
        return self.value(WHOLE, name, key)

    def value(self, kind: str, name: str, key: str = "") -> Tensor:
        """What was never cut, in its own shape."""
        chunk = self._chunks[kind, name, key][0]
        return self._file(chunk).whole(chunk.entry)

    def of_rank(self, name: str, rank: int) -> Tensor:
        """A rank's buffer, flat; rank 0's where that rank wrote none."""
        chunks = self._chunks[BUFFER, name, ""]
        chunk = next((chunk for chunk in chunks if chunk.rank == rank), chunks[0])
        return self._file(chunk).whole(chunk.entry)

    def _file(self, chunk: Chunk) -> TensorReader:
        if chunk.file not in self._files:
            self._files[chunk.file] = self._stack.enter_context(TensorReader(self.folder / chunk.file))
        return self._files[chunk.file]
