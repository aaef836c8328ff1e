"""Checkpoints on real file systems that are full, read-only or have missing blocks. Needs root.

Every rank raises the same error, no bit of the run changes, and the previous checkpoint remains the
newest valid one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepseek_zero.base.errors import CheckpointError
from tests.crash import names_in
from tests.needs import need
from tests.plain import here
from tests.tower import BF16, differences, moments, start, train, whole

MIB = 1 << 20


def run(*words: str | Path) -> None:
    """Run a command on rank 0 while the other ranks wait."""
    if here() == 0:
        subprocess.run([str(word) for word in words], check=True, capture_output=True)
    dist.barrier()


@contextmanager
def mounted(place: Path, *how: str | Path) -> Iterator[Path]:
    need(os.geteuid() == 0, "root, to mount a file system")
    if here() == 0:
        place.mkdir()
    run("mount", *how, place)
    try:
        yield place
    finally:
        run("umount", "-l", place)


@contextmanager
def unchanged(engine: Any) -> Iterator[None]:
    """Check that the block changes no weights, main weights, moments or counters. Collective."""
    before = whole(engine), moments(engine), engine.global_steps
    yield
    assert not differences(whole(engine), before[0]) and not differences(moments(engine), before[1])
    assert engine.global_steps == before[2]


def save_in_vain(engine: Any, place: Path, said: str, *, wait: bool = True) -> None:
    with pytest.raises(CheckpointError, match=said):
        engine.save_checkpoint(place, tag="bad", wait=wait)
        engine.finish_saving()
    dist.barrier()  # wait until rank 0 has cleaned up
    assert [name for name in names_in(place) if name != "filler"] == ["good", "latest"]
    assert (place / "latest").read_text() == "good"


def fill(place: Path, but: int) -> None:
    """Fill the file system except for `but` bytes."""
    if here() == 0:
        (place / "filler").unlink(missing_ok=True)
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        (place / "filler").write_bytes(bytes(free - but))
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(tmp_path: Path, wait: bool) -> None:
    engine = start(3, **BF16)
    train(engine, 0, 1)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "none") as place:
        engine.save_checkpoint(place, tag="good")
        train(engine, 1, 2)
        for but in (0, 3 * 4096):  # no space for one page; space for a part of the files
            fill(place, but)
            with unchanged(engine):
                save_in_vain(
                    engine,
                    place,
                    r"No space left on device.(.|\n)*free some space there",
                    wait=wait,
                )
            dist.barrier()
        assert engine.load_checkpoint(place, tag="newest")[0] == str(place / "good")
        train(engine, 1, 2)
        run("rm", place / "filler")
        engine.save_checkpoint(place, tag="better", wait=wait)
        engine.finish_saving()
        with unchanged(engine):
            assert engine.load_checkpoint(place, tag="newest")[0] == str(place / "better")


@pytest.mark.ranks(2)
def test_a_directory_that_is_read_only(tmp_path: Path) -> None:
    engine = start(3)
    train(engine, 0, 1)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "none") as place:
        engine.save_checkpoint(place, tag="good")
        # A file system cannot be remounted while a file, such as the lock, is open for writing
        engine.parts.saver.close()
        run("mount", "-o", "remount,ro", place)
        with unchanged(engine):
            save_in_vain(engine, place, r"Read-only file system.(.|\n)*mount it for writing")
            assert engine.load_checkpoint(place, tag="newest")[0] == str(place / "good")
        run("mount", "-o", "remount,rw", place)
        engine.save_checkpoint(place, tag="better")


def forget_pages(file: Path) -> None:
    """Drop a file from the page cache, so that the next read is from the disk."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("lost", "said"), [("rank_*", r"rank_0000[01]\.safetensors"), ("*", r"manifest\.json")]
)
def test_missing_blocks_of_a_disk(tmp_path: Path, lost: str, said: str) -> None:
    """Truncate the backing file of a loop device.

    The device then returns EIO for everything that is not in the page cache.
    """
    need(shutil.which("mkfs.ext4") is not None, "mkfs.ext4")
    backing = tmp_path / "backing"
    if here() == 0:
        with backing.open("wb") as file:
            file.truncate(16 * MIB)
    run("mkfs.ext4", "-q", "-O", "^has_journal", backing)
    engine = start(3)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "good", tag="good")
    with mounted(tmp_path / "loop", "-o", "loop", backing) as place:
        engine.save_checkpoint(place, tag="lost")
        (place / "lost" / "manifest.json").read_bytes()
        run("sync")
        dist.barrier()
        if here() == 0:
            for each in (place / "lost").glob(lost):
                forget_pages(each)
            os.truncate(backing, 0)
        dist.barrier()
        with (
            unchanged(engine),
            pytest.raises(CheckpointError, match=f"{said} .*cannot be read: Input/output error"),
        ):
            engine.load_checkpoint(place, tag="lost")
        engine.load_checkpoint(tmp_path / "good")
