"""Record file operations and replay what a crash or a power failure would leave.

`Recorder` records the functions of deepseek_zero.checkpoint.files while they run. `Disk` replays
any prefix of the record into a folder. After a kill the folder has everything that was written.
After a power failure a file has its content, and a folder its names, as of the last sync or later.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deepseek_zero.checkpoint import files
from deepseek_zero.checkpoint.writer_lock import WRITER


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


Operation = tuple[str, tuple[Any, ...]]


class Recorder:
    """Record the file operations below one folder, in order."""

    def __init__(self, root: Path) -> None:
        self.root, self.operations = root, list[Operation]()
        self._lock = threading.Lock()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for verb in (
                "create",
                "write",
                "truncate",
                "sync",
                "make_folder",
                "sync_folder",
                "rename",
                "link",
                "remove",
            ):
                patch.setattr(files, verb, self._recorded(verb, getattr(files, verb)))
            patch.setattr(files, "open_to_lock", self._recorded("create", files.open_to_lock))
            patch.setattr(
                files, "remove_empty_folder", self._recorded("remove", files.remove_empty_folder)
            )
            patch.setattr(files, "remove_folder", self._remove_folder)
            yield

    def _recorded(self, verb: str, act: Any) -> Any:
        def recorded(*given: Any) -> Any:
            with self._lock:  # one at a time, so that the record has the order on disk
                result = act(*given)
                plain = tuple(
                    bytes(each) if isinstance(each, memoryview) else each for each in given
                )
                self.operations.append((verb, (result, *plain) if verb == "create" else plain))
            return result

        return recorded

    def _remove_folder(self, path: Path) -> None:
        """Remove each entry separately, because a crash may happen between two of them."""
        for child in sorted(path.iterdir()):
            self._remove_folder(child) if child.is_dir() else files.remove(child)
        with self._lock:
            path.rmdir()
            self.operations.append(("remove", (path,)))


class Disk:
    """The state of the disk after a sequence of operations."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Folder()
        self._open: dict[int, File] = {}

    def apply(self, operation: Operation) -> None:
        verb, given = operation
        getattr(self, f"_{verb}")(*given)

    def _at(self, path: Path) -> tuple[Folder, str]:
        folder = self.top
        *parents, name = path.relative_to(self.root).parts
        for each in parents:
            inner = folder.names[each]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def _create(self, descriptor: int, path: Path, flags: int = 0) -> None:
        folder, name = self._at(path)
        folder.names[name] = self._open[descriptor] = File()

    def _write(self, descriptor: int, data: bytes, offset: int) -> None:
        file = self._open[descriptor]
        file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
        file.data[offset : offset + len(data)] = data

    def _truncate(self, descriptor: int, length: int) -> None:
        del self._open[descriptor].data[length:]

    def _sync(self, descriptor: int) -> None:
        self._open[descriptor].synced = bytes(self._open[descriptor].data)

    def _make_folder(self, path: Path, mode: int = 0o700) -> None:
        folder, name = self._at(path)
        folder.names[name] = Folder()

    def _sync_folder(self, path: Path) -> None:
        found: File | Folder = self.top
        if path != self.root:
            folder, name = self._at(path)
            found = folder.names[name]
        assert isinstance(found, Folder)
        found.synced = dict(found.names)

    def _rename(self, source: Path, target: Path) -> None:
        (before, old), (after, new) = self._at(source), self._at(target)
        after.names[new] = before.names.pop(old)

    def _link(self, source: Path, target: Path) -> None:
        (before, old), (after, new) = self._at(source), self._at(target)
        after.names[new] = before.names[old]

    def _remove(self, path: Path) -> None:
        folder, name = self._at(path)
        # The entry of another rank is missing here, because that rank has its own record.
        folder.names.pop(name, None)

    def leave(self, into: Path, chance: random.Random | None, kept: float) -> None:
        """Write the remaining state into a folder. kept: the probability that unsynced data
        survives.
        """
        _leave(self.top, into, chance or random.Random(0), kept)


def _leave(folder: Folder, into: Path, chance: random.Random, kept: float) -> None:
    into.mkdir(mode=0o700)
    for name, found in (folder.names if chance.random() < kept else folder.synced).items():
        if isinstance(found, Folder):
            _leave(found, into / name, chance, kept)
        else:
            (into / name).write_bytes(found.data if chance.random() < kept else found.synced)


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a checkpoint directory without the lock file."""
    return sorted(path.name for path in folder.iterdir() if path.name != WRITER)
