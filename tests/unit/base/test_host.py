"""NUMA nodes and limits of a host, read from files that replace /sys and /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deepseek_zero.base import memory
from deepseek_zero.base.host import (
    THIS_HOST,
    CgroupMemory,
    HostFiles,
    allowed_cpus,
    format_cpus,
    parse_cpus,
)
from tests.fake_host import GPU, NODES, files_of, two_nodes

GROUP = "sys/fs/cgroup"
VERSION_1 = f"{GROUP}/cpu/cpu.cfs"
NO_LIMIT = str(9223372036854771712)  # value for "no limit" in cgroup version 1


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3", {3}), ("0-2,8", {0, 1, 2, 8}), ("0,2", {0, 2})]
)
def test_cpus_are_read_and_written_in_the_kernels_format(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(cpus) == text


def test_nodes_and_the_node_of_a_gpu_are_read(tmp_path: Path) -> None:
    files = two_nodes(tmp_path, ("0-3,8-11", "4-7,12-15"))
    memory_only = {f"{NODES}/node2/cpulist": ""}
    files_of(tmp_path, memory_only)
    first, second = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    assert files.nodes() == {0: first, 1: second}
    assert files.node_of_gpu(GPU) == 1
    assert files.cpus_near(1) == second


def test_the_nodes_of_one_socket_are_near_each_other(tmp_path: Path) -> None:
    texts = {f"{NODES}/online": "0-3"}
    distances = ("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")
    for node, distance in enumerate(distances):
        texts[f"{NODES}/node{node}/cpulist"] = str(node)
        texts[f"{NODES}/node{node}/distance"] = distance
    files = files_of(tmp_path, texts)
    assert [files.cpus_near(node) for node in range(4)] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]


@pytest.mark.parametrize("text", ["-1", ""])
def test_a_gpu_without_a_reported_numa_node_has_no_node(text: str, tmp_path: Path) -> None:
    files = files_of(tmp_path, {f"sys/bus/pci/devices/{GPU}/numa_node": text})
    assert files.node_of_gpu(GPU) is None
    assert files.node_of_gpu("0000:af:00.0") is None


def test_a_host_without_these_files_has_no_nodes_and_no_limits(tmp_path: Path) -> None:
    files = HostFiles(tmp_path)
    assert files.nodes() == {}
    assert files.pages_by_node(4096) == {}
    assert files.huge_pages() == ""
    assert files.cgroup_memory() is None
    assert files.cpu_quota() is None


def test_pages_of_a_mapping_are_counted_by_node(tmp_path: Path) -> None:
    lines = (
        "7f0000000000 default anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4",
        "7f0000400000 default file=/dev/hugepages/x huge anon=2 N1=2 kernelpagesize_kB=2048",
        "7f0000c00000 default file=/usr/lib/libN0=9.so mapped=1 kernelpagesize_kB=4",
    )
    files = files_of(tmp_path, {"proc/self/numa_maps": "\n".join(lines)})
    assert files.pages_by_node(0x7F0000001000) == {0: 4096, 1: 8192}
    assert files.pages_by_node(0x7F0000400000) == {1: 2 * 2048 * 1024}
    assert files.pages_by_node(0x7F0000C00000) == {}
    assert files.pages_by_node(0x1000) == {}


def test_pages_of_a_buffer_of_this_process_are_found() -> None:
    if not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("a kernel without NUMA")
    buffer = memory.private_pages(1 << 22, torch.uint8).fill_(1)
    assert sum(THIS_HOST.pages_by_node(buffer.data_ptr()).values()) >= buffer.nbytes


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # A container with cgroup version 2 whose root is its own group.
        (
            {
                "proc/self/cgroup": "0::/",
                f"{GROUP}/memory.max": "1000",
                f"{GROUP}/memory.current": "300",
            },
            CgroupMemory(2, 1000, 300),
        ),
        # A job with cgroup version 2 whose parent group has fewer bytes left.
        (
            {
                "proc/self/cgroup": "0::/jobs/7",
                f"{GROUP}/jobs/memory.max": "2000",
                f"{GROUP}/jobs/memory.current": "1900",
                f"{GROUP}/jobs/7/memory.max": "1000",
                f"{GROUP}/jobs/7/memory.current": "300",
            },
            CgroupMemory(2, 2000, 1900),
        ),
        (
            {
                "proc/self/cgroup": "0::/a",
                f"{GROUP}/a/memory.max": "max",
                f"{GROUP}/a/memory.current": "300",
            },
            None,
        ),
        # Cgroup version 1 next to a version 2 that lacks the controller.
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/a/b\n1:name=systemd:/c\n0::/",
                f"{GROUP}/memory/memory.limit_in_bytes": NO_LIMIT,
                f"{GROUP}/memory/memory.usage_in_bytes": "900",
                f"{GROUP}/memory/a/b/memory.limit_in_bytes": "1000",
                f"{GROUP}/memory/a/b/memory.usage_in_bytes": "900",
            },
            CgroupMemory(1, 1000, 900),
        ),
        # A container with cgroup version 1 that cannot see the directory of its own group.
        (
            {
                "proc/self/cgroup": "4:memory:/docker/0123",
                f"{GROUP}/memory/memory.limit_in_bytes": "1000",
                f"{GROUP}/memory/memory.usage_in_bytes": "900",
            },
            CgroupMemory(1, 1000, 900),
        ),
        (
            {
                "proc/self/cgroup": "0::/../other",
                f"{GROUP}/memory.max": "1000",
                f"{GROUP}/memory.current": "1300",
            },
            CgroupMemory(2, 1000, 1300),
        ),
        (
            {
                f"{GROUP}/memory/memory.limit_in_bytes": NO_LIMIT,
                f"{GROUP}/memory/memory.usage_in_bytes": "9",
            },
            None,
        ),
    ],
)
def test_the_tightest_memory_limit_counts(
    texts: dict[str, str], expected: CgroupMemory | None, tmp_path: Path
) -> None:
    assert files_of(tmp_path, texts).cgroup_memory() == expected


def test_a_group_over_its_limit_has_no_free_bytes() -> None:
    assert CgroupMemory(2, 1000, 1300).free == 0


@pytest.mark.parametrize(
    ("texts", "cpus"),
    [
        ({f"{GROUP}/cpu.max": "50000 100000"}, 1),
        ({f"{GROUP}/cpu.max": "250000 100000"}, 3),
        ({f"{GROUP}/cpu.max": "max 100000"}, None),
        (
            {f"{GROUP}/cpu/cpu.cfs_quota_us": "400000", f"{GROUP}/cpu/cpu.cfs_period_us": "100000"},
            4,
        ),
        ({f"{GROUP}/cpu/cpu.cfs_quota_us": "-1", f"{GROUP}/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_quota_of_cpus_is_read_in_both_versions(
    texts: dict[str, str], cpus: int | None, tmp_path: Path
) -> None:
    assert files_of(tmp_path, texts).cpu_quota() == cpus


def test_the_mode_of_huge_pages_is_read(tmp_path: Path) -> None:
    text = {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}
    assert files_of(tmp_path, text).huge_pages() == "madvise"


def test_allowed_cpus_are_those_of_the_affinity() -> None:
    assert allowed_cpus() == os.sched_getaffinity(0)
