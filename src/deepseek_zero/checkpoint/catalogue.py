"""A directory of checkpoints: which it holds, which one a load means, and which may go.

    <tag>/              a checkpoint; the text file `latest` names one
    .<tag>.saving/      a save that is under way, or one that never finished
    .<tag>.replaced/    the previous checkpoint of the same tag, until the new one has its name
    .<tag>.pruned/      a checkpoint that is being removed
    .latest.saving      `latest` while it is being written
    .writer             says which job saves here (writer_lock.py)

A hidden name is no checkpoint, with one exception: a crash between the two renames of a save leaves
a tag as `.<tag>.replaced` alone.  It counts as that tag, and cleaning gives it its name back.

The job that saves holds an flock on `.<tag>.saving/.writing` until it is done, and the kernel
releases it when that process ends, on whichever host.  Where the file system knows no locks,
nothing is removed.  A folder without that file was left by an older version or by a crash before
the first byte, once nothing in it has changed for an hour.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from ..base.errors import CheckpointError
from ..base.given import did_you_mean
from ..base.log import log_once
from ..comm.collectives import Comm
from . import files
from .format import LATEST, MANIFEST, NEWEST, Manifest, checked_tag
from .layouts import SLICES, CheckpointLayout, is_checkpoint, layout_of
from .lockstep import run_and_gather
from .staging import STAGING_LOCK
from .verify import NO_FILES, Fault, FileSubset, check_headers, verify

MOST_NAMED = 3  # directories that a message suggests

STALE_SAVE_SECONDS = 3600.0
MAX_FAULTS_SHOWN = 3  # faults named of one checkpoint that is passed over

_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<state>saving|replaced|pruned)")


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a directory, in any layout.  manifest: None where it cannot be read.
    faults: those found so far.
    """

    tag: str
    folder: Path
    manifest: Manifest | None
    saved_at: float
    faults: tuple[Fault, ...] = ()

    @property
    def step(self) -> int:
        """Return the optimizer step at which it was saved; -1 where the manifest does not say."""
        try:
            return int(self.manifest.plain["trainer"]["global_steps"])  # type: ignore[union-attr]
        except (AttributeError, KeyError, TypeError, ValueError):
            return -1

    @property
    def is_complete(self) -> bool:
        """Return whether its manifest can be read and no fault has been found."""
        return self.manifest is not None and not self.faults

    @property
    def layout(self) -> CheckpointLayout | None:
        """Return the layout that its folder has now; None where it is gone.  Looks at the disk."""
        return layout_of(self.folder)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its files.  Looks at the disk."""
        paths = self.folder.iterdir() if self.folder.is_dir() else [self.folder]
        return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Leftover:
    """A hidden path of a save or a removal that has not finished.  is_in_use: the job that writes
    it still runs.
    """

    path: Path
    tag: str
    state: str
    is_in_use: bool


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.  last: so many of the newest complete ones (None: all).  every:
    those of each so many steps too.
    """

    last: int | None = None
    every: int | None = None


@dataclass
class PruneResult:
    """The checkpoints that `prune` removed and kept, and the hidden paths that it cleaned."""

    removed: list[CheckpointInfo] = field(default_factory=list)
    kept: list[CheckpointInfo] = field(default_factory=list)
    cleaned: list[Path] = field(default_factory=list)


# -- what there is


def checkpoints(directory: Path, *, reads_headers: bool = True) -> list[CheckpointInfo]:
    """List all tags, newest first: by step, then by time; those of unknown step come last.

    Reads manifests and, if `reads_headers`, the headers of their files.
    """
    found = []
    for tag in tags_in(directory):
        with suppress(FileNotFoundError):  # it went while we looked
            found.append(info_of(directory, tag, reads_headers=reads_headers))
    return sorted(
        found, key=lambda info: (info.manifest is None, info.step, info.saved_at), reverse=True
    )


def latest_tag(directory: Path) -> str | None:
    """Read the tag that the file `latest` names; None where the file is missing or empty.

    CheckpointError where it cannot be read.
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


def info_of(directory: Path, tag: str, *, reads_headers: bool = True) -> CheckpointInfo:
    """Describe one tag, which must exist."""
    return info_at(tag_folder(directory, tag), tag, reads_headers=reads_headers)


def info_at(path: Path, tag: str, *, reads_headers: bool = True) -> CheckpointInfo:
    """Describe the checkpoint or export at a path, which must exist."""
    manifest, faults = check_headers(path) if reads_headers else check_headers(path, NO_FILES)
    saved = path / MANIFEST
    return CheckpointInfo(
        tag, path, manifest, (saved if saved.exists() else path).stat().st_mtime, tuple(faults)
    )


def tag_folder(directory: Path, tag: str) -> Path:
    """Return the folder of a tag, whether or not it exists: its own name, or the hidden one that a
    crash left.
    """
    folder = directory / tag
    replaced = replaced_path(folder)
    return replaced if replaced.exists() and not folder.exists() else folder


def existing_folder(directory: Path, tag: str) -> Path:
    """Return the folder of a tag.  CheckpointError, which lists the tags there are, where it does
    not exist.
    """
    folder = tag_folder(directory, checked_tag(tag))
    if folder.exists():
        return folder
    tags = sorted(tags_in(directory))
    near = ", ".join(f"'{path}'" for path in near_directories(directory)) if not tags else ""
    fix = f"choose one of: {', '.join(tags) or near or 'none is there'}."
    raise CheckpointError(
        f"{directory} holds no checkpoint {tag!r}{did_you_mean(tag, tags)}.", fix=fix
    )


def replaced_path(folder: Path) -> Path:
    """Return the hidden path that the previous checkpoint of the same tag takes while it is
    replaced.
    """
    return folder.with_name(f".{folder.name}.replaced")


def leftovers(directory: Path) -> list[Leftover]:
    """List every hidden path of ours that is no checkpoint."""
    found = []
    for path, tag, state in _hidden(directory):
        if state == "replaced" and tag_folder(directory, tag) == path:
            continue
        found.append(
            Leftover(path, tag, state, is_in_use=state == "saving" and is_being_written(path))
        )
    return found


def is_being_written(path: Path) -> bool:
    """Return whether a process still writes there, or may; the head of this file says how it is
    known.
    """
    try:
        with open(path / STAGING_LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except (FileNotFoundError, NotADirectoryError):
        return _seconds_since_change(path) < STALE_SAVE_SECONDS
    except OSError:  # somebody holds it, or the file system knows no locks
        return True


def tags_in(directory: Path) -> list[str]:
    """List every tag of a directory, in no particular order."""
    if not directory.is_dir():
        return []
    visible = [
        path.name
        for path in directory.iterdir()
        if not path.name.startswith(".") and is_checkpoint(path)
    ]
    return visible + [
        tag
        for path, tag, state in _hidden(directory)
        if state == "replaced" and tag_folder(directory, tag) == path
    ]


def is_single_checkpoint(path: Path) -> bool:
    """Return whether a path is one checkpoint or export, not a directory of them (which may hold an
    export, too).
    """
    layout = layout_of(path)
    return layout is not None and (layout.has_states or not tags_in(path))


def near_directories(directory: Path) -> list[Path]:
    """List directories of checkpoints that may be meant by `directory`, which holds none: inside
    it, or spelled alike.

    Names are compared at the first part of the path that does not exist, and at the last part.
    """
    missing = directory.absolute()
    found = _subdirectories(missing)
    rest: tuple[str, ...] = ()
    while missing.parent != missing:
        siblings = {path.name: path for path in _subdirectories(missing.parent)}
        for name in get_close_matches(missing.name, siblings, cutoff=0.6):
            found.append(siblings[name].joinpath(*rest))
        if missing.parent.is_dir():
            break
        rest = (missing.name, *rest)
        missing = missing.parent
    return [path for path in found if path != directory.absolute() and tags_in(path)][:MOST_NAMED]


def _subdirectories(directory: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(
            path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    return []


def _hidden(directory: Path) -> list[tuple[Path, str, str]]:
    """List (path, tag, state) of every hidden name of ours."""
    if not directory.is_dir():
        return []
    matches = [(path, _HIDDEN.fullmatch(path.name)) for path in sorted(directory.iterdir())]
    return [(path, match["tag"], match["state"]) for path, match in matches if match is not None]


def _seconds_since_change(path: Path) -> float:
    """Return how long ago a folder or a file in it changed; 0 where there is none."""
    newest = 0.0
    with suppress(FileNotFoundError, NotADirectoryError):
        newest = path.stat().st_mtime
        newest = max([newest, *(each.stat().st_mtime for each in path.iterdir())])
    return time.time() - newest if newest else 0.0


# -- which one to load


def newest_good(directory: Path) -> str | None:
    """Find the newest tag of which every byte is right; None where there is no checkpoint.

    Logs each one that it passes over.  CheckpointError where there are checkpoints and none is
    good: a run that starts anew then should do so on purpose.
    """
    tags = [info.tag for info in checkpoints(directory, reads_headers=False)]
    return _first_good(
        directory, tags, lambda tag: [str(fault) for fault in verify(tag_folder(directory, tag))]
    )


def newest_good_of_all(comm: Comm, directory: Path) -> str | None:
    """Find what `newest_good` finds, each rank reading its part of the files.  Collective; all
    ranks get the same answer, or the same error.
    """

    def listed() -> str:
        found = checkpoints(directory, reads_headers=False) if comm.rank == 0 else []
        return json.dumps([info.tag for info in found])

    def check(tag: str) -> list[str]:
        def check_share() -> str:
            faults = verify(
                tag_folder(directory, tag), FileSubset(comm.rank, comm.size), read_again=True
            )
            return json.dumps([str(fault) for fault in faults[: MAX_FAULTS_SHOWN + 1]])

        return [
            fault
            for answer in run_and_gather(comm, f"verifying {tag}", check_share)
            for fault in json.loads(answer)
        ]

    return _first_good(
        directory,
        json.loads(run_and_gather(comm, "loading: the list of checkpoints", listed)[0]),
        check,
    )


def _first_good(
    directory: Path, tags: Iterable[str], check: Callable[[str], list[str]]
) -> str | None:
    """Return the first tag without a fault; None without tags.  CheckpointError where every one has
    faults.
    """
    passed_over = []
    for tag in tags:
        faults = check(tag)
        if not faults:
            return tag
        more = "; and more" if len(faults) > MAX_FAULTS_SHOWN else ""
        passed_over.append(f"{tag}: {'; '.join(faults[:MAX_FAULTS_SHOWN])}{more}")
        log_once(f"checkpoint {directory / tag} is passed over. {passed_over[-1]}", logging.WARNING)
    if passed_over:
        raise CheckpointError(
            f"none of the {len(passed_over)} checkpoint(s) in {directory} is good. "
            + ". ".join(passed_over)
            + ".",
            fix="bring the files back from a copy; to start anew, name another directory.",
        )
    return None


# -- which ones go


def outdated(
    infos: Sequence[CheckpointInfo], latest: str | None, retention: Retention
) -> list[CheckpointInfo]:
    """Select the checkpoints that need not be kept, of infos newest first.

    Only complete ones count as kept, and nothing is selected unless a complete one is newer.  The
    one that `latest` names is never selected, nor a folder whose manifest cannot be read, which may
    be no checkpoint at all, nor one in another layout than ours, which another program may have
    written.
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
    """Clean the directory, then remove the checkpoints that need not be kept.

    A crash at any moment leaves each checkpoint whole or under a hidden name, which the next call
    removes.
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
    """Remove what unfinished saves have left, and give a tag that a crash left hidden its name
    back.

    Returns the hidden paths that are gone; with `dry_run` those that would go.
    """
    unused = [leftover for leftover in leftovers(directory) if not leftover.is_in_use]
    in_use = {leftover.tag for leftover in leftovers(directory) if leftover.is_in_use}
    to_rename = [
        (path, tag)
        for path, tag, state in _hidden(directory)
        if state == "replaced" and tag not in in_use and tag_folder(directory, tag) == path
    ]
    if not dry_run:
        for path, tag in to_rename:
            files.rename(path, directory / tag)
            files.sync_folder(directory)
        for leftover in unused:
            if leftover.path.is_dir():
                _remove(leftover.path, leftover.tag)
            else:
                files.remove(leftover.path)
    return [path for path, _ in to_rename] + [leftover.path for leftover in unused]


def remove_replaced(folder: Path) -> None:
    """Remove the previous checkpoint of the same tag, if it is still there under its hidden
    name.
    """
    if replaced_path(folder).exists():
        files.remove_folder(replaced_path(folder))


def apply_retention(folder: Path, retention: Retention) -> None:
    """Remove older checkpoints after a save into `folder`.  Rank 0 alone calls it; a directory that
    refuses is logged, and never stops the training.
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
    """Remove a checkpoint: it takes a hidden name first, so that a crash leaves no half of it under
    its tag.
    """
    pruned = folder.with_name(f".{tag}.pruned")
    if folder != pruned:
        if pruned.exists():
            files.remove_folder(pruned)
        files.rename(folder, pruned)
        files.sync_folder(folder.parent)
    with suppress(FileNotFoundError):  # somebody else removes it too
        files.remove_folder(pruned)
