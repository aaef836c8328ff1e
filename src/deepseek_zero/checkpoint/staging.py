"""Write output to a hidden folder, and publish it with a rename.

    .<name>.saving/            the hidden folder
    .<name>.saving/.writing    locked by the writing job until it is done

The kernel releases the lock when that process ends, on any host. A folder without a lock holder was
left by a dead job and can be removed.
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
from .format import STAGING_LOCK


def staging_path(final: Path) -> Path:
    """Return the hidden path at which `final` is prepared."""
    return final.with_name(f".{final.name}.saving")


class StagedOutput:
    """A hidden folder that is renamed to its final name when it is complete.

    One process opens and publishes it. Other processes may write into `path` in between.
    """

    def __init__(self, final: Path) -> None:
        refuse_url(f"'{final}'", final)
        # "." has no name from which the hidden name could be made
        self.final = final if final.name else final.absolute()
        self.path = staging_path(self.final)
        self._lock = -1

    def open(self) -> None:
        """Create the folder and lock it.

        Raises:
            CheckpointError: Another job writes there, or the folder cannot be created.
        """
        with files.describing_errors(f"saving to '{self.final}'"):
            files.make_folders(self.final.parent)
            if self.path.is_dir():
                self._refuse_if_written()
                files.remove_folder(self.path)  # left by an unfinished save
            elif self.path.exists():
                files.remove(self.path)  # older versions created a file
            files.make_folder(self.path)
            self._lock = files.create(self.path / STAGING_LOCK)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def finish(self) -> None:
        """Remove the lock file and sync the folder, after everything has been written."""
        with suppress(FileNotFoundError):
            files.remove(self.path / STAGING_LOCK)
        files.sync_folder(self.path)

    def discard(self) -> None:
        """Remove the folder if this process opened it and has not published it."""
        if self._lock >= 0:
            with suppress(OSError):
                files.remove_folder(self.path)
            self.unlock()

    def unlock(self) -> None:
        """Release the lock that marks the folder as being written by this process."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- exports, published into folders that may contain other files

    def publish_folder(self, ours: Sequence[str] = (), last: str = "") -> None:
        """Publish the folder under its final name.

        An existing folder may contain other files (a tokenizer, for example), so it is not
        replaced. The new files are moved into it one by one. Files of an earlier export that are
        not overwritten are removed, because a reader would use them.

        Args:
            ours: Glob patterns of files that an earlier export may have written.
            last: Name of the file that is moved last.

        Raises:
            CheckpointError: The disk returned an error.
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
        """Rename the only file of the folder to its final path."""
        self._sync_files()
        with files.describing_errors(f"completing '{self.final}'"):
            files.rename(self.path / self.final.name, self.final)
            files.remove_empty_folder(self.path)
            files.sync_folder(self.final.parent)
        self.unlock()

    def _sync_files(self) -> list[str]:
        """Make the files private to their owner, sync them, and return their names."""
        made = sorted(path.name for path in self.path.iterdir() if path.name != STAGING_LOCK)
        with files.describing_errors(f"completing '{self.final}'"):
            for name in made:
                files.make_private(self.path / name)
                files.sync_file(self.path / name)
            self.finish()
        return made

    def _refuse_if_written(self) -> None:
        with suppress(FileNotFoundError), open(self.path / STAGING_LOCK, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"'{self.path}' is being written by another job.",
                    "Two jobs write under one name into one directory.",
                    "give each job its own directory.",
                ) from None
            except OSError:  # a file system without locks
                return


@contextmanager
def staged_output(out: Path) -> Iterator[StagedOutput]:
    """Open a `StagedOutput` for `out`, and remove it if the block does not publish it."""
    output = StagedOutput(out)
    output.open()
    try:
        yield output
    finally:
        output.discard()  # does nothing after publishing


@contextmanager
def in_turn(out: Path) -> Iterator[None]:
    """Serialize the processes of this host that write the same output."""
    refuse_url(f"'{out}'", out)
    files.make_folders(out.parent)
    descriptor = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
