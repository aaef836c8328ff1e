"""Which checkpoints a directory holds, which of them is the newest good one, and which may go.

    <tag>/              a checkpoint; the text file `latest` names one
    .<tag>.saving/      being written, or what a save that never finished has left
    .<tag>.replaced/    the one before under the same tag, until the new one has its name
    .<tag>.pruned/      being removed
    .latest.saving      `latest`, being written

A hidden name is no checkpoint, with one exception: a crash between the two renames of a save leaves a tag as
`.<tag>.replaced` alone.  It counts as that tag, and cleaning gives it its name back.

Whether somebody still writes: the job that saves holds an flock on `.<tag>.saving/.writing` until it is done, and the
kernel lets go of it when that process ends, on whichever host.  Where the file system knows no locks, nothing is
removed.  A folder without that file was left by an older version or by a crash before the first byte, once nothing in
it has changed for an hour.  Called by engine/saving.py and cli/checkpoint_pages.py.
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
from pathlib import Path

from ..base.errors import CheckpointError
from ..base.log import log_once
from ..comm.collectives import Comm
from . import files
from .deepspeed_read import is_deepspeed
from .draft import WRITING
from .layouts import Layout, layout_of
from .manifest import LATEST, MANIFEST, NEWEST, Manifest, together
from .verify import NOTHING, Fault, Share, glance, verify

FORGOTTEN_SECONDS = 3600.0
MOST_TOLD = 3  # faults named of one checkpoint that is passed over

_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<state>saving|replaced|pruned)")


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a directory, ours or in DeepSpeed's layout.  manifest: None where it cannot be read.  faults:
    as far as was looked.
    """

    tag: str
    folder: Path
    manifest: Manifest | None
    saved_at: float
    faults: tuple[Fault, ...] = ()

    @property
    def step(self) -> int:
        """The optimizer step it was saved at; -1 where nobody knows."""
        try:
            return int(self.manifest.plain["trainer"]["global_steps"])  # type: ignore[union-attr]
        except (AttributeError, KeyError, TypeError, ValueError):
            return -1

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and not self.faults

    @property
    def layout(self) -> Layout | None:
        return layout_of(self.folder)

    @property
    def num_bytes(self) -> int:
        paths = self.folder.iterdir() if self.folder.is_dir() else [self.folder]
        return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Leftover:
    """What a save or a removal that never finished has left.  is_in_use: or has not left yet."""

    path: Path
    tag: str
    state: str
    is_in_use: bool


@dataclass(frozen=True)
class Keep:
    """What stays.  last: so many of the newest complete ones (None: all).  every: multiples of so many steps too."""

    last: int | None = None
    every: int | None = None


@dataclass
class Pruned:
    """What `prune` did, or would do."""

    removed: list[Entry] = field(default_factory=list)
    kept: list[Entry] = field(default_factory=list)
    cleaned: list[Path] = field(default_factory=list)


# -- what there is


def checkpoints(directory: Path, *, glancing: bool = True) -> list[Entry]:
    """All tags, newest first: by step, then by time; those whose step nobody knows before all others.

    Reads manifests and, if `glancing`, the headers of their files.
    """
    found = []
    for tag in tags_in(directory):
        with suppress(FileNotFoundError):  # it went while we looked
            found.append(entry_of(directory, tag, glancing=glancing))
    return sorted(found, key=lambda entry: (entry.manifest is None, entry.step, entry.saved_at), reverse=True)


def latest_tag(directory: Path) -> str | None:
    """The tag that `latest` names, None where it is missing or says nothing; CheckpointError where it is no file."""
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


def entry_of(directory: Path, tag: str, *, glancing: bool = True) -> Entry:
    """One tag, which must be there."""
    return entry_at(folder_of(directory, tag), tag, glancing=glancing)


def entry_at(path: Path, tag: str, *, glancing: bool = True) -> Entry:
    """A checkpoint or export by its path, which must be there."""
    manifest, faults = glance(path) if glancing else glance(path, NOTHING)
    saved = path / MANIFEST
    return Entry(tag, path, manifest, (saved if saved.exists() else path).stat().st_mtime, tuple(faults))


def folder_of(directory: Path, tag: str) -> Path:
    """Where a tag lies."""
    folder = directory / tag
    replaced = replaced_by(folder)
    return replaced if replaced.exists() and not folder.exists() else folder


def replaced_by(folder: Path) -> Path:
    """Where the one before under the same tag lies."""
    return folder.with_name(f".{folder.name}.replaced")


def leftovers(directory: Path) -> list[Leftover]:
    """Every hidden name of ours that is no checkpoint."""
    found = []
    for path, tag, state in _hidden(directory):
        if state == "replaced" and folder_of(directory, tag) == path:
            continue
        found.append(Leftover(path, tag, state, is_in_use=state == "saving" and is_being_written(path)))
    return found


def is_being_written(path: Path) -> bool:
    """Whether some process still writes there, or may: see the head of this file."""
    try:
        with open(path / WRITING, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except (FileNotFoundError, NotADirectoryError):
        return _seconds_since_change(path) < FORGOTTEN_SECONDS
    except OSError:  # somebody holds it, or the file system knows no locks
        return True


def tags_in(directory: Path) -> list[str]:
    """Every tag of a directory, in no order."""
    if not directory.is_dir():
        return []
    visible = [path.name for path in directory.iterdir() if not path.name.startswith(".") and is_checkpoint(path)]
    return visible + [
        tag for path, tag, state in _hidden(directory) if state == "replaced" and folder_of(directory, tag) == path
    ]


def is_one(path: Path) -> bool:
    """Whether a path is one checkpoint or export, not a directory of checkpoints (which may hold an export, too)."""
    layout = layout_of(path)
    return layout is not None and (layout.has_states or not tags_in(path))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of ours or DeepSpeed's, or one that lost some of its files."""
    is_ours = (path / MANIFEST).exists() or any(path.glob("rank_*.safetensors"))
    return path.is_dir() and (is_ours or is_deepspeed(path))


def _hidden(directory: Path) -> list[tuple[Path, str, str]]:
    """(path, tag, state) of every hidden name of ours."""
    if not directory.is_dir():
        return []
    matches = [(path, _HIDDEN.fullmatch(path.name)) for path in sorted(directory.iterdir())]
    return [(path, match["tag"], match["state"]) for path, match in matches if match is not None]


def _seconds_since_change(path: Path) -> float:
    newest = 0.0
    with suppress(FileNotFoundError, NotADirectoryError):
        newest = path.stat().st_mtime
        newest = max([newest, *(each.stat().st_mtime for each in path.iterdir())])
    return time.time() - newest if newest else 0.0


# -- which one to load


def newest_good(directory: Path) -> str | None:
    """The newest tag of which every byte is right, None where there is no checkpoint.  Says which it passed over.

    A CheckpointError where there are checkpoints and none is good: whoever starts anew then should do so on purpose.
    """
    tags = [entry.tag for entry in checkpoints(directory, glancing=False)]
    return _first_good(directory, tags, lambda tag: [str(fault) for fault in verify(folder_of(directory, tag))])


def newest_good_of_all(comm: Comm, directory: Path) -> str | None:
    """As `newest_good`, each rank reading its share of the files.  Collective."""

    def listed() -> str:
        found = checkpoints(directory, glancing=False) if comm.rank == 0 else []
        return json.dumps([entry.tag for entry in found])

    def check(tag: str) -> list[str]:
        def mine() -> str:
            faults = verify(folder_of(directory, tag), Share(comm.rank, comm.size), again=True)
            return json.dumps([str(fault) for fault in faults[: MOST_TOLD + 1]])

        return [fault for said in together(comm, f"verifying {tag}", mine) for fault in json.loads(said)]

    return _first_good(directory, json.loads(together(comm, "loading: the list of checkpoints", listed)[0]), check)


def _first_good(directory: Path, tags: Iterable[str], check: Callable[[str], list[str]]) -> str | None:
    passed = []
    for tag in tags:
        faults = check(tag)
        if not faults:
            return tag
        more = "; and more" if len(faults) > MOST_TOLD else ""
        passed.append(f"{tag}: {'; '.join(faults[:MOST_TOLD])}{more}")
        log_once(f"checkpoint {directory / tag} is passed over. {passed[-1]}", logging.WARNING)
    if passed:
        raise CheckpointError(
            f"none of the {len(passed)} checkpoint(s) in {directory} is good. " + ". ".join(passed) + ".",
            fix="bring the files back from a copy; to start anew, name another directory.",
        )
    return None


# -- which ones go


def outdated(entries: Sequence[Entry], latest: str | None, keep: Keep) -> list[Entry]:
    """Those that need not be kept, of entries newest first.

    Only complete ones count as kept, and nothing goes unless a complete one is newer.  What `latest` names stays, and
    so does a folder whose manifest cannot be read: it may not be a checkpoint at all.  Checkpoints in DeepSpeed's
    layout are nobody's to remove: another program may have written them.
    """
    entries = [entry for entry in entries if entry.layout is not Layout.DEEPSPEED]
    complete = [entry for entry in entries if entry.is_complete]
    if keep.last is None or not complete:
        return []
    kept = {entry.tag for entry in complete[: keep.last]} | {latest}
    kept |= {entry.tag for entry in complete if keep.every and entry.step % keep.every == 0}
    older = entries[list(entries).index(complete[0]) + 1 :]
    return [entry for entry in older if entry.tag not in kept and entry.manifest is not None]


def prune(directory: Path, keep: Keep, *, dry_run: bool = False) -> Pruned:
    """Clean up, then remove what need not be kept.

    A crash at any moment leaves each checkpoint whole or under a hidden name, which the next call removes.
    """
    done = Pruned(cleaned=clean(directory, dry_run=dry_run))
    entries = checkpoints(directory)
    done.removed = outdated(entries, latest_tag(directory), keep)
    done.kept = [entry for entry in entries if entry not in done.removed]
    if not dry_run:
        for entry in done.removed:
            _remove(entry.folder, entry.tag)
    return done


def clean(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove what unfinished saves have left, and give a tag its name back; returns the hidden names that went."""
    left = [one for one in leftovers(directory) if not one.is_in_use]
    busy = {one.tag for one in leftovers(directory) if one.is_in_use}
    nameless = [
        (path, tag)
        for path, tag, state in _hidden(directory)
        if state == "replaced" and tag not in busy and folder_of(directory, tag) == path
    ]
    if not dry_run:
        for path, tag in nameless:
            files.rename(path, directory / tag)
            files.sync_folder(directory)
        for one in left:
            if one.path.is_dir():
                _remove(one.path, one.tag)
            else:
                files.remove(one.path)
    return [path for path, _ in nameless] + [one.path for one in left]


def remove_replaced(folder: Path) -> None:
    """What had the name of a checkpoint before it, which is there; nothing where nobody had."""
    if replaced_by(folder).exists():
        files.remove_folder(replaced_by(folder))


def retain(folder: Path, keep: Keep) -> None:
    """What rank 0 removes after a save into `folder`.  A directory that refuses costs a warning, never the training."""
    try:
        remove_replaced(folder)
        if keep.last is not None:
            prune(folder.parent, keep)
    except (OSError, CheckpointError) as error:
        log_once(f"older checkpoints in {folder.parent} could not be removed: {error}", logging.WARNING)


def _remove(folder: Path, tag: str) -> None:
    doomed = folder.with_name(f".{tag}.pruned")
    if folder != doomed:
        if doomed.exists():
            files.remove_folder(doomed)
        files.rename(folder, doomed)
        files.sync_folder(folder.parent)
    with suppress(FileNotFoundError):  # somebody else removes it too
        files.remove_folder(doomed)
