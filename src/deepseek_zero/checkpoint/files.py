"""Every change that a checkpoint, an export or a conversion makes to a disk, in a dozen verbs.

What must survive a power cut is synced before anything points at it; a test replays every prefix of
these calls, without what was not synced.  Files are 0600, folders 0700.  A test finds whoever
changes a disk without these verbs.
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
    """Raise an OSError of the block as a CheckpointError that says what was being done and what
    helps.
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
    """Create a file for writing, which must not exist; returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)


def open_to_lock(path: Path) -> int:
    """Open a file that serves as a lock and names its holder, creating it if need be; returns its
    descriptor.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def touch(path: Path) -> None:
    """Set a file's time of change to now, as a sign of life."""
    os.utime(path)


def write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def truncate(descriptor: int, length: int) -> None:
    """Cut or extend an open file to a length."""
    os.ftruncate(descriptor, length)


def sync(descriptor: int) -> None:
    """Have the file's bytes on the disk when this returns."""
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Have a file's bytes on the disk when this returns, whoever has written them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a new file of text; it is on the disk when this returns."""
    descriptor = create(path)
    try:
        write(descriptor, memoryview(text.encode()), 0)
        sync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file of text in place of an older one, if any, which stays until the new one is on
    the disk.
    """
    hidden = path.with_name(f".{path.name}.saving")
    if hidden.exists():
        remove(hidden)  # of a save that never finished
    write_text(hidden, text)
    rename(hidden, path)
    sync_folder(path.parent)


class Stream(io.RawIOBase):
    """A new file as an object to write into from front to back, for torch.save."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        write(self._descriptor, view, self._offset)
        self._offset += len(view)
        return len(view)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file to write into; it is on the disk when the block ends."""
    descriptor = create(path)
    try:
        yield cast(IO[bytes], Stream(descriptor))
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Make one folder, which must not exist."""
    os.mkdir(path, mode)


def make_folders(path: Path) -> None:
    """Make a directory that the user has named, and those above it, with the user's own
    permissions; nothing where it exists.
    """
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        with suppress(FileExistsError):  # another rank's, or another job's
            make_folder(each, 0o777)
        sync_folder(each.parent)


def make_private(path: Path) -> None:
    """Make a file readable by its owner alone."""
    os.chmod(path, 0o600)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; a file may replace another one, a folder must not."""
    os.rename(source, target)


def remove(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_empty_folder(path: Path) -> None:
    """Remove a folder that is empty."""
    os.rmdir(path)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(path)
