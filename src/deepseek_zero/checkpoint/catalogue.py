"""List, select and remove the checkpoints of a directory.

    <tag>/              a checkpoint; the text file `latest` names one
    .<tag>.saving/      a save in progress, or an unfinished one
    .<tag>.replaced/    the previous checkpoint of the same tag, until the new one is renamed
    .<tag>.pruned/      a checkpoint that is being removed
    .latest.saving      `latest` while it is being written
    .writer             the job that saves here (writer_lock.py)

Hidden names are not checkpoints, with one exception. A crash between the two renames of a save
leaves only `.<tag>.replaced`, which counts as that tag; `clean` renames it back.

The saving job holds an flock on `.<tag>.saving/.writing`, and the kernel releases it when that
process ends, on any host. If the file system does not support locks, nothing is removed. A folder
without the lock file was left by an older version or an early crash. It counts as unused after an
hour without changes.
"""

from __future__ import annotations

import fcntl
import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from ..base.errors import CheckpointError
from ..base.given import did_you_mean
from ..base.log import log_once
from ..comm.collectives import Comm
from . import files
from .format import LATEST, MANIFEST, NEWEST, STAGING_LOCK, Manifest, checked_tag
from .layouts import SLICES, CheckpointLayout, is_checkpoint, known_layouts, layout_of
from .lockstep import run_and_gather
from .verify import ALL_FILES, NO_FILES, Fault, FileSubset, check_headers, verify

MOST_NAMED = 3  # directories suggested in a message

STALE_SAVE_SECONDS = 3600.0
MAX_FAULTS_SHOWN = 3  # faults shown for each skipped checkpoint

_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<state>saving|replaced|pruned)")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of a directory, in any layout.

    Attributes:
        tag: Name of the checkpoint.
        folder: Path of the checkpoint.
        manifest: Names, shapes and counters; None if the file cannot be read.
        saved_at: Modification time in seconds since the epoch.
        faults: The faults found so far.
    """

    tag: str
    folder: Path
    manifest: Manifest | None
    saved_at: float
    faults: tuple[Fault, ...] = ()

    @property
    def step(self) -> int:
        """Return the optimizer step of the checkpoint; -1 if the manifest has none."""
        try:
            return int(self.manifest.plain["trainer"]["global_steps"])  # type: ignore[union-attr]
        except (AttributeError, KeyError, TypeError, ValueError):
            return -1

    @property
    def is_complete(self) -> bool:
        """Return whether the manifest can be read and no fault has been found."""
        return self.manifest is not None and not self.faults

    @property
    def layout(self) -> CheckpointLayout | None:
        """Return the layout of the folder, read from the disk; None if it does not exist."""
        return layout_of(self.folder)

    @property
    def num_bytes(self) -> int:
        """Return the total size of the files in bytes, read from the disk."""
        paths = self.folder.iterdir() if self.folder.is_dir() else [self.folder]
        return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Leftover:
    """A hidden path of an unfinished save or removal.

    Attributes:
        path: Location of the hidden file or folder.
        tag: The tag in its name.
        state: "saving", "replaced" or "pruned".
    """

    path: Path
    tag: str
    state: str

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the path contains a complete checkpoint that a crash left hidden."""
        return self.state == "replaced" and tag_folder(self.path.parent, self.tag) == self.path

    @property
    def is_in_use(self) -> bool:
        """Return whether the job that writes to the path is, or may be, still running."""
        return self.state == "saving" and is_being_written(self.path)


@dataclass(frozen=True)
class Retention:
    """Rules for keeping checkpoints.

    Attributes:
        last: Number of newest complete checkpoints to keep; None keeps all.
        every: Also keep checkpoints whose step is a multiple of this number.
    """

    last: int | None = None
    every: int | None = None


@dataclass
class PruneResult:
    """The result of `prune`: removed and kept checkpoints, and cleaned hidden paths."""

    removed: list[CheckpointInfo] = field(default_factory=list)
    kept: list[CheckpointInfo] = field(default_factory=list)
    cleaned: list[Path] = field(default_factory=list)


# -- listing


def checkpoints(directory: Path, *, reads_headers: bool = True) -> list[CheckpointInfo]:
    """Return the checkpoints of a directory, newest first.

    They are ordered by step, then by time. Checkpoints without a readable manifest come first, and
    those without a step last.

    Args:
        directory: Directory that contains one folder per checkpoint.
        reads_headers: Whether to also check the headers of the files, and record faults.

    Returns:
        One description per checkpoint, including damaged and incomplete ones.
    """
    found = []
    for tag in tags_in(directory):
        with suppress(FileNotFoundError):  # removed in the meantime
            found.append(info_at(tag_folder(directory, tag), tag, reads_headers=reads_headers))
    return sorted(
        found, key=lambda info: (info.manifest is None, info.step, info.saved_at), reverse=True
    )


def latest_tag(directory: Path) -> str | None:
    """Return the tag in the file `latest`; None if the file is missing or empty.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        return (directory / LATEST).read_text(encoding="utf-8", errors="replace").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{directory / LATEST} cannot be read: {error.strerror or error}.",
            "It is the text file that names the checkpoint to load.",
            f'remove or mend it, name the tag yourself, or load tag="{NEWEST}".',
        ) from error


def info_at(path: Path, tag: str, *, reads_headers: bool = True) -> CheckpointInfo:
    """Return a description of the checkpoint or export at an existing path.

    Args:
        path: Folder or file of the checkpoint.
        tag: Name to record for the checkpoint.
        reads_headers: Whether to also check the headers of the files, and record faults.

    Returns:
        The description, which contains any fault that was found.
    """
    subset = ALL_FILES if reads_headers else NO_FILES
    manifest, faults = check_headers(path, subset)
    saved = path / MANIFEST if (path / MANIFEST).exists() else path
    return CheckpointInfo(tag, path, manifest, saved.stat().st_mtime, tuple(faults))


def tag_folder(directory: Path, tag: str) -> Path:
    """Return the folder of a tag, or its hidden replaced folder after a crash.

    Args:
        directory: Directory of checkpoints.
        tag: Name of the checkpoint; its folder need not exist.
    """
    folder = directory / tag
    replaced = replaced_path(folder)
    return replaced if replaced.exists() and not folder.exists() else folder


def existing_folder(directory: Path, tag: str) -> Path:
    """Return the folder of an existing tag.

    Args:
        directory: Directory of checkpoints.
        tag: Name of the checkpoint.

    Returns:
        The path of the folder.

    Raises:
        CheckpointError: The tag does not exist; the message lists the existing ones.
    """
    folder = tag_folder(directory, checked_tag(tag))
    if folder.exists():
        return folder
    tags = sorted(tags_in(directory))
    choices = tags or [f"'{path}'" for path in near_directories(directory)] or ["none is there"]
    raise CheckpointError(
        f"{directory} holds no checkpoint {tag!r}{did_you_mean(tag, tags)}.",
        fix=f"choose one of: {', '.join(choices)}.",
    )


def replaced_path(folder: Path) -> Path:
    """Return the hidden path of the previous checkpoint during a replacement."""
    return folder.with_name(f".{folder.name}.replaced")


def leftovers(directory: Path) -> list[Leftover]:
    """Return the hidden paths of this library that are not checkpoints."""
    return [hidden for hidden in _hidden(directory) if not hidden.is_checkpoint]


def is_being_written(path: Path) -> bool:
    """Return whether a process is or may be writing to a hidden folder.

    The module docstring describes the criteria.
    """
    try:
        with open(path / STAGING_LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except (FileNotFoundError, NotADirectoryError):
        return _seconds_since_change(path) < STALE_SAVE_SECONDS
    except OSError:  # the lock is held, or the file system does not support locks
        return True


def tags_in(directory: Path) -> list[str]:
    """Return the tags of a directory, in no particular order."""
    if not directory.is_dir():
        return []
    visible = [
        path.name
        for path in directory.iterdir()
        if not path.name.startswith(".") and is_checkpoint(path)
    ]
    return visible + [hidden.tag for hidden in _hidden(directory) if hidden.is_checkpoint]


def is_single_checkpoint(path: Path) -> bool:
    """Return whether a path is one checkpoint or export, not a directory of them.

    A directory of checkpoints may also contain an export.
    """
    layout = layout_of(path)
    return layout is not None and (layout.has_states or not tags_in(path))


def near_directories(directory: Path) -> list[Path]:
    """Return directories of checkpoints that the user may have meant.

    They are subdirectories of `directory`, or have a similar name. Names are compared at the first
    path component that does not exist, or else at the last one.
    """
    missing = directory.absolute()
    found = _subdirectories(missing)
    rest: tuple[str, ...] = ()
    while not missing.parent.is_dir():
        rest = (missing.name, *rest)
        missing = missing.parent
    siblings = {path.name: path for path in _subdirectories(missing.parent)}
    for name in get_close_matches(missing.name, siblings, cutoff=0.6):
        found.append(siblings[name].joinpath(*rest))
    return [path for path in found if path != directory.absolute() and tags_in(path)][:MOST_NAMED]


def _subdirectories(directory: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(
            path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    return []


def _hidden(directory: Path) -> list[Leftover]:
    """List every hidden path of this library, including those that are checkpoints."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if match := _HIDDEN.fullmatch(path.name):
            found.append(Leftover(path, match["tag"], match["state"]))
    return found


def _seconds_since_change(path: Path) -> float:
    """Return the seconds since a folder or a file in it changed; 0 if it no longer exists."""
    newest = 0.0
    with suppress(FileNotFoundError, NotADirectoryError):
        newest = path.stat().st_mtime
        newest = max([newest, *(each.stat().st_mtime for each in path.iterdir())])
    return time.time() - newest if newest else 0.0


# -- selecting the checkpoint to load


def newest_good(comm: Comm, directory: Path) -> str | None:
    """Return the newest undamaged tag; None if the directory has no checkpoint.

    The files are divided among all ranks. Every skipped checkpoint is logged.

    Args:
        comm: Communicator of the ranks among which the files are divided.
        directory: Directory of checkpoints.

    Returns:
        The same tag on every rank.

    Raises:
        CheckpointError: All checkpoints are damaged, so starting from scratch must be a deliberate
            decision. It is raised on every rank.

    Note:
        Collective: every rank of `comm` must call it.
    """

    def list_tags() -> list[str]:
        found = checkpoints(directory, reads_headers=False) if comm.rank == 0 else []
        return [info.tag for info in found]

    def check_share(tag: str) -> list[str]:
        subset = FileSubset(comm.rank, comm.size)
        faults = verify(tag_folder(directory, tag), subset, read_again=True)
        return [str(fault) for fault in faults[: MAX_FAULTS_SHOWN + 1]]

    passed_over = []
    for tag in run_and_gather(comm, "loading: the list of checkpoints", list_tags)[0]:
        answers = run_and_gather(comm, f"verifying {tag}", partial(check_share, tag))
        faults = [fault for answer in answers for fault in answer]
        if not faults:
            return str(tag)
        more = "; and more" if len(faults) > MAX_FAULTS_SHOWN else ""
        passed_over.append(f"{tag}: {'; '.join(faults[:MAX_FAULTS_SHOWN])}{more}")
        log_once(f"checkpoint {directory / tag} is passed over. {passed_over[-1]}", logging.WARNING)
    if passed_over:
        raise CheckpointError(
            f"none of the {len(passed_over)} checkpoint(s) in {directory} is good. "
            + ". ".join(passed_over)
            + ".",
            fix="restore the files from a copy; to start from scratch, name another directory.",
        )
    return None


# -- removing


def outdated(
    infos: Sequence[CheckpointInfo], latest: str | None, retention: Retention
) -> list[CheckpointInfo]:
    """Return the checkpoints that the rules allow to remove.

    Only complete checkpoints count as kept, and only those older than the newest complete one are
    selected. The following are never selected: the tag in `latest`, a folder without a readable
    manifest, and a checkpoint in another layout.

    Args:
        infos: All checkpoints, newest first.
        latest: The tag in the file `latest`.
        retention: Which checkpoints to keep.

    Returns:
        The checkpoints to remove, newest first.
    """
    infos = [info for info in infos if info.layout in (SLICES, None)]
    complete = [info for info in infos if info.is_complete]
    if retention.last is None or not complete:
        return []
    kept = {info.tag for info in complete[: retention.last]} | {latest}
    kept |= {info.tag for info in complete if retention.every and info.step % retention.every == 0}
    older = infos[list(infos).index(complete[0]) + 1 :]
    return [info for info in older if info.tag not in kept and info.manifest is not None]


def prune(directory: Path, retention: Retention, *, dry_run: bool = False) -> PruneResult:
    """Clean a directory, then remove the checkpoints that need not be kept.

    A crash at any moment leaves each checkpoint whole or under a hidden name, which the next call
    removes.

    Args:
        directory: Directory of checkpoints.
        retention: Which checkpoints to keep.
        dry_run: Whether to only report what would be removed.

    Returns:
        The removed and kept checkpoints and the cleaned hidden paths, also in a dry run.
    """
    result = PruneResult(cleaned=clean(directory, dry_run=dry_run))
    infos = checkpoints(directory)
    result.removed = outdated(infos, latest_tag(directory), retention)
    result.kept = [info for info in infos if info not in result.removed]
    if not dry_run:
        for info in result.removed:
            _remove(info.folder, info.tag)
    return result


def clean(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove leftovers of unfinished saves, and rename hidden checkpoints back.

    Args:
        directory: Directory of checkpoints.
        dry_run: Whether to only report what would be changed.

    Returns:
        The hidden paths that were, or would be, removed or renamed.
    """
    hidden = _hidden(directory)
    in_use = {each.tag for each in hidden if each.is_in_use}
    to_rename = [each for each in hidden if each.is_checkpoint and each.tag not in in_use]
    unused = [each for each in hidden if not each.is_checkpoint and not each.is_in_use]
    if not dry_run:
        for each in to_rename:
            files.rename(each.path, directory / each.tag)
            files.sync_folder(directory)
        for each in unused:
            if each.path.is_dir():
                if each.state == "replaced":
                    keep_other_files(each.path, directory / each.tag)
                _remove(each.path, each.tag)
            else:
                files.remove(each.path)
    return [each.path for each in to_rename + unused]


def remove_replaced(folder: Path) -> None:
    """Remove the previous checkpoint of the same tag if its hidden folder exists.

    Files that the program has added to it are moved to `folder`.
    """
    replaced = replaced_path(folder)
    if replaced.exists():
        keep_other_files(replaced, folder)
        files.remove_folder(replaced)


def keep_other_files(replaced: Path, folder: Path) -> None:
    """Move what no layout has written from a replaced checkpoint to the new one.

    A file stays if the new checkpoint has a newer one of its name.

    Args:
        replaced: Folder of the replaced checkpoint.
        folder: Folder of the new checkpoint.
    """
    patterns = [pattern for layout in known_layouts() for pattern in layout.patterns]
    others = [
        path
        for path in sorted(replaced.iterdir())
        if not any(fnmatch(path.name, pattern) for pattern in patterns)
        and not (folder / path.name).exists()
    ]
    linked = []
    for path in others:
        if path.is_dir():
            files.rename(path, folder / path.name)
            continue
        try:
            files.link(path, folder / path.name)
            linked.append(path)
        except FileExistsError:  # the program has written it in the meantime
            continue
        except OSError:  # a file system without links
            files.rename(path, folder / path.name)
    if others:
        files.sync_folder(folder)
    for path in linked:  # otherwise a later call restores a file that the program removes
        files.remove(path)


def apply_retention(folder: Path, retention: Retention) -> None:
    """Remove older checkpoints after a save to `folder`; one rank per folder calls it.

    Errors of the disk are logged and do not stop training.

    Args:
        folder: Folder of the new checkpoint.
        retention: Which checkpoints to keep.
    """
    try:
        remove_replaced(folder)
        if retention.last is not None:
            prune(folder.parent, retention)
    except (OSError, CheckpointError) as error:
        log_once(
            f"older checkpoints in {folder.parent} could not be removed: {error}", logging.WARNING
        )


def _remove(folder: Path, tag: str) -> None:
    """Remove a checkpoint after renaming it to a hidden name.

    After a crash, no partial checkpoint is left under its tag.
    """
    pruned = folder.with_name(f".{tag}.pruned")
    if folder != pruned:
        if pruned.exists():
            files.remove_folder(pruned)
        files.rename(folder, pruned)
        files.sync_folder(folder.parent)
    with suppress(FileNotFoundError):  # another process removes it, too
        files.remove_folder(pruned)
