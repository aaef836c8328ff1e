"""Read ranges of files in a given order, a few blocks ahead of the consumer.

    already in the page cache     copied from there
    read once, or a fast disk     read past the page cache: allocating and filling its pages
                                  costs more than reading from such a disk
    read again, on a slow disk    read through the page cache, so that the second read needs
                                  no disk access

The consumer gets a view of the block that was read. A further copy would cost as much as the page
cache does.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..base.memory import PAGE, is_cached, private_pages
from ..base.progress import LongWork
from ..base.quantities import rounded_up

BLOCK_BYTES = 8 << 20
BLOCKS = 4  # 32 MiB per open file
THREADS = 2  # concurrent reads or writes
FAST = 0.8e9  # bytes per second; about the rate at which a CPU fills the page cache
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # only on Linux


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, stop) of an open file.

    Attributes:
        descriptor: Descriptor of the open file.
        start: First byte.
        stop: Offset after the last byte of the range.
        read_again: Whether the range will be read again soon.
    """

    descriptor: int
    start: int
    stop: int
    read_again: bool = False


@dataclass(frozen=True)
class ReadPart:
    """A part of a byte range that was read in one request.

    One request may read several parts.
    """

    range: ByteRange
    start: int
    stop: int
    request: ReadRequest

    @property
    def data(self) -> Tensor:
        """Return the bytes (uint8), which are valid until the next part is requested.

        Raises:
            OSError: The bytes cannot be read.
        """
        return self.request.bytes_of(self)


class ReadRequest:
    """One read of a worker thread: its parts and the block that it fills."""

    def __init__(self, path: ReadPath) -> None:
        self.parts = list[ReadPart]()
        self._path = path
        self._block = torch.empty(0, device="cpu")
        self._job = Future[None]()

    def begin(self, pool: ThreadPoolExecutor, block: Tensor) -> None:
        """Start reading the parts in a thread.

        Args:
            pool: Thread pool that runs the read.
            block: Memory that receives the bytes.
        """
        self._block = block
        first = self.parts[0]
        last = self.parts[-1]
        self._job = pool.submit(self._path.fill, block, first.range, first.start, last.stop)

    def end(self) -> Tensor:
        """Wait until the thread no longer uses the block, and return the block."""
        self._job.exception()
        return self._block

    def bytes_of(self, part: ReadPart) -> Tensor:
        """Return the bytes of one of the request's parts, after waiting for the request.

        Raises:
            OSError: These bytes cannot be read.
        """
        first = self.parts[0].start
        if self._job.exception() is not None:
            if len(self.parts) == 1:
                self._job.result()
            first = part.start  # the unreadable part may be another part of the request
            self._path.fill(self._block, part.range, part.start, part.stop)
        low = first % PAGE + part.start - first
        return self._block[low : low + part.stop - part.start]


class ReadPath:
    """Read blocks of a file with direct I/O or through the page cache."""

    def __init__(self) -> None:
        # total of all direct reads; `THREADS` of them run at the same time
        self._num_bytes = 0
        self._seconds = 0.0

    def fill(self, block: Tensor, byte_range: ByteRange, start: int, stop: int) -> None:
        """Read bytes [start, stop) into a block.

        The bytes begin in the block at the offset of `start` within its page.

        Args:
            block: Memory that receives the bytes.
            byte_range: The range that the bytes belong to.
            start: First byte.
            stop: End of the bytes to read.

        Raises:
            OSError: The bytes cannot be read.
        """
        low = start - start % PAGE
        target = block.numpy().data[: stop - low]
        is_slow = byte_range.read_again and self._num_bytes * THREADS < FAST * self._seconds
        is_for_cache = is_slow or is_cached(byte_range.descriptor, low, stop)
        if not is_for_cache and self._read_direct(
            byte_range.descriptor, block.numpy().data, low, stop
        ):
            return
        with suppress(OSError):
            # Request everything at once instead of 128 KiB at a time
            os.posix_fadvise(byte_range.descriptor, low, len(target), os.POSIX_FADV_WILLNEED)
        while len(target):
            count = os.preadv(byte_range.descriptor, [target], low)
            if not count:
                raise OSError("the file ended early")
            low = low + count
            target = target[count:]

    def _read_direct(self, descriptor: int, block: memoryview, low: int, stop: int) -> bool:
        """Read past the page cache.

        Returns:
            False if that is not possible or the file is too short.
        """
        began = time.perf_counter()
        try:
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        except OSError:
            return False
        try:
            count = os.preadv(direct, [block[: rounded_up(stop - low, PAGE)]], low)
        except OSError:
            return False  # the read through the page cache raises the error
        finally:
            os.close(direct)
        self._num_bytes += count
        self._seconds += time.perf_counter() - began
        return count >= stop - low


def read_ahead(ranges: Iterable[ByteRange], what: str = "") -> Generator[ReadPart, None, None]:
    """Yield the bytes of ranges in order, in parts.

    Args:
        ranges: The ranges to read.
        what: Name of the work in progress messages; no progress is shown if it is empty.

    Yields:
        Parts; each is valid until the next one is requested.
    """
    wanted = list(ranges)
    total = sum(each.stop - each.start for each in wanted)
    with LongWork(what, total) as work, closing(_read_ahead(wanted)) as parts:
        for part in parts:
            yield part
            if what:
                work.advance(part.stop - part.start)


def _read_ahead(ranges: Iterable[ByteRange]) -> Generator[ReadPart, None, None]:
    coming = _requests(ranges)
    under_way = deque[ReadRequest]()
    blocks = (private_pages(BLOCK_BYTES + PAGE, torch.uint8) for _ in range(BLOCKS))
    with ThreadPoolExecutor(THREADS, "deepseek_zero checkpoint") as pool:
        for read, block in zip(islice(coming, BLOCKS), blocks, strict=False):
            read.begin(pool, block)
            under_way.append(read)
        while under_way:
            read = under_way.popleft()
            yield from read.parts
            following = next(coming, None)
            block = read.end()
            if following is not None:
                following.begin(pool, block)
                under_way.append(following)


def _requests(ranges: Iterable[ByteRange]) -> Iterator[ReadRequest]:
    """Split ranges into requests of at most one block, shared by adjacent ranges."""
    path = ReadPath()
    read = ReadRequest(path)
    for byte_range in ranges:
        at = byte_range.start
        while at < byte_range.stop:
            if read.parts and not _continues(read.parts, byte_range, at):
                yield read
                read = ReadRequest(path)
            begin = read.parts[0].start if read.parts else at
            end = min(byte_range.stop, begin + BLOCK_BYTES)
            read.parts.append(ReadPart(byte_range, at, end, read))
            at = end
    if read.parts:
        yield read


def _continues(before: list[ReadPart], byte_range: ByteRange, at: int) -> bool:
    first = before[0]
    last = before[-1]
    is_next = (last.range.descriptor, last.range.read_again, last.stop) == (
        byte_range.descriptor,
        byte_range.read_again,
        at,
    )
    return is_next and at - first.start < BLOCK_BYTES
