"""What is made under a hidden name, and takes its place at once when it is on the disk.

    .<name>.saving/            the hidden folder
    .<name>.saving/.writing    locked by the job that writes there, for as long as it does

The kernel lets go of the lock when that process ends, on whichever host, so that what a dead job
has left is nobody's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.errors import CheckpointError
from ..base.given import refuse_url
from . import files

STAGING_LOCK = ".writing"


def staging_path(final: Path) -> Path:
    """Return the hidden path under which `final` is made."""
    return final.with_name(f".{final.name}.saving")


class StagedOutput:
    """A hidden folder that takes its final name when it is complete.  One process opens and
    publishes it; others may write into `path` meanwhile.
    """

    def __init__(self, final: Path) -> None:
        refuse_url(f"'{final}'", final)
        self.final = final
        self.path = staging_path(final)
        self._lock = -1

    def open(self) -> None:
        """Make the folder and lock it.  CheckpointError where another job writes there."""
        with files.describing_errors(f"saving to '{self.final}'"):
            files.make_folders(self.final.parent)
            if self.path.is_dir():
                self._refuse_if_written()
                files.remove_folder(self.path)  # of a save that never finished
            elif self.path.exists():
                files.remove(self.path)  # an older version made files so
            files.make_folder(self.path)
            self._lock = files.create(self.path / STAGING_LOCK)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def finish(self) -> None:
        """Have the names in the folder on the disk, once everything is written."""
        with suppress(FileNotFoundError):
            files.remove(self.path / STAGING_LOCK)
        files.sync_folder(self.path)

    def discard(self) -> None:
        """Remove the folder; nothing where this process did not open it."""
        if self._lock >= 0:
            with suppress(OSError):
                files.remove_folder(self.path)
            self.unlock()

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- files for others, which are put in place among what is not ours

    def publish_folder(self, ours: Sequence[str] = (), last: str = "") -> None:
        """Give the folder its name; into a folder that exists its files move one by one, the one
        named `last` last.

        A folder that exists may hold files that are not ours (a tokenizer), so it is not replaced.
        A file in it that matches one of the patterns `ours`, and is not written again, was left by
        an earlier export and is removed, or a reader would take it.  CheckpointError where the disk
        refuses.
        """
        made = self._sync_files()
        with files.describing_errors(f"completing '{self.final}'"):
            if not self.final.exists():
                files.rename(self.path, self.final)
            else:
                for name in sorted(
                    {path.name for each in ours for path in self.final.glob(each)} - set(made)
                ):
                    files.remove(self.final / name)
                for name in sorted(made, key=lambda each: each == last):
                    files.rename(self.path / name, self.final / name)
                files.sync_folder(self.final)
                files.remove_empty_folder(self.path)
            files.sync_folder(self.final.parent)
        self.unlock()

    def publish_file(self) -> None:
        """Move the only file of the folder, which has its final name already, to its place."""
        self._sync_files()
        with files.describing_errors(f"completing '{self.final}'"):
            files.rename(self.path / self.final.name, self.final)
            files.remove_empty_folder(self.path)
            files.sync_folder(self.final.parent)
        self.unlock()

    def _sync_files(self) -> list[str]:
        """Make the files their owner's alone and have them on the disk, whoever wrote them; returns
        their names.
        """
        made = sorted(path.name for path in self.path.iterdir() if path.name != STAGING_LOCK)
        with files.describing_errors(f"completing '{self.final}'"):
            for name in made:
                files.make_private(self.path / name)
                files.sync_file(self.path / name)
            self.finish()
        return made

    def _refuse_if_written(self) -> None:
        """Raise CheckpointError if another job holds the folder's lock."""
        with suppress(FileNotFoundError), open(self.path / STAGING_LOCK, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"'{self.path}' is being written by another job.",
                    "Two jobs write under one name into one directory.",
                    "give each job a directory of its own.",
                ) from None
            except OSError:  # a file system without locks
                return


@contextmanager
def staged_output(out: Path) -> Iterator[StagedOutput]:
    """Open a `StagedOutput` for `out`, and remove it again where the block does not publish it."""
    output = StagedOutput(out)
    output.open()
    try:
        yield output
    finally:
        output.discard()  # nothing, once it is in place


@contextmanager
def in_turn(out: Path) -> Iterator[None]:
    """Let processes of this host that make the same output run the block one behind the other."""
    refuse_url(f"'{out}'", out)
    files.make_folders(out.parent)
    descriptor = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
