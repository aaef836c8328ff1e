"""Parked storages: their memory is freed, and their bytes are kept elsewhere.

All views of a storage stay valid and have the same bits after `restore`. No view may be used
between `park` and `restore`. The storage of an accelerator is copied to host memory and resized to
0 bytes. The storage of a CPU is written to an unnamed file, and its pages are returned to the
system.
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

_AT_ONCE = 64 << 20  # bytes of one read or write


class ParkedStorages:
    """Storages that are parked together.

    Args:
        folder: Directory of the file for storages that are not kept in host memory.
        pinned: Whether to page-lock the host memory, so that GPU copies are faster.
        in_file: Whether to write all storages to the file, including those of an accelerator.
    """

    def __init__(self, folder: Path, *, pinned: bool = False, in_file: bool = False) -> None:
        self._folder = folder
        self._pinned = pinned
        self._in_file = in_file
        self._file: BinaryIO | None = None
        # Pairs of a view of all bytes of a storage and their copy
        self._on_host: list[tuple[Tensor, Tensor]] = []
        self._filed: list[Tensor] = []  # such views, in the order of their bytes in the file
        self._known: set[int] = set()
        self.nbytes = 0

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move the storages of tensors away, each storage once, and free their memory.

        Raises:
            StorageError: The file cannot be written. Storages that were parked before can be
                restored.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            nbytes = storage.nbytes()
            is_small = tensor.device.type == "cpu" and nbytes < 2 * PAGE
            if not nbytes or is_small or address in self._known:
                continue
            self._known.add(address)
            self._park_one(_bytes_of(tensor))
            self.nbytes += nbytes

    def _park_one(self, values: Tensor) -> None:
        if values.device.type == "cpu" or self._in_file:
            self._write(values)
            self._filed.append(values)
        else:
            kept = private_pages(values.numel(), torch.uint8, locked=self._pinned)
            kept.copy_(values)
            self._on_host.append((values, kept))
        if values.device.type == "cpu":
            return_pages(values)
        else:
            values.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Restore every storage. A second call does nothing.

        Raises:
            StorageError: The file cannot be read. The states are lost.
        """
        for values, kept in self._on_host:
            values.untyped_storage().resize_(kept.numel())
            values.copy_(kept)
        if self._file is not None:
            with _describing(self._folder):
                self._file.seek(0)
                for values in self._filed:
                    if values.device.type != "cpu":
                        values.untyped_storage().resize_(values.numel())
                    self._read(values)
        self.drop()

    def drop(self) -> None:
        """Drop all copies, and close the file.

        Storages that were not restored lose their values.
        """
        if self._file is not None:
            self._file.close()
        self._on_host = []
        self._file = None
        self._filed = []
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
            near = (
                part
                if part.device.type == "cpu"
                else torch.empty(part.numel(), dtype=torch.uint8, device="cpu")
            )
            data = memoryview(near.numpy().data)
            read = 0
            while read < len(data):
                count = self._file.readinto(data[read:])  # type: ignore[attr-defined]
                if not count:
                    raise OSError("the file ended too early")
                read += count
            if near is not part:
                part.copy_(near)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of all bytes of a tensor's storage.

    The view stays valid when the storage is resized to 0 bytes and back.
    """
    nbytes = tensor.untyped_storage().nbytes()
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().as_strided((nbytes // tensor.itemsize,), (1,), 0).view(torch.uint8)


@contextmanager
def _describing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"offloaded states cannot be kept in a file in '{folder}': {error}.",
            "Without another memory than the host's they are kept on a disk.",
            "set nvme_path (offload_optimizer, offload_param) or TMPDIR to a folder with room for "
            "the states.",
        ) from error
