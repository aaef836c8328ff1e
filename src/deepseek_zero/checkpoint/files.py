"""Contain every function by which saves, exports and conversions change a disk.

Data that must survive a power failure is synced before a name points to it. A test replays every
prefix of these calls without unsynced data, and another test finds code that changes a disk without
them. Files are created with mode 0600 and folders with 0700.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from ..base.errors import CheckpointError

ADVICE = {
    errno.ENOSPC: "free some space there, or save elsewhere",
    errno.EDQUOT: "free some of your quota there, or save elsewhere",
    errno.EROFS: "mount it for writing, or save elsewhere",
    errno.EACCES: "let this user write there, or save elsewhere",
    errno.EPERM: "let this user write there, or save elsewhere",
    errno.ENOTDIR: "name a directory",
    errno.EIO: "look at the disk (dmesg, smartctl), and save elsewhere",
}


@contextmanager
def describing_errors(what: str) -> Iterator[None]:
    """Convert an OSError of the block to a CheckpointError with advice.

    Args:
        what: The failed activity, as the first part of the message.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what} failed: {error.strerror or error}.",
            "What is on the disk already, and the run itself, are as they were.",
            ADVICE.get(error.errno or 0, "save elsewhere") + ".",
        ) from error


def create(path: Path, flags: int = 0) -> int:
    """Create a new file for writing and return its descriptor.

    Args:
        path: File to create; it must not exist.
        flags: Additional flags for `os.open`.

    Returns:
        The file descriptor, which the caller must close.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)


def open_to_lock(path: Path) -> int:
    """Open a lock file, creating it if necessary, and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def touch(path: Path) -> None:
    """Set a file's modification time to now."""
    os.utime(path)


def write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at an offset.

    Args:
        descriptor: Descriptor of the file.
        data: Bytes to write.
        offset: Position in the file, in bytes.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def truncate(descriptor: int, length: int) -> None:
    """Cut or extend an open file.

    Args:
        descriptor: Descriptor of the file.
        length: The new length in bytes.
    """
    os.ftruncate(descriptor, length)


def sync(descriptor: int) -> None:
    """Write the data of an open file from the page cache to the disk (fsync)."""
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Sync a file's data to the disk, regardless of which process wrote it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a new text file and sync it.

    Args:
        path: File to create; it must not exist.
        text: Content of the file.
    """
    with new_file(path) as file:
        file.write(text.encode())


def replace_text(path: Path, text: str) -> None:
    """Replace a text file atomically; the old one is kept until the new one is synced.

    Args:
        path: File to replace, which may be missing.
        text: New content of the file.
    """
    hidden = path.with_name(f".{path.name}.saving")
    if hidden.exists():
        remove(hidden)  # left by an unfinished save
    write_text(hidden, text)
    rename(hidden, path)
    sync_folder(path.parent)


class Stream(io.RawIOBase):
    """A new file as an append-only stream, for torch.save."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0

    def writable(self) -> bool:
        """Return True, because torch.save checks this method of a stream."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes and return how many were written."""
        view = memoryview(data).cast("B")
        write(self._descriptor, view, self._offset)
        self._offset += len(view)
        return len(view)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for writing, and sync it at the end of the block."""
    descriptor = create(path)
    try:
        yield cast(IO[bytes], Stream(descriptor))
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Create a folder, which must not exist.

    Args:
        path: Folder to create.
        mode: Permissions of the folder.
    """
    os.mkdir(path, mode)


def make_folders(path: Path) -> None:
    """Create a directory that the user named, and its parents, with the user's umask."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        with suppress(FileExistsError):  # another rank or job has created it
            make_folder(each, 0o777)
        sync_folder(each.parent)


def make_private(path: Path) -> None:
    """Set the mode of a file to 0600, so that only its owner can read it."""
    os.chmod(path, 0o600)


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder.

    Args:
        source: Current path.
        target: New path. A file may replace another file; a folder must not exist.
    """
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name.

    Args:
        source: Current path.
        target: The second path. If it exists, FileExistsError is raised.
    """
    os.link(source, target, follow_symlinks=False)


def remove(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_empty_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents."""
    shutil.rmtree(path)
