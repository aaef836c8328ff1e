"""Memory mapped by this library, and the memory that the C library keeps after a free."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_zero.base.memory import (
    HUGE_PAGE,
    PAGE,
    Segment,
    is_cached,
    offer_pages,
    private_pages,
    return_pages,
)

FAULTS = """
import resource, sys, torch
from deepseek_zero.base.memory import keep_freed_memory
changed = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        several = [torch.ones(2_000_000) for _ in range(4)]
        del several
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(changed, faults())
"""


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "nbytes", [4, PAGE, HUGE_PAGE - 4, HUGE_PAGE, 7 * HUGE_PAGE + PAGE, 8 * HUGE_PAGE]
)
def test_pages_begin_where_a_huge_one_can_and_are_zeros_to_the_end(nbytes: int) -> None:
    pages = private_pages(nbytes // 4, torch.float32)
    assert pages.nbytes == pages.untyped_storage().nbytes() == nbytes and not pages.any()
    assert pages.data_ptr() % (HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE) == 0
    before = resident_bytes()
    pages.fill_(1.0)
    assert resident_bytes() - before < nbytes + HUGE_PAGE and pages.all()


def test_returned_pages_belong_to_the_system_until_written_again() -> None:
    pages = private_pages(16 << 20, torch.float32)
    empty = resident_bytes()
    for value in (1.0, 2.0):
        pages.fill_(value)
        assert resident_bytes() - empty > 60 << 20
        return_pages(pages)
        assert resident_bytes() - empty < 8 << 20
        assert pages[123] == 0


def test_offered_pages_are_found_again_without_page_faults() -> None:
    pages = private_pages(16 << 20, torch.float32).fill_(1.0)
    faults = {}
    for give in (offer_pages, return_pages):
        give(pages)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        pages.fill_(2.0)
        faults[give] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert (pages == 2.0).all()
    assert 4 * faults[offer_pages] < faults[return_pages]


def test_returned_shared_pages_are_freed_for_all_mappings() -> None:
    segment = Segment.create(64 << 20)
    ours = segment.map(0, 16 << 20, torch.float32)
    theirs = segment.view(torch.float32).tensor
    empty = resident_bytes()
    for value in (1.0, 2.0):
        ours.fill_(value)
        assert theirs[-1] == value
        return_pages(ours)
        assert theirs[-1] == 0
        assert resident_bytes() - empty < 8 << 20
    segment.close()


def test_pages_shared_with_other_data_are_not_returned() -> None:
    memory = private_pages(4096, torch.float32).fill_(1.0)
    return_pages(memory[100:4000])
    assert (memory[:100] == 1).all()
    assert (memory[4000:] == 1).all()
    assert memory[2000] == 0


@pytest.mark.parametrize(
    "variables", [{}, {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}]
)
def test_freed_memory_is_kept_unless_configured_otherwise(variables: dict[str, str]) -> None:
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))
    }
    out = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=plain | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    changed, faults = out[0] == "True", int(out[1])
    assert changed is not bool(variables)
    assert faults < 500 if changed else faults > 50_000, (
        "pages taken anew: 2,000 each for 40 tensors"
    )


HOLES = """
import torch

from deepseek_zero.base.memory import trim_heap, keep_freed_memory
from tests.unit.base.test_memory import resident_bytes
keep_freed_memory()
trim_heap()
start, pins, x = resident_bytes(), [], torch.ones(2 << 20)
for _ in range(20):
    y = torch.ones(2 << 20)  # 8 MiB, before the last one goes
    pins.append(torch.ones(8))
    x = y
before = resident_bytes() - start
trim_heap()
print(before >> 20, resident_bytes() - start >> 20, sum(float(pin.sum()) for pin in pins))
"""


def test_holes_in_the_heap_are_returned_and_live_memory_is_kept() -> None:
    root = Path(__file__).resolve().parents[3]
    before, after, total = subprocess.check_output(
        [sys.executable, "-c", HOLES], cwd=root, text=True
    ).split()
    assert float(total) == 20 * 8
    assert int(after) <= min(int(before), 24)  # one tensor and the top of the heap


def test_pages_in_the_page_cache_are_detected_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * PAGE + 5))
    os.truncate(path, 8 * PAGE)  # extends the file with pages that are not cached
    with path.open("rb") as file:
        assert is_cached(file.fileno(), 0, 2 * PAGE + 5) and is_cached(
            file.fileno(), PAGE, 2 * PAGE
        )
        for _ in range(2):
            assert not is_cached(file.fileno(), 0, 8 * PAGE)
    assert not is_cached(9999, 0, PAGE), "no such file is open"


GROWTH = """
import torch
from deepseek_zero.base.memory import GrowingHeap, keep_freed_memory
from tests.unit.base.test_memory import resident_bytes
keep_freed_memory()
heap, pins, reused = GrowingHeap(), [], torch.ones(2 << 20)
heap.trim()
start = resident_bytes()
for _ in range(40):
    grown = torch.ones(2 << 20)  # 8 MiB, before the last one goes
    pins.append(torch.ones(8))
    reused = grown
    heap.trim()
print(resident_bytes() - start >> 20)
trims = []
import deepseek_zero.base.memory as memory
memory.trim_heap = lambda: trims.append(1)
for _ in range(40):
    reused = None
    reused = torch.ones(2 << 20)
    heap.trim()
print(len(trims))
"""


def test_a_heap_is_trimmed_if_it_grows_and_not_if_its_holes_are_reused() -> None:
    root = Path(__file__).resolve().parents[3]
    resident, trims = subprocess.check_output(
        [sys.executable, "-c", GROWTH], cwd=root, text=True
    ).split()
    assert int(resident) <= 96, "320 MiB of tensors were freed, of which 64 MiB may stay"
    assert int(trims) <= 1
