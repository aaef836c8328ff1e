"""A disk as a tier: one unnamed file per rank, moved in chunks by a few threads, past the page cache where it can be.

The file never has a name (or loses it at once), so nobody else can open it and nothing is left of it, whatever kills
the job.  Every chunk that comes back is compared with the sum of what was written.  An extent's memory is address
space; a chunk has pages only while it is used.  Made by engine/assemble.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..base.errors import StorageError
from ..base.memory import give_back, private_pages
from ..base.quantities import format_bytes
from .tier import OVER, Extent, Ticket, Traffic

SECTOR = 4096  # bytes that offsets, lengths and addresses are multiples of; every disk in use takes that


class State(Enum):
    """Where a chunk's bytes are."""

    HERE = "here"  # at their address; the file may have older ones
    LEAVING = "leaving"  # a thread writes them, and gives their pages back
    AWAY = "away"  # in the file
    ARRIVING = "arriving"  # a thread reads them


MOVES = {
    (State.HERE, State.LEAVING),
    (State.HERE, State.AWAY),  # dropped: the file has the same bytes
    (State.LEAVING, State.AWAY),
    (State.LEAVING, State.HERE),  # the write failed: nothing is lost
    (State.AWAY, State.ARRIVING),
    (State.AWAY, State.HERE),  # forgotten: new values are about to come
    (State.ARRIVING, State.HERE),
    (State.ARRIVING, State.AWAY),  # the read failed
}


@dataclass(frozen=True)
class DiskSettings:
    """threads: transfers at once.  block_bytes: the largest single request."""

    threads: int = 4
    block_bytes: int = 8 << 20


class Disk:
    """The disk tier of one rank."""

    def __init__(self, directory: Path, settings: DiskSettings | None = None) -> None:
        self.directory, self.settings = directory, settings or DiskSettings()
        self.reserved_bytes, self.traffic = 0, Traffic()
        self.descriptor, self.is_direct = _open_unnamed(directory)
        self._pool = ThreadPoolExecutor(self.settings.threads, "deepseek_zero disk")
        # No job is under way when this object goes, since jobs hold it; and a finalizer may run anywhere (inside
        # Thread.start, even), so it must not join threads: an executor's end with it by themselves.
        self._end = weakref.finalize(self, os.close, self.descriptor)

    def admit(self, nbytes: int, sharers: int) -> None:
        """Raise `StorageError` if `sharers` ranks cannot have so many bytes each."""
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize
        if nbytes * sharers > free:
            raise StorageError(
                f"offloaded states need {format_bytes(nbytes * sharers)} on '{self.directory}' "
                f"({format_bytes(nbytes)} for each of {sharers} ranks), {format_bytes(free)} are free.",
                "Checked before anything is written, so nothing is lost.",
                f"free some, name another nvme_path, or train a model of {free / (nbytes * sharers):.0%} of this size.",
            )

    def reserve(self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str) -> Extent:
        """So many zeros, with their place on the disk.  StorageError where it is full."""
        if not numel:
            return Extent(torch.empty(0, dtype=dtype))
        padded = -(-numel * dtype.itemsize // SECTOR) * SECTOR
        with _named(self, f"reserving {format_bytes(padded)} for {what}"):
            _allocate(self.descriptor, self.reserved_bytes, padded)
        offset, self.reserved_bytes = self.reserved_bytes, self.reserved_bytes + padded
        chunk = min(-(-chunk_numel * dtype.itemsize // SECTOR) * SECTOR, padded)
        return DiskExtent(self, numel, dtype, DiskPlace(offset, padded, chunk, what))

    def close(self) -> None:
        """Wait for what is under way and give the file up."""
        self._pool.shutdown(wait=True)
        self._end()

    # -- what extents ask

    def submit(self, job: Callable[[], None]) -> Future[None]:
        return self._pool.submit(job)

    def read(self, target: memoryview, offset: int) -> None:
        with self.traffic.transfer(read=len(target)):
            self._transfer(os.preadv, target, offset)

    def write(self, source: memoryview, offset: int) -> None:
        with self.traffic.transfer(written=len(source)):
            self._transfer(os.pwritev, source, offset)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            moved = call(self.descriptor, [memory[done : done + self.settings.block_bytes]], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"{done} of {len(memory)} bytes were there")
            done += moved
        if not self.is_direct:  # the page cache would hold the states a second time
            if call is os.pwritev:
                os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class DiskPlace:
    """Where an extent lies in its rank's file, in bytes."""

    offset: int
    nbytes: int
    chunk_bytes: int
    what: str


class DiskExtent(Extent):
    """One state in a rank's file."""

    def __init__(self, disk: Disk, numel: int, dtype: torch.dtype, place: DiskPlace) -> None:
        self.disk, self.place, self.itemsize = disk, place, dtype.itemsize
        self._bytes = private_pages(place.nbytes, torch.uint8)
        super().__init__(self._bytes.view(dtype)[:numel])
        chunks = -(-place.nbytes // place.chunk_bytes)
        self._states = [State.HERE] * chunks
        self._sums: list[int | None] = [None] * chunks  # None: the file has nothing of it
        self._changed: set[int] = set()  # may have other bytes than the file
        self._jobs: dict[int, Future[None]] = {}

    @property
    def rests_elsewhere(self) -> bool:
        return True

    @property
    def here_bytes(self) -> int:
        """Bytes that have, or may have, pages now."""
        return sum(len(self._range(n)) for n, state in enumerate(self._states) if state is not State.AWAY)

    def fetch(self, low: int, high: int) -> Ticket:
        coming = []
        for number in self._chunks(low, high):
            if self._states[number] is State.LEAVING:
                self._settle(number)
            if self._states[number] is State.AWAY:
                self._enter(number, State.ARRIVING)
                self._jobs[number] = self.disk.submit(self._reader(number))
            if self._states[number] is State.ARRIVING:
                coming.append(number)
        return Transfer(self, coming) if coming else OVER

    def look(self, low: int, high: int) -> Tensor:
        self.settle()
        self.fetch(low, high).wait()
        return self.memory[low:high]

    def part(self, low: int, high: int) -> Tensor:
        self.settle()
        self._changed.update(self._chunks(low, high))
        return self.look(low, high)

    def store(self, low: int, high: int) -> Ticket:
        going = []
        for number in self._chunks(low, high):
            if self._states[number] is State.ARRIVING:
                self._settle(number)
            if self._states[number] is State.HERE:
                self._changed.discard(number)
                self._enter(number, State.LEAVING)
                self._jobs[number] = self.disk.submit(self._writer(number))
            if self._states[number] is State.LEAVING:
                going.append(number)
        return Transfer(self, going) if going else OVER

    def drop(self, low: int, high: int) -> None:
        for number in self._chunks(low, high):
            if self._states[number] is State.ARRIVING:
                self._settle(number)
            if number in self._changed:
                self.store(number * self._chunk_numel, (number + 1) * self._chunk_numel)
            elif self._states[number] is State.HERE:
                give_back(self._piece(number))
                if self._sums[number] is not None:
                    self._enter(number, State.AWAY)

    def forget(self, low: int, high: int) -> None:
        for number in self._chunks(low, high):
            if self._states[number] in (State.ARRIVING, State.LEAVING):
                self._settle(number)
            self._sums[number] = None
            self._changed.discard(number)
            if self._states[number] is State.AWAY:
                self._enter(number, State.HERE)
            give_back(self._piece(number))

    # -- chunks

    def wait_for(self, chunks: Iterable[int]) -> None:
        """Wait for these chunks' transfers."""
        for number in chunks:
            self._settle(number)

    def is_settled(self, chunks: Iterable[int]) -> bool:
        return all(number not in self._jobs or self._jobs[number].done() for number in chunks)

    def _settle(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is None:
            return
        came = self._states[number] is State.ARRIVING
        began = time.perf_counter()
        try:
            with _named(self.disk, f"{'reading' if came else 'writing'} {self.place.what}"):
                job.result()
        except StorageError:
            if not came:
                self._changed.add(number)
            self._enter(number, State.AWAY if came else State.HERE)
            raise
        finally:
            self.disk.traffic.waited_seconds += time.perf_counter() - began
        self._enter(number, State.HERE if came else State.AWAY)

    def _enter(self, number: int, state: State) -> None:
        if (self._states[number], state) not in MOVES:
            raise AssertionError(f"a chunk of {self.place.what} cannot go from {self._states[number]} to {state}")
        self._states[number] = state

    def _chunks(self, low: int, high: int) -> range:
        if low >= high:
            return range(0)
        size = self.place.chunk_bytes
        return range(low * self.itemsize // size, -(-high * self.itemsize // size))

    @property
    def _chunk_numel(self) -> int:
        return self.place.chunk_bytes // self.itemsize

    def _range(self, number: int) -> range:
        size = self.place.chunk_bytes
        return range(number * size, min((number + 1) * size, self.place.nbytes))

    def _piece(self, number: int) -> Tensor:
        span = self._range(number)
        return self._bytes[span.start : span.stop]

    def _reader(self, number: int) -> Callable[[], None]:
        piece, offset, expected = self._piece(number), self.place.offset + self._range(number).start, self._sums[number]

        def read() -> None:
            self.disk.read(_view(piece), offset)
            if sum_of(piece) != expected:
                raise OSError(errno.EBADMSG, "the bytes are not those that were written")

        return read

    def _writer(self, number: int) -> Callable[[], None]:
        piece, offset = self._piece(number), self.place.offset + self._range(number).start

        def write() -> None:
            self._sums[number] = sum_of(piece)
            self.disk.write(_view(piece), offset)
            give_back(piece)

        return write


class Transfer:
    """Chunks of one extent on their way."""

    def __init__(self, extent: DiskExtent, chunks: list[int]) -> None:
        self.extent, self.chunks = extent, chunks

    def wait(self) -> None:
        self.extent.wait_for(self.chunks)

    def is_done(self) -> bool:
        return self.extent.is_settled(self.chunks)


def sum_of(piece: Tensor) -> int:
    """The sum of all 8-byte words, modulo 2^64: found at memory speed, and other after any change of one word."""
    return int(np.add.reduce(piece.numpy().view(np.uint64)))


def _view(piece: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * piece.nbytes).from_address(piece.data_ptr())).cast("B")


def _open_unnamed(directory: Path) -> tuple[int, bool]:
    """(descriptor of a file without a name, whether it goes past the page cache)."""
    try:
        for flag in (os.O_DIRECT, 0):
            descriptor, page = _unnamed(directory, flag), private_pages(SECTOR, torch.uint8)
            try:
                os.pwritev(descriptor, [_view(page)], 0)  # some file systems take the flag and refuse what follows
                return descriptor, flag != 0
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EINVAL or not flag:
                    raise
    except OSError as error:
        raise _refusal(error, directory, "opening a file for states") from error
    raise AssertionError("unreachable: the plain file either opened or raised")


def _unnamed(directory: Path, flag: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | flag
    with suppress(OSError, AttributeError):
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    handle, name = tempfile.mkstemp(prefix="deepseek_zero-", dir=directory)  # a file system without O_TMPFILE
    try:
        return os.open(name, flags)
    finally:
        os.close(handle)
        os.unlink(name)


def _allocate(descriptor: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, offset + nbytes)  # a file system that cannot promise; a full disk shows at a write


class _named:
    """Turns an OSError of the disk into a StorageError that says what was going on."""

    def __init__(self, disk: Disk, what: str) -> None:
        self.disk, self.what = disk, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _refusal(error, self.disk.directory, self.what) from error


ADVICE = {
    errno.ENOSPC: "free some space there, or name another nvme_path",
    errno.EDQUOT: "free some of your quota there, or name another nvme_path",
    errno.EROFS: "mount it for writing, or name another nvme_path",
    errno.EACCES: "let this user write there, or name another nvme_path",
    errno.ENOENT: "make that directory, or name another nvme_path",
    errno.ENOTDIR: "name a directory",
    errno.EBADMSG: "look at the disk; start again from the last checkpoint",
    errno.EIO: "look at the disk (dmesg, smartctl); start again from the last checkpoint",
}


def _refusal(error: OSError, directory: Path, what: str) -> StorageError:
    number = error.errno or errno.EIO
    return StorageError(
        f"{what} on '{directory}' failed: {error.strerror or error}.",
        "States that a run offloads are kept in a file there.",
        ADVICE.get(number, "name another nvme_path") + ".",
    )
