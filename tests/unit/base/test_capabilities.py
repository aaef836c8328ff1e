"""One record lists the implementation that each rank uses for a feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepseek_zero.base import host, memory
from deepseek_zero.base.capabilities import Capabilities, Capability, as_text
from tests.fake_host import files_of

FAST = Capability("states", "past the page cache")
SLOW = Capability("states", "through the page cache", "the file system refuses O_DIRECT")


def test_a_transport_of_all_ranks_is_logged_in_one_line() -> None:
    record = Capabilities.of_ranks([as_text([FAST])] * 3)
    assert record.explain() == ["states: past the page cache"]
    assert record.fallbacks == []


def test_a_transport_of_some_ranks_is_logged_with_the_ranks() -> None:
    record = Capabilities.of_ranks([as_text([FAST]), as_text([SLOW]), as_text([SLOW])])
    slow = "states: through the page cache (the file system refuses O_DIRECT) [rank 1, 2]"
    assert record.explain() == ["states: past the page cache [rank 0]", slow]
    assert record.fallbacks == [slow]


@pytest.mark.parametrize(
    ("switch", "way"),
    [
        ("always [madvise] never", "huge pages (madvise)"),
        ("[always] madvise never", "huge pages (always)"),
        ("always madvise [never]", "pages of 4096 bytes"),
    ],
)
def test_huge_pages_are_reported_by_the_systems_setting(
    switch: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": switch})
    monkeypatch.setattr(host, "THIS_HOST", files)
    monkeypatch.setattr(memory, "PAGE", 4096)
    found = next(
        each for each in memory.capabilities(keeps_freed=True) if each.name == "memory of states"
    )
    assert found.way == way
    assert bool(found.lacks) == ("huge" not in way)


def test_an_unreadable_page_map_is_a_slower_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.pread", refused)
    found = next(each for each in memory.capabilities(keeps_freed=True) if "share" in each.name)
    assert found.lacks.startswith("/proc/self/pagemap cannot be read (Permission denied)")


@pytest.mark.parametrize(
    ("kept", "variable", "lacks"),
    [(True, "", ""), (False, "GLIBC_TUNABLES", ""), (False, "", "only glibc")],
)
def test_freed_memory_is_reported_as_slower_only_if_it_is_not_configured(
    kept: bool, variable: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    found = next(
        each for each in memory.capabilities(keeps_freed=kept) if each.name == "freed memory"
    )
    assert found.lacks.startswith(lacks) and bool(found.lacks) == bool(lacks)
