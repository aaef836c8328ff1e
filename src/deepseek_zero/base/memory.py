"""Memory outside of torch's allocator: private pages and shared pages.

Shared pages are memfds, which have no name. A killed process leaves nothing in a file system, the
size of /dev/shm does not matter, and only a process with the descriptor can map them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import host
from .capabilities import Capability
from .errors import OutOfMemoryError
from .quantities import ceil_div, rounded_up

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
NAME = "deepseek_zero"  # name of the pages in /proc/PID/maps, by which they cannot be opened
# About the size of the activations and of one unit's gradients of a model for a laptop
KEPT_BYTES = 256 << 20
LARGEST_ON_HEAP = 32 << 20  # the C library's own upper limit
# mallopt's numbers
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: map existing pages without copying
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: allocate the pages, keep their contents
# Largest range of one call, because the driver holds a lock of the whole machine meanwhile
LOCK_BYTES = 1 << 30
_TOUCH_BYTES = 32 << 20  # per call of madvise
HOLES_BYTES = 64 << 20  # growth of the heap after which its holes are returned
_TRIAL_BYTES = 256 << 20  # after which huge pages are disabled if they are slow
# bytes per second; a lower rate means that the system moves memory to form huge pages
SLOW_TOUCH = 1e9
_ENTRY = 8  # bytes per page in /proc/self/pagemap
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_IS_SHARED = 61  # the bit of a shared page; clear on a page that was copied for this process


def keep_freed_memory() -> bool:
    """Make the C library keep up to `KEPT_BYTES` of freed memory instead of returning it.

    By default it returns such memory at once and requests it again shortly after, page by page: the
    gradients of a unit in the backward of every unit.

    Returns:
        Whether the setting was changed. False if the user has set it (MALLOC_TRIM_THRESHOLD_,
        GLIBC_TUNABLES), or if another allocator or C library is used.
    """
    if _heap_variables():
        return False
    try:
        change = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(change(_MMAP_THRESHOLD, LARGEST_ON_HEAP) and change(_TRIM_THRESHOLD, KEPT_BYTES))


def _heap_variables() -> list[str]:
    """Return the variables with which the user has configured the C library's heap."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    return [name for name in names if name in os.environ]


def capabilities(*, keeps_freed: bool) -> list[Capability]:
    """Return the memory features that the system grants this process.

    Args:
        keeps_freed: The result of `keep_freed_memory`.
    """
    return [_huge_pages(), _written_pages(), _freed_memory(keeps_freed)]


def _freed_memory(is_kept: bool) -> Capability:
    name = "freed memory"
    stated = _heap_variables()
    if is_kept:
        return Capability(name, f"up to {KEPT_BYTES >> 20} MiB are kept for the next use")
    if stated:
        return Capability(name, f"set by {', '.join(stated)}")
    return Capability(name, "returned to the system", "only glibc's own allocator can keep it")


def _huge_pages() -> Capability:
    name = "memory of states"
    mode = host.THIS_HOST.huge_pages()
    if mode in ("always", "madvise"):
        return Capability(name, f"huge pages ({mode})")
    why = f"transparent huge pages: {mode or 'none'}, so 512 page faults instead of one"
    return Capability(name, f"pages of {PAGE} bytes", why)


def _written_pages() -> Capability:
    name = "weights that ranks share"
    try:
        os.pread(_page_map(os.getpid()), _ENTRY, 0)
    except OSError as error:
        why = (
            f"/proc/self/pagemap cannot be read ({error.strerror}), so it is unknown whether "
            "they were written"
        )
        return Capability(name, "mapped again after each use", why)
    return Capability(name, "stay mapped")


def private_pages(numel: int, dtype: torch.dtype, *, locked: bool = False) -> Tensor:
    """Return zeroed memory of this process on separate pages.

    It starts at the boundary of a huge page and uses huge pages if it is large enough. Linux before
    6.13 does not align mappings of every size.

    Args:
        numel: Number of elements.
        dtype: Dtype of the elements.
        locked: Whether to page-lock the memory for copies to and from a GPU, until it is freed.

    Returns:
        A 1-D tensor of zeros.

    Raises:
        OutOfMemoryError: CUDA refuses to lock the pages.
    """
    nbytes = numel * dtype.itemsize
    pages, start = _map_private(nbytes)
    found = torch.frombuffer(pages, dtype=dtype, count=numel, offset=start)
    if locked:
        pages.lock(found.data_ptr(), found.nbytes)
    return found


def _map_private(nbytes: int) -> tuple[_PrivatePages, int]:
    """Return a new mapping and the offset of its first usable byte.

    The offset is at the boundary of a huge page if one fits.
    """
    huge = nbytes // HUGE_PAGE * HUGE_PAGE
    mapped = nbytes + (HUGE_PAGE if huge else 0)
    pages = _PrivatePages(-1, mapped, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE if huge else 0
    with suppress(OSError, AttributeError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return pages, start


class _PrivatePages(mmap.mmap):
    """A mapping with ranges that CUDA keeps locked until it is unmapped.

    The tensors over it keep it alive. The destructor unlocks the ranges before the system can
    assign their addresses to another mapping, because CUDA refuses to lock a range that overlaps a
    locked one.
    """

    locked: tuple[int, ...] = ()  # addresses of the locked ranges
    process = 0

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a range of this mapping."""
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            _clear_cuda_error(cudart)
            raise _lock_refusal(nbytes, int(error), cudart.cudaGetErrorString(error))
        self.locked += (address,)
        self.process = os.getpid()

    def __del__(self) -> None:
        if self.process == os.getpid():  # a forked child has no locks
            for address in self.locked:
                _unlock(address)


class Slab:
    """Memory of this process that is mapped at once and used in pieces.

    It uses huge pages if they fit. A piece is a tensor with a separate storage, and is free again
    when its last view is gone; its pages stay allocated. Nothing is touched before `touch` or
    locked before `lock`.

    Args:
        pieces: The size of each piece in bytes, whole pages.
    """

    def __init__(self, pieces: Sequence[int]) -> None:
        self.nbytes = sum(pieces)
        self._pages, self._start = _map_private(self.nbytes)
        self._sizes = list(pieces)
        self._free: dict[int, deque[int]] = {nbytes: deque() for nbytes in pieces}
        self._used: set[int] = set()
        for offset, nbytes in self._offsets():
            self._free[nbytes].append(offset)

    def _offsets(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and the bytes of each piece."""
        offset = self._start
        for nbytes in self._sizes:
            yield offset, nbytes
            offset += nbytes

    @property
    def _address(self) -> int:
        """Return the address of the mapping's first byte."""
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=1).data_ptr()

    def take(self, nbytes: int, dtype: torch.dtype) -> Tensor | None:
        """Return a zeroed flat tensor over a free piece.

        Args:
            nbytes: The size of the piece.
            dtype: The type of the elements.

        Returns:
            The tensor, or None if no piece of this size is free.
        """
        free = self._free.get(nbytes)
        if not free:
            return None
        offset = free.popleft()
        piece = (ctypes.c_char * nbytes).from_buffer(self._pages, offset)
        weakref.finalize(piece, free.append, offset).atexit = False
        found = torch.frombuffer(piece, dtype=dtype)
        if offset in self._used:
            found.zero_()
        self._used.add(offset)
        return found

    def touch(
        self,
        threads: int,
        advance: Callable[[int], None],
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Allocate all pages with several threads, so that no first use waits for them.

        The contents are not changed. Without MADV_POPULATE_WRITE (Linux before 5.14) nothing
        happens.

        Args:
            threads: The number of threads.
            advance: Called with the number of bytes whose pages were allocated.
            begin: Called first in each thread. The system places pages on the NUMA node of the
                thread that touches them.
        """
        if sys.platform != "linux":
            return
        address = self._address + self._start
        slices = []
        for low in range(0, self.nbytes, _TOUCH_BYTES):
            slices.append((address + low, min(_TOUCH_BYTES, self.nbytes - low)))
        count = _TRIAL_BYTES // _TOUCH_BYTES
        trial = slices[:count]
        rest = slices[count:]
        workers = max(1, min(threads, len(slices)))
        with ThreadPoolExecutor(workers, "deepseek_zero touch", begin) as pool:
            began = time.perf_counter()
            _touch(trial, pool, advance)
            seconds = time.perf_counter() - began
            is_slow = seconds * SLOW_TOUCH > _TRIAL_BYTES
            if rest and is_slow:
                _madvise()(rest[0][0], sum(nbytes for _, nbytes in rest), mmap.MADV_NOHUGEPAGE)
            _touch(rest, pool, advance)

    def lock(self, advance: Callable[[int], None]) -> None:
        """Page-lock all memory for copies of a GPU, in ranges of at most `LOCK_BYTES`.

        A range ends at the end of a piece, unless that piece is larger than a range. It stays
        locked until the slab and all pieces are gone.

        Args:
            advance: Called with the number of bytes that were locked.

        Raises:
            OutOfMemoryError: CUDA refuses to lock the pages.
        """
        address = self._address
        for low, high in self._lock_ranges():
            self._pages.lock(address + low, high - low)
            advance(high - low)

    def _lock_ranges(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for offset, nbytes in self._offsets():
            stop = offset + nbytes
            if found and stop - found[-1][0] <= LOCK_BYTES:
                found[-1] = (found[-1][0], stop)
                continue
            found += [(low, min(low + LOCK_BYTES, stop)) for low in range(offset, stop, LOCK_BYTES)]
        return found


def _touch(
    slices: Sequence[tuple[int, int]], pool: ThreadPoolExecutor, advance: Callable[[int], None]
) -> None:
    """Allocate the pages of ranges (address, bytes) in the threads of a pool."""
    calls = [
        pool.submit(_madvise(), address, nbytes, _POPULATE_WRITE) for address, nbytes in slices
    ]
    for call, (_, nbytes) in zip(calls, slices, strict=True):
        if call.result() == 0:  # otherwise the first use allocates these pages
            advance(nbytes)


def parts_in_lock_ranges(host: Tensor) -> Iterator[slice]:
    """Yield slices of a flat tensor of host memory, each within one locked range.

    CUDA refuses a copy that crosses from one locked range into the next. Only pieces larger than a
    range have several.
    """
    first = host.storage_offset()
    last = host.storage_offset() + host.numel()
    step = LOCK_BYTES // host.itemsize
    for low in range(first // step * step, last, step):
        yield slice(max(low, first) - first, min(low + step, last) - first)


def _unlock(address: int) -> None:
    """Unlock the range that starts at an address.

    An error cannot be handled here, so it is only cleared.
    """
    with suppress(Exception):  # Python or CUDA is shutting down, and the system unlocks everything
        cudart = torch.cuda.cudart()
        if int(cudart.cudaHostUnregister(address)) != 0:
            _clear_cuda_error(cudart)


def _clear_cuda_error(cudart: Any) -> None:
    """Reset CUDA's last error, which the next kernel launch would raise otherwise."""
    read = getattr(cudart, "cudaGetLastError", None)  # torch 2.11 to 2.13 do not show it
    if read is not None:
        read()
        return
    with suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda")  # torch reads and raises the error after each launch


def _lock_refusal(nbytes: int, error: int, name: str) -> OutOfMemoryError:
    what = f"{nbytes:,} bytes of host memory cannot be page-locked: CUDA error {error}, {name}."
    if error == _CUDA_OUT_OF_MEMORY:
        why = (
            "The host has no more memory that may be locked; a limit of the process (ulimit -l) "
            "can be the cause."
        )
        return OutOfMemoryError(
            what, why, 'raise that limit, offload less, or set "pin_memory": false.'
        )
    why = "Copies between such memory and a GPU run while it computes."
    return OutOfMemoryError(what, why, 'set "pin_memory": false to train with pageable memory.')


def return_pages(tensor: Tensor) -> None:
    """Discard the contents of CPU memory and return its whole pages to the system.

    Shared pages are discarded for every process that maps them. On other systems than Linux nothing
    happens.
    """
    # MADV_REMOVE is refused unless the pages are shared
    if _advise(tensor, "MADV_REMOVE") != 0:
        _advise(tensor, "MADV_DONTNEED")


def offer_pages(tensor: Tensor) -> None:
    """Discard the contents of private CPU memory, and let the system take its whole pages.

    The system takes them only if it runs out of memory. Until then a write finds the same pages,
    without page faults. On other systems than Linux nothing happens.
    """
    _advise(tensor, "MADV_FREE")


def _advise(tensor: Tensor, advice: str) -> int:
    """Call madvise for the whole pages of a tensor on Linux; return its result."""
    if sys.platform != "linux":
        return 0
    start = rounded_up(tensor.data_ptr(), PAGE)
    nbytes = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - start
    if nbytes <= 0:
        return 0
    return _madvise()(start, nbytes, getattr(mmap, advice))


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def is_cached(descriptor: int, start: int, stop: int) -> bool:
    """Return whether the page cache contains bytes [start, stop) of a file.

    Nothing is read. A non-blocking read (RWF_NOWAIT) would start to read the whole range.

    Args:
        descriptor: Descriptor of the open file.
        start: The first byte, at the start of a page.
        stop: The byte after the last.

    Returns:
        False if the system does not provide the information.
    """
    length = stop - start
    try:
        pages = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        address = np.frombuffer(pages, np.uint8).ctypes
        there = np.zeros(ceil_div(length, PAGE), np.uint8)
        result = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(length), there.ctypes)
    except (OSError, ValueError, AttributeError):  # no such function in this C library
        return False
    return result == 0 and bool((there & 1).all())


def trim_heap() -> None:
    """Return free memory inside the C library's heap to the system.

    `KEPT_BYTES` on top of the heap are kept. A freed tensor under a small live allocation leaves a
    hole. glibc (measured with version 2.36) never places a tensor of the same size there, because
    the alignment that torch requests does not fit. Nothing happens with other C libraries.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(KEPT_BYTES))


class _HeapSizes(ctypes.Structure):
    """The first member of glibc's `struct mallinfo2`, and the size of the others."""

    _fields_ = (("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9))


class GrowingHeap:
    """Trims the heap of the C library when it has grown because of holes.

    A heap whose holes are reused does not grow from step to step. `trim_heap` would return them
    nevertheless, and the next tensors there would get their memory back page by page.
    """

    def __init__(self) -> None:
        self._nbytes = 0

    def trim(self) -> None:
        """Call `trim_heap` if the heap has grown by `HOLES_BYTES` since it was trimmed.

        The heap is trimmed in every call if its size is not known (before glibc 2.33).
        """
        nbytes = heap_bytes()
        if nbytes is None or nbytes >= self._nbytes + HOLES_BYTES:
            trim_heap()
            nbytes = heap_bytes() or 0
            self._nbytes = nbytes
        self._nbytes = min(self._nbytes, nbytes)


HEAP = GrowingHeap()  # of this process


def heap_bytes() -> int | None:
    """Return the size of the C library's heap with its holes, or None if it is not known."""
    sizes = _mallinfo()
    return None if sizes is None else int(sizes().arena)


@lru_cache(maxsize=1)
def _mallinfo() -> Callable[[], _HeapSizes] | None:
    try:
        sizes = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # another C library
        return None
    sizes.restype = _HeapSizes
    return sizes


class Segment:
    """Pages that several processes map; they exist until the last mapping is removed."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Return a new segment of zeroed pages.

        Raises:
            OutOfMemoryError: The host does not have the memory. Otherwise the first use would fail
                with SIGBUS.
        """
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise OutOfMemoryError(
                f"{nbytes:,} bytes of shared memory cannot be allocated: {error.strerror}.",
                "Ranks of one host exchange weights and gradients through it.",
                'use a smaller model or batch, or "transport": "gloo".',
            ) from error
        return cls(descriptor, nbytes)

    def map(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a part of the segment as a tensor that all processes read and write.

        Args:
            start: Offset of the first byte in the segment.
            numel: Number of elements.
            dtype: Dtype of the elements.

        Returns:
            A 1-D tensor that shares its memory with the segment.
        """
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        pages, skipped = self._pages(start, numel * dtype.itemsize, flags)
        return torch.frombuffer(pages, dtype=dtype, count=numel, offset=skipped)

    def view(self, dtype: torch.dtype = torch.uint8) -> SegmentView:
        """Return a copy-on-write view of the whole segment: writes stay in this process."""
        return SegmentView(self._pages(0, self.nbytes, mmap.MAP_PRIVATE)[0], dtype)

    def _pages(self, start: int, nbytes: int, flags: int) -> tuple[mmap.mmap, int]:
        skipped = start % PAGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(
            self.descriptor, skipped + nbytes, flags, protection, offset=start - skipped
        ), skipped

    def close(self) -> None:
        """Close the file descriptor of the segment; existing mappings stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def segment_views() -> list[range]:
    """Return the address ranges of this process's copy-on-write segment mappings."""
    found = []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            bounds, access, _ = line.split(maxsplit=2)
            if access.endswith("p") and f"/memfd:{NAME}" in line:
                low, high = (int(bound, 16) for bound in bounds.split("-"))
                found.append(range(low, high))
    return found


@lru_cache(maxsize=1)
def _page_map(process: int) -> int:
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


class SegmentView:
    """A copy-on-write view of a segment.

    An in-place edit never reaches another process, and can be detected.
    """

    def __init__(self, pages: mmap.mmap, dtype: torch.dtype) -> None:
        self._pages = pages
        self.tensor: Tensor = torch.frombuffer(pages, dtype=dtype)
        with suppress(OSError):  # older kernels map page by page on access
            pages.madvise(_POPULATE_READ)
        self._entries = bytearray(ceil_div(len(pages), PAGE) * _ENTRY)
        self._clean = b""  # the entries while nothing was written

    def was_written(self) -> bool:
        """Return whether a page was copied because this process wrote to it."""
        try:
            os.preadv(
                _page_map(os.getpid()), [self._entries], self.tensor.data_ptr() // PAGE * _ENTRY
            )
        except OSError:  # the kernel does not provide it
            return True
        if self._entries == self._clean:
            return False
        entries = torch.frombuffer(self._entries, dtype=torch.int64)
        copied = bool(((entries != 0) & ((entries >> _IS_SHARED) & 1 == 0)).any())
        if not copied:
            self._clean = bytes(self._entries)
        return copied

    def clear_written(self) -> None:
        """Discard what this process wrote, so that the view has the segment's contents again."""
        self._pages.madvise(mmap.MADV_DONTNEED)
