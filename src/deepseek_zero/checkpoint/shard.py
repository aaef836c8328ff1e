"""One rank's file of a checkpoint: safetensors, in one pass, through a few staging blocks and past the page cache.

    8 bytes     length of the header
    header      JSON: entry -> dtype, shape, place in the data; "__metadata__": which save and which rank it is of
    data        entry after entry, without holes, larger dtypes first, so that each is aligned

Any safetensors reader opens it.  Called by writing.py.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
from torch import Tensor

from ..base.memory import PAGE, private_pages
from . import files
from .tensor_file import Entry, header_of

BLOCK_BYTES = 8 << 20
BLOCKS = 4  # staging of one file under way: 32 MiB, whatever its size
THREADS = 2  # writes at once


class ShardWriter:
    """Writes one file from front to back.  Errors are CheckpointErrors that name it."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        head = header_of(entries, metadata)
        self.head_crc = zlib.crc32(head)
        self.path, self.nbytes = path, len(head) + sum(entry.nbytes for entry in entries)
        with self._saying():
            self._descriptor = _open(path)
        self._idle = deque(private_pages(BLOCK_BYTES, torch.uint8) for _ in range(BLOCKS))
        self._going: deque[tuple[Future[None], Tensor]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, "deepseek_zero checkpoint")
        self._filled = self._offset = 0
        self.put(torch.frombuffer(bytearray(head), dtype=torch.uint8))

    def put(self, values: Tensor, crc: int = 0) -> int:
        """Append a tensor's bytes; returns zlib's CRC-32 of them, which continues `crc`."""
        data = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        done = 0
        while done < len(data):
            part = data[done : done + BLOCK_BYTES - self._filled]
            target = self._block()[self._filled : self._filled + len(part)]
            target.copy_(part)
            crc = zlib.crc32(target.numpy().data, crc)
            done += len(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._send(BLOCK_BYTES)
        return crc

    def finish(self) -> None:
        """Have all of it on the disk."""
        try:
            if self._filled:
                self._send(-(-self._filled // PAGE) * PAGE)
            while self._going:
                self._take_back()
            with self._saying():
                files.truncate(self._descriptor, self.nbytes)
                files.sync(self._descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Give up what is open; the file stays as it is."""
        self._pool.shutdown(wait=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _block(self) -> Tensor:
        """The block that is being filled."""
        while not self._idle:
            self._take_back()
        return self._idle[0]

    def _send(self, nbytes: int) -> None:
        block = self._block()
        self._idle.popleft()
        data = block.numpy().data[:nbytes]
        self._going.append((self._pool.submit(files.write, self._descriptor, data, self._offset), block))
        self._offset, self._filled = self._offset + nbytes, 0

    def _take_back(self) -> None:
        job, block = self._going.popleft()
        with self._saying():
            job.result()
        self._idle.append(block)

    def _saying(self) -> AbstractContextManager[None]:
        return files.saying(f"writing '{self.path}'")


def _open(path: Path) -> int:
    """A new file past the page cache, or through it where the file system knows no other way."""
    with suppress(OSError, AttributeError):
        descriptor = files.create(path, os.O_DIRECT)
        page = private_pages(PAGE, torch.uint8)
        try:
            files.write(descriptor, page.numpy().data, 0)  # some take the flag and refuse what follows
            return descriptor
        except OSError:
            os.close(descriptor)
            files.remove(path)
            raise
    return files.create(path)
