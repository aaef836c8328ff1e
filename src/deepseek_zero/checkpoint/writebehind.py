"""Write a file sequentially, past the page cache, in a few blocks at a time.

The module is independent of the file format. Its memory is that of the blocks, regardless of the
file's length.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
from torch import Tensor

from ..base.memory import PAGE, private_pages
from ..base.quantities import rounded_up
from . import files
from .readahead import BLOCK_BYTES, BLOCKS, THREADS


class StreamingWriter:
    """Write a new file of known length from start to end.

    Errors are raised as `CheckpointError` with the file's path.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        """Create the file.

        Args:
            path: The file, which must not exist.
            nbytes: Its final length in bytes.
        """
        self.path = path
        self.nbytes = nbytes
        with self._describing_errors():
            self._descriptor = _create_direct(path)
        self._free = deque(private_pages(BLOCK_BYTES, torch.uint8) for _ in range(BLOCKS))
        self._in_flight: deque[tuple[Future[None], Tensor]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, "deepseek_zero checkpoint")
        self._filled = 0
        self._offset = 0

    def append(self, values: Tensor, crc: int = 0) -> int:
        """Append a tensor's bytes, waiting if no block is free.

        Args:
            values: The tensor, of any shape and device.
            crc: CRC-32 of the preceding bytes.

        Returns:
            The CRC-32 continued with the new bytes.
        """
        data = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        done = 0
        while done < len(data):
            part = data[done : done + BLOCK_BYTES - self._filled]
            target = self._current_block()[self._filled : self._filled + len(part)]
            target.copy_(part)
            crc = zlib.crc32(target.numpy().data, crc)
            done += len(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._submit(BLOCK_BYTES)
        return crc

    def finish(self) -> None:
        """Write the remaining bytes, sync the file to the disk, and close it."""
        try:
            if self._filled:
                self._submit(rounded_up(self._filled, PAGE))
            while self._in_flight:
                self._reclaim()
            with self._describing_errors():
                files.truncate(self._descriptor, self.nbytes)
                files.sync(self._descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file without completing it."""
        self._pool.shutdown(wait=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _current_block(self) -> Tensor:
        """Return the block to fill, waiting for a write if none is free."""
        while not self._free:
            self._reclaim()
        return self._free[0]

    def _submit(self, nbytes: int) -> None:
        """Write the first `nbytes` of the filled block in a thread."""
        block = self._current_block()
        self._free.popleft()
        data = block.numpy().data[:nbytes]
        self._in_flight.append(
            (self._pool.submit(files.write, self._descriptor, data, self._offset), block)
        )
        self._offset = self._offset + nbytes
        self._filled = 0

    def _reclaim(self) -> None:
        """Wait for the oldest write, raise its error, or reclaim its block."""
        job, block = self._in_flight.popleft()
        with self._describing_errors():
            job.result()
        self._free.append(block)

    def _describing_errors(self) -> AbstractContextManager[None]:
        return files.describing_errors(f"writing '{self.path}'")


def _create_direct(path: Path) -> int:
    """Create a file with O_DIRECT, or without it if the file system refuses."""
    with suppress(OSError, AttributeError):
        descriptor = files.create(path, os.O_DIRECT)
        page = private_pages(PAGE, torch.uint8)
        try:
            # Some file systems accept the flag and fail on the first write
            files.write(descriptor, page.numpy().data, 0)
            return descriptor
        except OSError:
            os.close(descriptor)
            files.remove(path)
            raise
    return files.create(path)
