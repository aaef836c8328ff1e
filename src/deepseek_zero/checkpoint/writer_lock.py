"""Lock a directory of checkpoints for one job.

Two jobs in one directory would overwrite each other's `latest` and remove each other's checkpoints,
so the second job gets an error. The lock on `.writer` is a POSIX lock (fcntl, not flock). Forked
workers do not inherit it, and network file systems support it. The kernel releases it when the
process ends. Engines of one process use the same lock. If the file system does not support locks,
the content and modification time of `.writer` are used, and the second job only gets a warning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import CheckpointError
from ..base.log import log_once
from . import files

WRITER = ".writer"
STALE_WRITER_SECONDS = 3600.0  # seconds without a save; only used without locks


@dataclass
class _HeldLock:
    """A lock of this process on one directory; `count` engines use it."""

    descriptor: int
    path: Path
    process: int
    count: int = 0


_held_locks: dict[str, _HeldLock] = {}


class WriterLock:
    """One engine's lock on the directory that it last saved to; used by rank 0 only."""

    def __init__(self) -> None:
        self._key = ""

    def acquire(self, directory: Path) -> None:
        """Lock a directory, and release the previous one.

        If a program has removed the directory, it is created and locked again.

        Raises:
            CheckpointError: Another job writes to the directory.
        """
        key = os.path.realpath(directory)
        held = _held_locks.get(key)
        if held is not None and not _has_name(held.descriptor, held.path):
            with files.describing_errors(f"claiming '{directory}'"):
                files.make_folders(directory)
                again = _lock(directory)
            os.close(held.descriptor)
            held.descriptor = again.descriptor
        if key != self._key or key not in _held_locks:
            self.release()
            with files.describing_errors(f"claiming '{directory}'"):
                files.make_folders(directory)
                if key not in _held_locks:
                    _held_locks[key] = _lock(directory)
            _held_locks[key].count += 1
            self._key = key
        with suppress(OSError):
            files.touch(_held_locks[key].path)

    def release(self) -> None:
        """Release the lock; a second call has no effect."""
        held = _held_locks.get(self._key)
        self._key = ""
        if held is None or held.process != os.getpid():
            return
        held.count -= 1
        if held.count <= 0:
            _held_locks.pop(os.path.realpath(held.path.parent), None)
            with suppress(OSError):
                if _has_name(held.descriptor, held.path):
                    files.remove(held.path)
            os.close(held.descriptor)


def _lock(directory: Path) -> _HeldLock:
    """Lock a directory and record this process as the owner.

    Raises CheckpointError if another process has the lock.
    """
    path = directory / WRITER
    while True:
        descriptor = files.open_to_lock(path)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read_owner(path)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise CheckpointError(
                    f"another job writes into '{directory}': {_describe_owner(owner)}.",
                    "One directory has one `latest`, and jobs would remove each other's "
                    "checkpoints.",
                    "give each job its own directory, or end the other one.",
                ) from None
            if (
                owner
                and owner != _this_process()
                and time.time() - path.stat().st_mtime < STALE_WRITER_SECONDS
            ):
                log_once(
                    f"another job may be writing into {directory}: {_describe_owner(owner)}. Its "
                    f"file system has no locks ({error.strerror}), so this is not certain. One "
                    "directory should have one job.",
                    logging.WARNING,
                )
        if _has_name(descriptor, path):
            break
        os.close(descriptor)  # the previous owner has removed the file in the meantime
    files.truncate(descriptor, 0)
    files.write(descriptor, memoryview(json.dumps(_this_process()).encode()), 0)
    return _HeldLock(descriptor, path, os.getpid())


def _has_name(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file at `path`."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)


def _this_process() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "process": str(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def _read_owner(path: Path) -> dict[str, str]:
    """Read the owner that is recorded in the file; empty if it cannot be read."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in owner.items()} if isinstance(owner, dict) else {}


def _describe_owner(owner: dict[str, str]) -> str:
    job = f" (job {owner['job']})" if owner.get("job") else ""
    return f"process {owner.get('process', '?')} on {owner.get('host', 'some host')}{job}"
