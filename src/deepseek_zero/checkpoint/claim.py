"""One job writes into a directory of checkpoints; a second one is told who the first is.

    .writer        locked for as long as the job that saves there lives, and removed when it has done; says who it is

Two jobs in one directory would move one `latest` to and fro and prune each other's checkpoints.  The lock is one of a
process (fcntl's, not flock's): workers that it forks do not inherit it, a network file system knows it too, and the
kernel lets go of it when the process ends, so that a dead job is no obstacle.  Engines of one process share it.  Where
the file system knows no locks, what the file says and when it was touched last is all there is: then it is a warning.
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
FORGOTTEN_SECONDS = 3600.0  # without a save; only where the file system knows no locks


@dataclass
class _Held:
    """What this process holds in one directory.  count: of the engines that save there."""

    descriptor: int
    path: Path
    process: int
    count: int = 0


_held: dict[str, _Held] = {}


class Claim:
    """What one engine has claimed: the directory that it saved into last.  Rank 0's business."""

    def __init__(self) -> None:
        self._key = ""

    def take(self, directory: Path) -> None:
        """Claim a directory, and let the one before go.  CheckpointError where another job writes there."""
        key = os.path.realpath(directory)
        if key != self._key or key not in _held:
            self.release()
            with files.saying(f"claiming '{directory}'"):
                files.make_folders(directory)
                if key not in _held:
                    _held[key] = _claimed(directory)
            _held[key].count += 1
            self._key = key
        with suppress(OSError):
            files.touch(_held[key].path)

    def release(self) -> None:
        """Let go of it; calling it twice is harmless."""
        held, self._key = _held.get(self._key), ""
        if held is None or held.process != os.getpid():
            return
        held.count -= 1
        if held.count <= 0:
            _held.pop(os.path.realpath(held.path.parent), None)
            with suppress(OSError):
                if _is_still(held.descriptor, held.path):
                    files.remove(held.path)
            os.close(held.descriptor)


def _claimed(directory: Path) -> _Held:
    path = directory / WRITER
    while True:
        descriptor = files.open_to_lock(path)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = _said(path)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise CheckpointError(
                    f"another job writes into '{directory}': {_called(said)}.",
                    "One directory has one `latest`, and jobs would remove each other's checkpoints.",
                    "give each job a directory of its own, or end the other one.",
                ) from None
            if said and said != _myself() and time.time() - path.stat().st_mtime < FORGOTTEN_SECONDS:
                log_once(
                    f"another job may be writing into {directory}: {_called(said)}. Its file system knows no locks "
                    f"({error.strerror}), so nobody can tell. One directory should have one job.",
                    logging.WARNING,
                )
        if _is_still(descriptor, path):
            break
        os.close(descriptor)  # its owner has removed it meanwhile
    files.truncate(descriptor, 0)
    files.write(descriptor, memoryview(json.dumps(_myself()).encode()), 0)
    return _Held(descriptor, path, os.getpid())


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that has the name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)


def _myself() -> dict[str, str]:
    return {"host": socket.gethostname(), "process": str(os.getpid()), "job": os.environ.get("SLURM_JOB_ID", "")}


def _said(path: Path) -> dict[str, str]:
    """Who says that it writes there; nobody where the file cannot be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else {}


def _called(said: dict[str, str]) -> str:
    job = f" (job {said['job']})" if said.get("job") else ""
    return f"process {said.get('process', '?')} on {said.get('host', 'some host')}{job}"
