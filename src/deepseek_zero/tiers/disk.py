"""A disk as a tier: one unnamed file per rank.

A few threads transfer chunks of the file, with O_DIRECT if the file system supports it. The file is
created unnamed, or its name is removed immediately. No other process can open it, and a killed job
leaves no file. Every chunk that is read is compared with the checksum of the written bytes. The
memory of a storage is address space, and a chunk has pages only while it is used.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..base.capabilities import Capability
from ..base.errors import StorageError
from ..base.memory import PAGE, private_pages, return_pages
from ..base.quantities import ceil_div, format_bytes, rounded_up
from ..base.work import Work
from .tier import COMPLETED, HostStorage, TierMemory, TransferEvent

# Offsets, lengths and addresses are multiples of PAGE, as O_DIRECT requires on common disks
SECTOR = 512  # bytes of the smallest transfer of a disk


class ChunkState(Enum):
    """Where the bytes of a chunk are: in memory, in the file, or in transfer."""

    HERE = "here"  # in memory; the file may have older values
    # A thread writes the chunk, and frees its pages unless they are needed again by then.
    LEAVING = "leaving"
    AWAY = "away"  # only in the file
    ARRIVING = "arriving"  # a thread reads the chunk


MOVES = {
    (ChunkState.HERE, ChunkState.LEAVING),
    (ChunkState.HERE, ChunkState.AWAY),  # evicted: the file has the same bytes
    (ChunkState.LEAVING, ChunkState.AWAY),
    # Needed again before the write was complete, or the write failed and the values are still here.
    (ChunkState.LEAVING, ChunkState.HERE),
    (ChunkState.AWAY, ChunkState.ARRIVING),
    (ChunkState.AWAY, ChunkState.HERE),  # discarded: new values will be written
    (ChunkState.ARRIVING, ChunkState.HERE),
    (ChunkState.ARRIVING, ChunkState.AWAY),  # the read failed
}


@dataclass(frozen=True)
class DiskSettings:
    """Settings of a disk.

    Attributes:
        threads: Number of concurrent transfers.
        block_bytes: Size of the largest single request in bytes.
    """

    threads: int = 4
    block_bytes: int = 8 << 20


class Disk(TierMemory):
    """The disk tier of one rank."""

    def __init__(self, directory: Path, settings: DiskSettings | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.settings = settings or DiskSettings()
        self.lock = threading.Lock()
        self.descriptor, self.is_direct = _open_unnamed(directory)
        self.can_reserve = True  # whether the file system can reserve space (fallocate)
        self._pool = ThreadPoolExecutor(self.settings.threads, "deepseek_zero disk")
        # Jobs hold a reference to this object, so no job is running when it is freed. A finalizer
        # can run anywhere, even inside Thread.start, so it must not join threads. The threads of an
        # executor end without help when the executor is freed.
        self._end = weakref.finalize(self, os.close, self.descriptor)

    def capabilities(self) -> list[Capability]:
        name = f"states on '{self.directory}'"
        if not self.is_direct:
            why = (
                "the file system refuses O_DIRECT; each block is written twice: to the cache, and "
                "from there"
            )
            return [Capability(name, "through the page cache", why)]
        if not self.can_reserve:
            why = "the file system knows no fallocate; a full disk shows at a write"
            return [Capability(name, "past the page cache, room not set aside", why)]
        return [Capability(name, "past the page cache")]

    def check_space(self, nbytes: int, sharers: int) -> None:
        """Raise `StorageError` if the disk has no space for the states of all ranks.

        Args:
            nbytes: Bytes for each rank.
            sharers: Number of ranks that use this disk.
        """
        free = self.free_bytes(self.directory)
        if nbytes * sharers > free:
            raise StorageError(
                f"offloaded states need {format_bytes(nbytes * sharers)} on '{self.directory}' "
                f"({format_bytes(nbytes)} for each of {sharers} ranks), {format_bytes(free)} are "
                "free.",
                "Checked before anything is written, so nothing is lost.",
                "free some, name another nvme_path, or train a model of "
                f"{free / (nbytes * sharers):.0%} of this size.",
            )

    @staticmethod
    def free_bytes(directory: Path) -> int:
        """Return the bytes that this user can write to the disk of a directory.

        The directory does not have to exist. The result is 0 if the disk cannot be queried.
        """
        try:
            parents = (directory, *directory.absolute().parents)
            found = os.statvfs(next(path for path in parents if path.exists()))
        except OSError:
            return 0  # opening a file there raises an error with the reason
        return found.f_bavail * found.f_frsize

    def reserve(
        self, numel: int, dtype: torch.dtype, chunk_numel: int, what: str, *, is_copied: bool = True
    ) -> HostStorage:
        """Return a zeroed storage with its place in the file.

        Args:
            numel: Number of elements.
            dtype: Data type.
            chunk_numel: Elements that are transferred together.
            what: Name of the state for error messages.
            is_copied: Not used here.

        Raises:
            StorageError: The disk is full.
        """
        if not numel:
            return HostStorage(torch.empty(0, dtype=dtype, device="cpu"))
        padded = rounded_up(numel * dtype.itemsize, PAGE)
        with _named(self, f"reserving {format_bytes(padded)} for {what}"):
            self.can_reserve &= _allocate(self.descriptor, self.reserved_bytes, padded)
        start = self.reserved_bytes
        self.reserved_bytes = self.reserved_bytes + padded
        chunk = min(rounded_up(chunk_numel * dtype.itemsize, PAGE), padded)
        return DiskStorage(self, numel, dtype, range(start, start + padded, chunk), what)

    def close(self) -> None:
        """Wait for all transfers, and close the file."""
        self._pool.shutdown(wait=True)
        self._end()

    # -- used by storages

    def submit(self, job: Callable[[], bool]) -> Future[bool]:
        """Run a transfer in one of the disk's threads."""
        return self._pool.submit(job)

    def read(self, target: memoryview, offset: int, event: TransferEvent) -> None:
        """Read bytes of the file, starting at an offset, until the target is full."""
        with self.traffic.transfer(event):
            self._transfer(os.preadv, target, offset)

    def write(self, source: memoryview, offset: int, event: TransferEvent) -> None:
        """Write all bytes of the source to the file, starting at an offset."""
        with self.traffic.transfer(event):
            self._transfer(os.pwritev, source, offset)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], memory: memoryview, offset: int
    ) -> None:
        done = 0
        while done < len(memory):
            block = memory[done : done + self.settings.block_bytes]
            moved = call(self.descriptor, [block], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"{done} of {len(memory)} bytes were there")
            done += moved
        if not self.is_direct:  # keep no second copy in the page cache
            if call is os.pwritev:
                os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


class Chunk:
    """A part of a storage that is transferred as a whole.

    It has an address in memory and an offset in the file.
    """

    def __init__(self, disk: Disk, piece: Tensor, offset: int, what: str) -> None:
        self.disk = disk
        self.piece = piece
        self.offset = offset
        self.what = what
        self.state = ChunkState.HERE
        self.sum: int | None = None  # checksum of the bytes in the file; None without any
        self.is_changed = False  # whether the bytes may differ from the file
        # The future returns whether the bytes are in memory after the transfer.
        self._job: tuple[Future[bool], TransferEvent] | None = None
        # A writing thread uses the next two, so they change under the disk's lock during a write.
        self._is_wanted = False  # keep the pages after the write in progress
        self._is_let_go = False  # too late for `_is_wanted`: the writer has decided
        self._is_kept = False  # keep the pages after every write, until `evict`

    @property
    def is_idle(self) -> bool:
        """Return whether no transfer of the chunk is in progress."""
        return self._job is None or self._job[0].done()

    def fetch(self) -> bool:
        """Start to read the chunk into memory, and return whether a transfer is in progress."""
        if self.state is ChunkState.LEAVING and not self._hold():
            self.wait()
        if self.state is ChunkState.AWAY:
            self._start(ChunkState.ARRIVING)
        return self.state is ChunkState.ARRIVING

    def mark_dirty(self) -> None:
        """Prepare the chunk for a write to its memory."""
        if self.state is ChunkState.LEAVING:
            self.wait()  # a write in progress must not see new bytes
        self.is_changed = True

    def keep_until_evict(self) -> None:
        """Keep the pages after `store`, until `evict`."""
        self._is_kept = True

    def store(self) -> bool:
        """Start to write the chunk to the file, and return whether a transfer is in progress."""
        if self.state is ChunkState.ARRIVING:
            self.wait()
        if self.state is ChunkState.HERE:
            self.is_changed = False
            self._is_wanted = self._is_kept
            self._start(ChunkState.LEAVING)
        elif self.state is ChunkState.LEAVING and not self._is_kept:
            self._let_leave()
        return self.state is ChunkState.LEAVING

    def evict(self) -> None:
        """Free the pages, after the chunk has been stored if it was changed."""
        self._is_kept = False
        if self.state is ChunkState.ARRIVING:
            self.wait()
        if self.state is ChunkState.LEAVING:
            self._let_leave()
        elif self.is_changed:
            self.store()
        elif self.state is ChunkState.HERE:
            self._return_pages()

    def discard(self) -> None:
        """Drop the values and the pages."""
        self._is_kept = False
        if self.state in (ChunkState.ARRIVING, ChunkState.LEAVING):
            self.wait()
        self.sum = None
        self.is_changed = False
        if self.state is ChunkState.AWAY:
            self._enter(ChunkState.HERE)
        return_pages(self.piece)

    def wait(self) -> None:
        """Wait for the transfer in progress; raise `StorageError` if it failed."""
        if self._job is None:
            return
        job, event = self._job
        self._job = None
        doing = "reading" if event.is_read else "writing"
        try:
            with self.disk.traffic.waiting(event), _named(self.disk, f"{doing} {self.what}"):
                is_here = job.result()
        except StorageError:
            self.is_changed |= not event.is_read
            before = ChunkState.AWAY if event.is_read else ChunkState.HERE
            self._enter(before)
            raise
        finally:
            self._is_wanted = self._is_let_go = False
        state = ChunkState.HERE if is_here else ChunkState.AWAY
        self._enter(state)

    def _start(self, state: ChunkState) -> None:
        """Submit the transfer to a thread."""
        self._enter(state)
        is_read = state is ChunkState.ARRIVING
        event = self.disk.traffic.request(self.what, self.piece.nbytes, is_read=is_read)
        work = self._read if is_read else self._write
        self._job = self.disk.submit(partial(work, event)), event

    def _hold(self) -> bool:
        """Keep the pages of a chunk that is being stored; return False if it is too late."""
        with self.disk.lock:
            self._is_wanted |= not self._is_let_go
            return self._is_wanted

    def _let_leave(self) -> None:
        """Undo a previous `_hold`, so that the pages are freed after the transfer."""
        with self.disk.lock:
            is_late = self._is_wanted and self._is_let_go
            self._is_wanted &= is_late
        if is_late:
            self.wait()
            self._return_pages()

    def _return_pages(self) -> None:
        return_pages(self.piece)
        if self.sum is not None:
            self._enter(ChunkState.AWAY)

    def _enter(self, state: ChunkState) -> None:
        if (self.state, state) not in MOVES:
            raise AssertionError(f"a chunk of {self.what} cannot go from {self.state} to {state}")
        self.state = state

    # -- run by the disk's threads

    def _read(self, event: TransferEvent) -> bool:
        self.disk.read(_view(self.piece), self.offset, event)
        if sum_of(self.piece) != self.sum:
            raise OSError(errno.EBADMSG, "the bytes are not those that were written")
        return True

    def _write(self, event: TransferEvent) -> bool:
        self.sum = sum_of(self.piece)
        self.disk.write(_view(self.piece), self.offset, event)
        with self.disk.lock:
            self._is_let_go = True
            is_wanted = self._is_wanted
        if not is_wanted:
            return_pages(self.piece)
        return is_wanted


class DiskStorage(HostStorage):
    """A state in the file of a rank."""

    is_offloaded = True

    def __init__(self, disk: Disk, numel: int, dtype: torch.dtype, place: range, what: str) -> None:
        """Reserve address space for the state.

        Args:
            disk: Disk whose file contains the state.
            numel: Number of elements.
            dtype: Data type.
            place: Byte offsets of the chunks in the file, up to the end of the state.
            what: Name of the state for error messages.
        """
        memory = private_pages(place.stop - place.start, torch.uint8)
        super().__init__(memory.view(dtype)[:numel])
        self._chunk_numel = place.step // dtype.itemsize
        pieces = memory.split(place.step)
        self.chunks = [
            Chunk(disk, piece, at, what) for piece, at in zip(pieces, place, strict=True)
        ]

    def fetch(self, low: int, high: int) -> Work:
        return Transfer.of([chunk for chunk in self._of(low, high) if chunk.fetch()])

    def keep_until_evict(self) -> None:
        for chunk in self.chunks:
            chunk.keep_until_evict()

    def read(self, low: int, high: int) -> Tensor:
        self.wait_for_copy()
        self.fetch(low, high).wait()
        return self.memory[low:high]

    def write(self, low: int, high: int) -> Tensor:
        self.wait_for_copy()
        for chunk in self._of(low, high):
            chunk.mark_dirty()
        return self.read(low, high)

    def store(self, low: int, high: int) -> Work:
        self.wait_for_copy()
        return Transfer.of([chunk for chunk in self._of(low, high) if chunk.store()])

    def evict(self, low: int, high: int) -> None:
        self.wait_for_copy()
        for chunk in self._of(low, high):
            chunk.evict()

    def discard(self, low: int, high: int) -> None:
        for chunk in self._of(low, high):
            chunk.discard()

    def _of(self, low: int, high: int) -> Sequence[Chunk]:
        size = self._chunk_numel
        return self.chunks[low // size : ceil_div(high, size)] if low < high else ()


@dataclass(frozen=True)
class Transfer:
    """Chunks that are being transferred."""

    chunks: Sequence[Chunk]

    @staticmethod
    def of(chunks: Sequence[Chunk]) -> Work:
        """Return a handle for the transfers of these chunks."""
        return Transfer(chunks) if chunks else COMPLETED

    def wait(self) -> None:
        """Wait until all chunks have been transferred."""
        for chunk in self.chunks:
            chunk.wait()

    def is_done(self) -> bool:
        """Return whether all chunks have been transferred."""
        return all(chunk.is_idle for chunk in self.chunks)


def sum_of(piece: Tensor) -> int:
    """Return the checksum of a chunk.

    The 8-byte integers of each sector are added, and each sum is multiplied by an odd number that
    depends on the sector's position, modulo 2^64. Every change of one integer changes the checksum,
    and so do sectors or pages that are swapped. A disk never transfers less than a sector.
    """
    sectors = piece.numpy().view(np.uint64).reshape(-1, SECTOR // 8)
    return int(np.einsum("ij->i", sectors) @ _odd_numbers(len(sectors)))


@cache
def _odd_numbers(count: int) -> npt.NDArray[np.uint64]:
    """Return odd numbers without a pattern (splitmix64)."""
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed | np.uint64(1)


def _view(piece: Tensor) -> memoryview:
    return memoryview(piece.numpy())  # type: ignore[arg-type]


def _open_unnamed(directory: Path) -> tuple[int, bool]:
    """Open an unnamed file in a directory, which is created if necessary.

    Returns:
        The file descriptor, and whether the file bypasses the page cache.
    """
    try:
        _make_private(directory)
        for flag in (os.O_DIRECT, 0):
            descriptor = -1
            try:
                descriptor = _unnamed(directory, flag)
                page = private_pages(PAGE, torch.uint8)
                # Some file systems accept the flag and fail on the first write
                os.pwritev(descriptor, [_view(page)], 0)
                return descriptor, flag != 0
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                if error.errno != errno.EINVAL or not flag:
                    raise
    except OSError as error:
        raise _refusal(error, directory, "opening a file for states") from error
    raise AssertionError("unreachable: the plain file either opened or raised")


def _make_private(directory: Path) -> None:
    """Create a directory and its missing parents with access for this user only.

    Existing directories are not changed.
    """
    for path in [
        path for path in (*reversed(directory.absolute().parents), directory) if not path.exists()
    ]:
        with suppress(FileExistsError):  # another rank has created it
            path.mkdir(0o700)


def _unnamed(directory: Path, flag: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | flag
    with suppress(OSError, AttributeError):
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    # The file system does not support O_TMPFILE
    handle, name = tempfile.mkstemp(prefix="deepseek_zero-", dir=directory)
    try:
        return os.open(name, flags)
    finally:
        os.close(handle)
        os.unlink(name)


def _allocate(descriptor: int, offset: int, nbytes: int) -> bool:
    """Extend the file; return False if the file system cannot reserve the space."""
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, offset + nbytes)
        return False
    return True


@contextmanager
def _named(disk: Disk, what: str) -> Iterator[None]:
    """Convert an OSError of the disk to a `StorageError` that names the operation."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _refusal(error, disk.directory, what) from error


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
