"""The disk tier: data are read back bit for bit, memory is freed, and each failure is reported."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepseek_zero.base.errors import StorageError
from deepseek_zero.tiers.disk import ChunkState, Disk, DiskSettings, DiskStorage
from deepseek_zero.tiers.tier import Storage
from tests.needs import need
from tests.unit.base.test_memory import resident_bytes

CHUNK = 1 << 12


NUMEL = 5 * CHUNK + 777


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def filled(
    disk: Disk, numel: int = NUMEL, dtype: torch.dtype = torch.float32
) -> tuple[Storage, torch.Tensor]:
    """Return a storage and the values that were written to it."""
    storage, values = disk.reserve(numel, dtype, CHUNK, "values"), torch.randn(numel).to(dtype)
    storage.write(0, numel).copy_(values)
    return storage, values


def states(storage: Storage) -> set[ChunkState]:
    assert isinstance(storage, DiskStorage)
    return {chunk.state for chunk in storage.chunks}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8], ids=str
)
def test_stored_data_are_read_bit_for_bit(disk: Disk, dtype: torch.dtype) -> None:
    storage = disk.reserve(NUMEL, dtype, CHUNK, "values")
    values = torch.arange(NUMEL).to(dtype)
    storage.write(0, NUMEL).copy_(values)
    storage.store(0, NUMEL).wait()
    assert states(storage) == {ChunkState.AWAY}
    assert torch.equal(storage.write(0, NUMEL), values)


def test_a_change_affects_one_chunk_only(disk: Disk) -> None:
    storage, values = filled(disk)
    storage.store(0, NUMEL).wait()
    storage.write(CHUNK, 2 * CHUNK).add_(1)
    storage.store(CHUNK, 2 * CHUNK).wait()
    values[CHUNK : 2 * CHUNK] += 1
    assert torch.equal(storage.write(0, NUMEL), values)


def test_offloaded_states_use_no_memory(disk: Disk) -> None:
    numel = 16 << 20
    before = resident_bytes()
    storage = disk.reserve(numel, torch.float32, 1 << 20, "values")
    storage.write(0, numel).fill_(1)
    assert resident_bytes() - before > 60 << 20
    storage.store(0, numel).wait()
    assert resident_bytes() - before < 4 << 20
    assert float(storage.write(numel - 4, numel).sum()) == 4  # reads one chunk only
    assert resident_bytes() - before < 12 << 20


def test_states_that_were_only_read_are_dropped_without_a_write(disk: Disk) -> None:
    storage, values = filled(disk)
    storage.store(0, NUMEL).wait()
    disk.traffic.reset()
    storage.read(0, NUMEL)
    storage.evict(0, NUMEL)
    assert states(storage) == {ChunkState.AWAY} and disk.traffic.written_bytes == 0
    assert torch.equal(storage.read(0, NUMEL), values)


def test_kept_results_are_written_and_stay_until_they_are_dropped(disk: Disk) -> None:
    storage, values = filled(disk)
    storage.keep_until_evict()
    storage.store(0, NUMEL).wait()
    assert states(storage) == {ChunkState.HERE} and disk.traffic.written_bytes > 0
    assert storage.fetch(0, NUMEL).is_done() and torch.equal(storage.read(0, NUMEL), values)
    assert disk.traffic.read_bytes == 0
    storage.write(0, CHUNK).add_(1)
    moved = storage.store(0, NUMEL)
    storage.evict(0, NUMEL)  # during the write
    moved.wait()
    storage.wait_for_copy()
    storage.evict(0, NUMEL)
    assert states(storage) == {ChunkState.AWAY}
    values[:CHUNK] += 1
    assert torch.equal(storage.read(0, NUMEL), values)
    storage.store(0, NUMEL).wait()
    assert states(storage) == {ChunkState.AWAY}  # it is no longer pinned


def test_a_change_survives_dropping_the_pages(disk: Disk) -> None:
    storage, values = filled(disk)
    storage.store(0, NUMEL).wait()
    storage.write(NUMEL - 1, NUMEL).fill_(7)
    storage.evict(0, NUMEL)
    values[-1] = 7
    assert torch.equal(storage.read(0, NUMEL), values)


def test_discarded_states_are_not_read_again(disk: Disk) -> None:
    storage, _ = filled(disk)
    storage.store(0, NUMEL).wait()
    storage.discard(0, NUMEL)
    storage.write(0, NUMEL).fill_(2)
    assert disk.traffic.read_bytes == 0
    storage.store(0, NUMEL).wait()
    assert float(storage.write(0, NUMEL).sum()) == 2 * NUMEL


def test_a_fetch_waits_for_the_store_before_it(disk: Disk) -> None:
    storage, values = filled(disk)
    for _ in range(20):
        storage.store(0, NUMEL)
        storage.fetch(0, NUMEL).wait()
    assert torch.equal(storage.write(0, NUMEL), values)


def test_bytes_in_memory_are_used_without_waiting_for_a_slow_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, values = filled(disk)
    may_write, write = threading.Event(), disk.write
    monkeypatch.setattr(disk, "write", lambda *a: (may_write.wait(10), write(*a)))
    leaving = storage.store(0, NUMEL)
    assert torch.equal(storage.read(0, NUMEL), values) and not leaving.is_done()
    storage.evict(0, CHUNK)  # evicted during the write, so the writer frees it
    may_write.set()
    leaving.wait()
    assert isinstance(storage, DiskStorage)
    assert [chunk.state for chunk in storage.chunks] == [ChunkState.AWAY, *[ChunkState.HERE] * 5]
    assert disk.traffic.read_bytes == 0
    storage.evict(0, NUMEL)
    assert states(storage) == {ChunkState.AWAY} and torch.equal(storage.read(0, NUMEL), values)


@pytest.mark.parametrize("seed", range(8))
def test_values_are_correct_for_any_order_of_fetches(disk: Disk, seed: int) -> None:
    chance = random.Random(seed)
    storage, values = filled(disk)
    for number in range(400):
        low = chance.randrange(NUMEL)
        high = chance.randint(low, min(NUMEL, low + 2 * CHUNK))
        match chance.choice(("write", "look", "fetch", "store", "drop", "wait")):
            case "write":
                storage.write(low, high).fill_(number)
                values[low:high] = number
            case "look":
                assert torch.equal(storage.read(low, high), values[low:high])
            case "fetch":
                storage.fetch(low, high)
            case "store":
                storage.store(low, high)
            case "drop":
                storage.evict(low, high)
            case "wait":
                storage.fetch(low, high).wait()
    storage.store(0, NUMEL).wait()
    assert states(storage) == {ChunkState.AWAY}
    assert torch.equal(storage.read(0, NUMEL), values)


def test_many_storages_share_a_file_and_never_each_others_bytes(disk: Disk) -> None:
    pairs = [filled(disk, numel) for numel in (1, 100, CHUNK, CHUNK + 1, NUMEL)]
    for storage, _ in pairs:
        storage.store(0, len(storage.memory))
    for storage, values in reversed(pairs):
        assert torch.equal(storage.write(0, len(values)), values)


def test_bytes_are_counted(disk: Disk) -> None:
    storage, _ = filled(disk, 2 * CHUNK)
    storage.store(0, 2 * CHUNK).wait()
    storage.write(0, CHUNK)
    moved = disk.traffic
    assert (moved.written_bytes, moved.read_bytes) == (8 * CHUNK, 4 * CHUNK)
    assert moved.seconds > 0 and moved.waited_seconds > 0
    moved.reset()
    assert (moved.written_bytes, moved.read_bytes, moved.seconds) == (0, 0, 0.0)


def test_an_empty_state_needs_nothing(disk: Disk) -> None:
    storage = disk.reserve(0, torch.float32, CHUNK, "nothing")
    storage.store(0, 0).wait()
    assert storage.write(0, 0).numel() == 0


# -- privacy


def test_the_file_has_no_name_and_is_private_to_the_user(disk: Disk, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(disk.descriptor).st_mode & 0o777 == 0o600
    assert os.fstat(disk.descriptor).st_nlink == 0


def test_without_unnamed_files_a_file_is_created_and_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    disk = Disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
    storage, values = filled(disk)
    storage.store(0, NUMEL).wait()
    assert torch.equal(storage.write(0, NUMEL), values)


def test_two_jobs_may_share_a_directory(tmp_path: Path) -> None:
    pairs = [filled(Disk(tmp_path)) for _ in range(2)]
    for storage, _ in pairs:
        storage.store(0, NUMEL)
    for storage, values in pairs:
        assert torch.equal(storage.write(0, NUMEL), values)


def test_closing_waits_and_closes_the_file(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    storage, _ = filled(disk)
    storage.store(0, NUMEL)
    disk.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(disk.descriptor)


# -- failures


def test_a_missing_directory_is_created_with_access_for_this_user_only(tmp_path: Path) -> None:
    Disk(tmp_path / "new" / "inner").close()
    assert [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", tmp_path / "new" / "inner")
    ] == [0o700] * 2


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"inner' failed: Not a directory"):
        Disk(tmp_path / "file" / "inner")


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        Disk(tmp_path / "file")


def test_insufficient_space_is_reported_before_anything_is_written(disk: Disk) -> None:
    with pytest.raises(
        StorageError, match=r"need 2\.00 PiB on .*1\.00 PiB for each of 2 ranks\), .* are free"
    ):
        disk.check_space(1 << 50, 2)


def altered(change: Callable[[int, int], None], tmp_path: Path) -> StorageError:
    """Return the error of a read after the file of a storage was changed.

    Also check that the storage can be read again after the file is repaired.
    """
    disk = Disk(tmp_path)
    storage, _ = filled(disk)
    storage.store(0, NUMEL).wait()
    other = os.open(f"/proc/self/fd/{disk.descriptor}", os.O_RDWR)
    change(other, NUMEL * 4)
    os.close(other)
    with pytest.raises(StorageError) as caught:
        storage.write(0, NUMEL)
    return caught.value


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    def flip(descriptor: int, nbytes: int) -> None:
        byte = os.pread(descriptor, 1, nbytes // 2)
        os.pwrite(descriptor, bytes([byte[0] ^ 1]), nbytes // 2)

    error = altered(flip, tmp_path)
    assert "reading values" in str(error) and "not those that were written" in str(error)


@pytest.mark.parametrize(
    ("size", "first", "second"), [(4096, 0, 4096), (512, 512, 1024), (8, 16, 8192), (1024, 0, 3072)]
)
def test_swapped_words_sectors_and_pages_are_detected(
    tmp_path: Path, size: int, first: int, second: int
) -> None:
    def swap(descriptor: int, nbytes: int) -> None:
        left, right = os.pread(descriptor, size, first), os.pread(descriptor, size, second)
        os.pwrite(descriptor, right, first)
        os.pwrite(descriptor, left, second)

    assert "not those that were written" in str(altered(swap, tmp_path))


def test_a_stale_block_is_found(tmp_path: Path) -> None:
    def overwrite(descriptor: int, nbytes: int) -> None:
        os.pwrite(descriptor, bytes(4096), 4096)

    assert "not those that were written" in str(altered(overwrite, tmp_path))


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    error = altered(
        lambda descriptor, nbytes: os.ftruncate(descriptor, 3 * CHUNK * 4 + 100), tmp_path
    )
    assert "reading values" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_write_that_fails_loses_nothing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    storage, values = filled(disk)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", refuse)
        with pytest.raises(StorageError, match=f"writing values .*{os.strerror(number)}"):
            storage.store(0, NUMEL).wait()
        for _ in range(10):  # each chunk reports its error once
            try:
                part = storage.write(0, NUMEL)
            except StorageError:
                continue
            assert torch.equal(part, values)
            break
        else:
            pytest.fail("the values never came back")
    storage.store(0, NUMEL).wait()
    assert torch.equal(storage.write(0, NUMEL), values)


def test_short_writes_and_reads_are_continued(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][:4096]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:4096]], at))
    storage, values = filled(disk)
    storage.store(0, NUMEL).wait()
    assert torch.equal(storage.write(0, NUMEL), values)


@pytest.mark.parametrize("threads", [1, 8])
def test_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    disk = Disk(tmp_path, DiskSettings(threads, 4096))
    storage, values = filled(disk)
    for _ in range(5):
        storage.store(0, NUMEL)
        storage.fetch(0, NUMEL).wait()
    assert torch.equal(storage.write(0, NUMEL), values)


MIB = 1 << 20


def run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 8 MiB."""
    need(os.geteuid() == 0, "root, to mount a tmpfs")
    place = tmp_path / "small"
    place.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=8m", "none", place)
    yield place
    run("umount", "-l", place)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Mount an ext4 file system in a file; yield the mount point and the file."""
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


def test_reserved_space_is_usable_after_another_process_fills_the_disk(small: Path) -> None:
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


def test_missing_blocks_are_an_error_and_never_wrong_numbers(loop: tuple[Path, Path]) -> None:
    """The backing file ends early, so reads beyond its end fail with EIO."""
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
