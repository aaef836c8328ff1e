"""The bytes of whole storages, kept elsewhere while their memory is returned.

Every view of a storage stays valid: after `restore` it shows the same bits. Between `park` and `restore` no view may be
used. A storage of an accelerator is kept in host memory and resized to nothing. A storage of the CPU is kept in a file
without a name, and its pages are returned to the system.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..base.errors import StorageError
from ..base.memory import PAGE, private_pages, return_pages

_AT_ONCE = 64 << 20  # bytes of a write or a read


class ParkedStorages:
    """Storages that are parked together.

    Args:
        folder: Where the file is made that keeps what does not go to host memory.
        pinned: Page-lock the host memory, so that a GPU copies faster.
        in_file: Keep everything in the file, also what lies on an accelerator.
    """

    def __init__(self, folder: Path, *, pinned: bool = False, in_file: bool = False) -> None:
        self._folder = folder
        self._pinned = pinned
        self._in_file = in_file
        self._file: BinaryIO | None = None
        self._on_host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._in_storage_file: list[tuple[torch.UntypedStorage, int]] = []  # with the number of bytes, in file order
        self._known: set[int] = set()
        self.nbytes = 0

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move the storages of these tensors away, each once, and return their memory.

        Raises:
            StorageError: The file cannot be written. What was parked before can be restored.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
            is_small = tensor.device.type == "cpu" and nbytes < 2 * PAGE
            if not nbytes or is_small or address in self._known:
                continue
            self._known.add(address)
            self._park_one(storage)
            self.nbytes += nbytes

    def _park_one(self, storage: torch.UntypedStorage) -> None:
        values = _bytes_of(storage)
        if values.device.type == "cpu" or self._in_file:
            self._write(values)
            self._in_storage_file.append((storage, values.numel()))
        else:
            kept = private_pages(values.numel(), torch.uint8, locked=self._pinned)
            kept.copy_(values)
            self._on_host.append((storage, kept))
        if values.device.type == "cpu":
            return_pages(values)
        else:
            del values
            storage.resize_(0)

    def restore(self) -> None:
        """Bring every storage back. A second call does nothing.

        Raises:
            StorageError: The file cannot be read. The states are lost.
        """
        for storage, kept in self._on_host:
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept)
        self._on_host = []
        if self._file is not None:
            with _describing(self._folder):
                self._file.seek(0)
                for storage, nbytes in self._in_storage_file:
                    if storage.nbytes() != nbytes:
                        storage.resize_(nbytes)
                    self._read(_bytes_of(storage))
                self._file.close()
        self._file = None
        self._in_storage_file = []
        self._known = set()
        self.nbytes = 0

    def _write(self, values: Tensor) -> None:
        with _describing(self._folder):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            for part in values.split(_AT_ONCE):
                data = memoryview(part.cpu().numpy().data)
                written = 0
                while written < len(data):
                    written += self._file.write(data[written:])

    def _read(self, values: Tensor) -> None:
        assert self._file is not None
        for part in values.split(_AT_ONCE):
            near = part if part.device.type == "cpu" else torch.empty(part.numel(), dtype=torch.uint8)
            data = memoryview(near.numpy().data)
            read = 0
            while read < len(data):
                count = self._file.readinto(data[read:])  # type: ignore[attr-defined]
                if not count:
                    raise OSError("the file ended too early")
                read += count
            if near is not part:
                part.copy_(near)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of all bytes of a storage."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _describing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"offloaded states cannot be kept in a file in '{folder}': {error}.",
            "Without another memory than the host's they are kept on a disk.",
            "set nvme_path (offload_optimizer, offload_param) or TMPDIR to a folder with room for the states.",
        ) from error
