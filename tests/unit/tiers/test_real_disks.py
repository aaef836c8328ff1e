"""Real file systems that fail: full, read-only, and with blocks missing underneath.  Only root can
make them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepseek_zero.base.errors import StorageError
from deepseek_zero.tiers.disk import Disk
from tests.needs import need

MIB = 1 << 20


def run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """8 MiB of tmpfs."""
    need(os.geteuid() == 0, "root, to mount a tmpfs")
    place = tmp_path / "small"
    place.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=8m", "none", place)
    yield place
    run("umount", "-l", place)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(mount point, backing file) of an ext4 in a file."""
    need(os.geteuid() == 0, "root, to mount a loop device")
    backing, place = tmp_path / "backing", tmp_path / "loop"
    place.mkdir()
    with backing.open("wb") as file:
        file.truncate(48 * MIB)
    run("mkfs.ext4", "-q", "-O", "^has_journal", backing)
    run("mount", "-o", "loop", backing, place)
    yield place, backing
    run("umount", "-l", place)


def test_a_full_disk_is_named_before_anything_is_lost(small: Path) -> None:
    disk = Disk(small)
    with pytest.raises(
        StorageError, match=r"need 9\.00 MiB .* 8\.00 MiB are free|7\.\d+ MiB are free"
    ):
        disk.check_space(9 * MIB, 1)
    storage = disk.reserve(MIB, torch.float32, MIB, "the first")
    with pytest.raises(
        StorageError, match=r"reserving 8\.00 MiB for the second .*No space left on device"
    ):
        disk.reserve(2 * MIB, torch.float32, MIB, "the second")
    storage.write(0, MIB).fill_(3)
    storage.store(0, MIB).wait()
    assert float(storage.write(0, MIB).sum()) == 3 * MIB


def test_a_disk_that_somebody_else_filled_since_still_takes_what_was_reserved(small: Path) -> None:
    disk = Disk(small)
    storage = disk.reserve(MIB, torch.float32, MIB, "the first")
    with pytest.raises(OSError, match="No space"):
        (small / "other").write_bytes(bytes(8 * MIB))
    storage.write(0, MIB).fill_(3)
    storage.store(0, MIB).wait()
    assert float(storage.write(0, MIB).sum()) == 3 * MIB


def test_a_read_only_disk_is_named(small: Path) -> None:
    run("mount", "-o", "remount,ro", small)
    with pytest.raises(StorageError, match=r"Read-only file system.*\n.*\n.*mount it for writing"):
        Disk(small)


def test_a_disk_that_turns_read_only_fails_the_next_transfer_or_none(
    loop: tuple[Path, Path],
) -> None:
    disk = Disk(loop[0])
    storage = disk.reserve(MIB, torch.float32, MIB, "values")
    storage.write(0, MIB).fill_(3)
    subprocess.run(["mount", "-o", "remount,ro", str(loop[0])], check=False, capture_output=True)
    try:
        storage.store(0, MIB).wait()
    except StorageError as error:
        assert "writing values" in str(error)
    assert float(storage.write(0, MIB).sum()) == 3 * MIB


def test_blocks_that_are_gone_are_an_error_and_never_other_numbers(loop: tuple[Path, Path]) -> None:
    """The backing file ends early, so the device answers EIO for what lies behind."""
    place, backing = loop
    disk = Disk(place)
    numel = 8 * MIB
    storage = disk.reserve(numel, torch.float32, MIB, "values")
    storage.write(0, numel).copy_(torch.arange(numel))
    storage.store(0, numel).wait()
    os.sync()
    os.truncate(backing, 8 * MIB)
    with pytest.raises(StorageError, match="reading values"):
        storage.write(0, numel)
