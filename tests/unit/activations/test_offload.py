"""Offload of activations: restored bytes are unchanged, memory is reused and freed in any order."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepseek_zero.activations.offload import (
    AHEAD,
    ActivationOffload,
    OffloadedInputs,
    OffloadHandle,
)
from deepseek_zero.base.errors import OutOfMemoryError, StorageError
from deepseek_zero.base.memory import PAGE
from deepseek_zero.tiers.disk import ChunkState, Disk, DiskStorage
from deepseek_zero.tiers.host import HostMemory
from deepseek_zero.tiers.tier import TierMemory
from tests.unit.base.test_memory import resident_bytes

NUMEL = 16 * 1024  # 64 KiB of fp32, a multiple of the disk sector size
NBYTES = 4 * NUMEL


@pytest.fixture(params=["host", "disk"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], TierMemory]:
    return HostMemory if request.param == "host" else lambda: Disk(tmp_path)


def drawn(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def assert_is(parked: OffloadHandle, seed: int, numel: int = NUMEL) -> None:
    assert torch.equal(parked.restore()[0], drawn(seed, numel))


def cycle(parking: ActivationOffload, count: int, numel: int = NUMEL) -> int:
    """Offload `count` checkpoints and restore them in reverse order.

    Return the largest number of bytes that were in memory at once.
    """
    most, parked = 0, []
    for seed in range(count):
        parked.append(parking.offload([drawn(seed, numel)]))
        most = max(most, here_bytes(parking))
    while parked:
        assert_is(parked[-1], len(parked) - 1, numel)
        most = max(most, here_bytes(parking))
        parked.pop()
    parking.sweep()
    return most


def here_bytes(parking: ActivationOffload) -> int:
    """Return the bytes of offloaded checkpoints that are in memory or are being read."""
    return sum(
        stay.nbytes for stay in parking._offloaded.values() if state_of(stay) - {ChunkState.AWAY}
    )


def state_of(stay: OffloadedInputs) -> set[ChunkState]:
    storage = stay.storage
    if not isinstance(storage, DiskStorage):
        return {ChunkState.HERE}
    return {chunk.state for chunk in storage._of(*stay.block)}


# -- bytes


SHAPES: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(33, 65),
    "transposed": lambda: torch.randn(33, 65).t(),
    "permuted": lambda: torch.randn(4, 17, 33).permute(2, 0, 1),
    "expanded": lambda: torch.randn(33, 1).expand(33, 65),
    "with gaps": lambda: torch.randn(33, 195)[:, 65:130],
    "every other": lambda: torch.randn(4000)[1::2],
    "channels last": lambda: torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),
    "number": lambda: torch.tensor(1.5),
    "nothing": lambda: torch.empty(0, 3),
    "overlapping": lambda: torch.randn(100).as_strided((50, 40), (1, 1)),
    "not numbers": lambda: torch.full((2000,), float("nan")),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_a_tensor_is_restored_with_its_bytes_shape_strides_and_dtype(
    shape: str, dtype: torch.dtype, opening: Callable[[], TierMemory]
) -> None:
    tensor = SHAPES[shape]()
    if dtype != torch.float32:
        tensor = tensor.to(dtype)  # keeps the strides of dense tensors
    parking = ActivationOffload(opening)
    others = [torch.randn(100), torch.randn(7)]
    first, found, last = parking.offload([others[0], tensor, others[1]]).restore()
    assert (found.dtype, found.shape, found.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert torch.equal(as_bytes(found), as_bytes(tensor))
    assert torch.equal(first, others[0]) and torch.equal(last, others[1])


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_restored_activations_can_be_changed_and_restored_again(
    opening: Callable[[], TierMemory],
) -> None:
    parking = ActivationOffload(opening)
    parked = [parking.offload([drawn(seed)]) for seed in range(4)]
    for seed in (3, 0, 2, 3, 0):
        found = parked[seed].restore()[0]
        assert torch.equal(found, drawn(seed))
        found.zero_()


# -- the slab


def test_the_first_cycle_determines_the_size_and_later_ones_allocate_nothing(
    opening: Callable[[], TierMemory],
) -> None:
    reserved: list[int] = []

    def watched() -> TierMemory:
        memory = opening()
        reserve = memory.reserve

        def count(numel: int, *rest: Any) -> Any:
            reserved.append(numel)
            return reserve(numel, *rest)

        memory.reserve = count  # type: ignore[method-assign]
        return memory

    parking = ActivationOffload(watched)
    cycle(parking, 5)
    assert reserved == [NBYTES] * 5
    for _ in range(3):
        cycle(parking, 5)
        assert reserved == [NBYTES] * 5 + [5 * NBYTES]
    assert [slab.nbytes for slab in parking.slabs] == [5 * NBYTES]
    assert (
        parking.memory.reserved_bytes == parking.reserved_bytes == parking.peak_bytes == 5 * NBYTES
    )
    assert parking.unused_bytes == 0 and parking.used_bytes == 0
    assert parking.explain() == "activations: 320 KiB in one arena, 320 KiB used at most, gap 0 B"


def test_a_given_number_of_blocks_is_reserved_immediately_and_grows_if_necessary(
    opening: Callable[[], TierMemory],
) -> None:
    parking = ActivationOffload(opening, checkpoints=5)
    first = parking.offload([drawn(0)])
    assert parking.memory.reserved_bytes == parking.reserved_bytes == 5 * NBYTES
    assert parking.unused_bytes == 4 * NBYTES
    del first
    cycle(parking, 5)
    assert len(parking.slabs) == 1 and parking.unused_bytes == 0
    cycle(parking, 7)
    cycle(parking, 7)
    assert [slab.nbytes for slab in parking.slabs] == [7 * NBYTES]


def test_sizes_that_divide_by_nothing_leave_a_gap_of_a_sixteenth_and_a_sector(
    opening: Callable[[], TierMemory],
) -> None:
    parking = ActivationOffload(opening)
    for _ in range(2):
        parked = [parking.offload([drawn(seed, 10_000 + 777 * seed)]) for seed in range(8)]
        for seed in reversed(range(8)):
            assert_is(parked.pop(), seed, 10_000 + 777 * seed)
    assert len(parking.slabs) == 1
    assert 0 < parking.unused_bytes < 8 * (NBYTES // 16 + 2 * PAGE)


def test_any_order_of_releases_reads_correct_data_and_frees_space(
    opening: Callable[[], TierMemory],
) -> None:
    """The slab grows only to the peak usage if several forwards are in flight."""
    parking, flight, seed = ActivationOffload(opening), [], 0
    for _ in range(12):
        for _ in range(3):
            flight.append((parking.offload([drawn(seed)]), seed))
            seed += 1
        if len(flight) > 6:
            for parked, number in reversed(flight[:3]):
                assert_is(parked, number)
            del flight[:3], parked
    assert parking.reserved_bytes == parking.memory.reserved_bytes == 9 * NBYTES


def test_a_forward_without_a_backward_leaks_no_slot(opening: Callable[[], TierMemory]) -> None:
    parking = ActivationOffload(opening)
    for _ in range(5):
        forgotten = [parking.offload([drawn(seed)]) for seed in range(4)]
        del forgotten
    parking.sweep()
    assert parking.used_bytes == 0
    assert parking.reserved_bytes == 4 * NBYTES


def test_a_graph_remains_valid_after_its_offload_ends(opening: Callable[[], TierMemory]) -> None:
    parking = ActivationOffload(opening)
    parked = [parking.offload([drawn(seed)]) for seed in range(4)]
    parking.close()
    del parking
    for seed in (3, 1):
        assert_is(parked[seed], seed)


def test_releasing_memory_twice_is_allowed(opening: Callable[[], TierMemory]) -> None:
    parking = ActivationOffload(opening)
    cycle(parking, 3)
    parking.close()
    parking.close()
    assert parking.reserved_bytes == 0


# -- the disk


@pytest.mark.parametrize("count", [6, 24, 96])
def test_on_a_disk_the_bytes_in_memory_do_not_grow_with_the_checkpoints(
    count: int, tmp_path: Path
) -> None:
    parking = ActivationOffload(lambda: Disk(tmp_path))
    cycle(parking, count)
    assert cycle(parking, count) <= (2 + AHEAD) * NBYTES
    # Backward starts with the newest checkpoint, which is not written.
    assert parking.memory.traffic.written_bytes == (count - 1) * NBYTES
    # Checkpoints whose write has not finished are not read.
    assert (count - 4) * NBYTES <= parking.memory.traffic.read_bytes < count * NBYTES


def test_on_a_disk_the_pages_of_other_blocks_are_returned(tmp_path: Path) -> None:
    parking, numel, most = ActivationOffload(lambda: Disk(tmp_path)), 1 << 20, 0
    cycle(parking, 24, numel)
    before, parked = resident_bytes(), []
    for seed in range(24):
        parked.append(parking.offload([drawn(seed, numel)]))
        most = max(most, resident_bytes() - before)
    while parked:
        assert_is(parked.pop(), len(parked), numel)
        most = max(most, resident_bytes() - before)
    parking.sweep()
    # All 24 need 24 tensors; the limit includes the compared tensors and their copies.
    assert most < 10 * 4 * numel
    assert resident_bytes() - before < 4 * 4 * numel


def test_the_next_activation_of_backward_is_prefetched(tmp_path: Path) -> None:
    parking = ActivationOffload(lambda: Disk(tmp_path))
    parked = [parking.offload([drawn(seed)]) for seed in range(8)]
    for ticket in parking._leaving:
        ticket.wait()
    parked[5].restore()
    coming = [
        number for number, stay in parking._offloaded.items() if state_of(stay) != {ChunkState.AWAY}
    ]
    assert coming == [4, 5, 8]  # numbered from 1: the two before the sixth, and the newest


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_is_named(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parking = ActivationOffload(lambda: Disk(tmp_path))
    cycle(parking, 6)
    cycle(parking, 6)

    def refuse(*given: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=f"ing activations on .* failed: {os.strerror(number)}"):
        cycle(parking, 6)


def test_other_bytes_than_were_written_are_an_error(tmp_path: Path) -> None:
    parking = ActivationOffload(lambda: Disk(tmp_path))
    cycle(parking, 3)
    parked = [parking.offload([drawn(seed)]) for seed in range(3)]
    for ticket in parking._leaving:
        ticket.wait()
    assert isinstance(parking.memory, Disk)
    # Direct I/O needs an aligned buffer.
    os.pwrite(parking.memory.descriptor, mmap.mmap(-1, PAGE), 0)
    with pytest.raises(StorageError, match="not those that were written"):
        parked[0].restore()


def test_buffers_that_do_not_fit_are_refused_before_they_are_reserved(tmp_path: Path) -> None:
    for opening, error in ((HostMemory, OutOfMemoryError), (lambda: Disk(tmp_path), StorageError)):
        parking = ActivationOffload(opening, checkpoints=1 << 40)
        with pytest.raises(error, match="are free"):
            parking.offload([drawn(0)])


def test_the_directory_is_left_empty(tmp_path: Path) -> None:
    parking = ActivationOffload(lambda: Disk(tmp_path))
    cycle(parking, 3)
    cycle(parking, 3)
    assert os.listdir(tmp_path) == []
