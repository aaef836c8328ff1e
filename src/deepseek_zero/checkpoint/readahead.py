"""Reads ranges of files in the order they are wanted, a few blocks ahead of the consumer.

    in the page cache already     copied from there
    wanted once, or a fast disk   read past the page cache: finding and filling its pages costs
                                  more than such a disk
    wanted again, a slow disk     read through it, so that the second read costs no disk access

The consumer sees the bytes in the block that they were read into: another copy would cost as much
as the page cache.
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
from .writebehind import BLOCK_BYTES, BLOCKS, THREADS

FAST = 0.8e9  # bytes per second; a CPU fills the page cache with about as many
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, stop) of an open file.  read_again: they will be read once more soon."""

    descriptor: int
    start: int
    stop: int
    read_again: bool = False


@dataclass(frozen=True)
class ReadPart:
    """A part of a byte range that came in one request, which other parts may share."""

    range: ByteRange
    start: int
    stop: int
    request: ReadRequest

    @property
    def data(self) -> Tensor:
        """Wait for its bytes, uint8, valid until the next part is asked for.  OSError where they
        cannot be read.
        """
        return self.request.bytes_of(self)


class ReadRequest:
    """One request of a thread: the parts that it reads, and the block that it reads into."""

    def __init__(self, path: ReadPath) -> None:
        self.parts = list[ReadPart]()
        self._path = path
        self._block = torch.empty(0)
        self._job = Future[None]()

    def begin(self, pool: ThreadPoolExecutor, block: Tensor) -> None:
        """Have a thread read the parts into `block`."""
        self._block = block
        first = self.parts[0]
        last = self.parts[-1]
        self._job = pool.submit(self._path.fill, block, first.range, first.start, last.stop)

    def end(self) -> Tensor:
        """Wait until the thread has done with the block, and return it."""
        self._job.exception()
        return self._block

    def bytes_of(self, part: ReadPart) -> Tensor:
        """Wait, and return the bytes of one of the parts; OSError where these cannot be read."""
        first = self.parts[0].start
        if self._job.exception() is not None:
            if len(self.parts) == 1:
                self._job.result()
            first = part.start  # perhaps another part of the request is the one that cannot be read
            self._path.fill(self._block, part.range, part.start, part.stop)
        low = first % PAGE + part.start - first
        return self._block[low : low + part.stop - part.start]


class ReadPath:
    """Fills a block past the page cache or through it, as the table above says."""

    def __init__(self) -> None:
        # that direct reads took, `THREADS` of them at once
        self._num_bytes = 0
        self._seconds = 0.0

    def fill(self, block: Tensor, byte_range: ByteRange, start: int, stop: int) -> None:
        """Read bytes [start, stop) into a block, `start` at its offset within a page."""
        low = start - start % PAGE
        target = block.numpy().data[: stop - low]
        is_slow = byte_range.read_again and self._num_bytes * THREADS < FAST * self._seconds
        is_for_cache = is_slow or is_cached(byte_range.descriptor, low, stop)
        if not is_for_cache and self._read_direct(
            byte_range.descriptor, block.numpy().data, low, stop
        ):
            return
        with suppress(OSError):
            # At once, not 128 KiB a time
            os.posix_fadvise(byte_range.descriptor, low, len(target), os.POSIX_FADV_WILLNEED)
        while len(target):
            count = os.preadv(byte_range.descriptor, [target], low)
            if not count:
                raise OSError("the file ended early")
            low = low + count
            target = target[count:]

    def _read_direct(self, descriptor: int, block: memoryview, low: int, stop: int) -> bool:
        """Read past the page cache; False where the file system cannot, or the file ends early."""
        began = time.perf_counter()
        try:
            direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        except OSError:
            return False
        try:
            count = os.preadv(direct, [block[: -(-(stop - low) // PAGE) * PAGE]], low)
        except OSError:
            return False  # read through the cache, it says what is wrong
        finally:
            os.close(direct)
        self._num_bytes, self._seconds = (
            self._num_bytes + count,
            self._seconds + time.perf_counter() - began,
        )
        return count >= stop - low


def read_ahead(ranges: Iterable[ByteRange], what: str = "") -> Generator[ReadPart, None, None]:
    """Yield the bytes of ranges, in order and in parts; each part is valid until the next is asked
    for.

    what: names the work if its progress is to be shown.
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
    """Cut ranges into requests of at most a block; adjacent ranges share one."""
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
