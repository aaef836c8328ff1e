"""Read the NUMA nodes and the limits of this host from /sys and /proc.

A file that does not exist or cannot be read counts as "not known" or "no limit". The module does
not import torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

REMOTE_DISTANCE = 20  # the kernel's distance of two nodes that are not in one socket
NO_LIMIT = 1 << 60  # bytes; version 1 reports "no limit" as a number above this one


@dataclass(frozen=True)
class CgroupMemory:
    """The memory limit of a control group.

    Attributes:
        version: Version of the control groups, 1 or 2.
        limit: The limit in bytes.
        used: Bytes that count against the limit. Page-locked memory is part of them.
    """

    version: int
    limit: int
    used: int

    @property
    def free(self) -> int:
        """Return the bytes that can still be allocated."""
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class HostFiles:
    """The files of /sys and /proc that describe this host.

    Attributes:
        root: The folder that contains `sys` and `proc`.
    """

    root: Path = Path("/")

    def nodes(self) -> dict[int, frozenset[int]]:
        """Return the CPUs of each NUMA node that has CPUs, by the number of the node."""
        found = {}
        for folder in (self.root / "sys/devices/system/node").glob("node[0-9]*"):
            cpus = parse_cpus(_text(folder / "cpulist"))
            if cpus:
                found[int(folder.name.removeprefix("node"))] = cpus
        return dict(sorted(found.items()))

    def cpus_near(self, node: int) -> frozenset[int]:
        """Return the CPUs of a NUMA node and of the other nodes of its socket.

        Processors can divide a socket into several nodes whose distances are small.

        Args:
            node: The number of the node.
        """
        nodes = self.nodes()
        cpus = nodes.get(node, frozenset())
        distances = _text(self.root / f"sys/devices/system/node/node{node}/distance").split()
        # The file has one distance per node that is online, in the order of their numbers
        online = sorted(parse_cpus(_text(self.root / "sys/devices/system/node/online")))
        for other, distance in zip(online, distances, strict=False):
            if int(distance) < REMOTE_DISTANCE:
                cpus |= nodes.get(other, frozenset())
        return cpus

    def node_of_gpu(self, address: str) -> int | None:
        """Return the NUMA node of a GPU, or None if the system does not report it.

        Args:
            address: The address of the GPU on the PCI bus, such as 0000:3b:00.0.
        """
        text = _text(self.root / "sys/bus/pci/devices" / address / "numa_node")
        return int(text) if text.isdigit() else None  # -1: not known

    def pages_by_node(self, address: int) -> dict[int, int]:
        """Return the bytes that each NUMA node holds of a mapping of this process.

        Args:
            address: An address in the mapping.
        """
        found: dict[int, int] = {}
        for line in _text(self.root / "proc/self/numa_maps").splitlines():
            start, _, fields = line.partition(" ")
            if int(start, 16) > address:
                break
            page = re.search(r"kernelpagesize_kB=(\d+)", fields)
            kib = int(page[1]) if page else 4
            found = {}
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", fields):
                found[int(node)] = int(pages) * kib * 1024
        return found

    def huge_pages(self) -> str:
        """Return the mode of transparent huge pages, or "" if there are none."""
        text = _text(self.root / "sys/kernel/mm/transparent_hugepage/enabled")
        found = re.search(r"\[(\w+)\]", text)
        return found[1] if found else ""

    def cpu_flags(self) -> set[str]:
        """Return the names of the CPU's instruction sets, if the system lists them."""
        for line in _text(self.root / "proc/cpuinfo").splitlines():
            if line.startswith(("flags", "Features")):
                return set(line.partition(":")[2].split())
        return set()

    def cgroup_memory(self) -> CgroupMemory | None:
        """Return the memory limit that leaves the fewest bytes, or None without a limit.

        The limits of the process's control group and of all groups above it count.
        """
        found = []
        for version, folder in self._cgroups("memory"):
            if version == 2:
                names = ("memory.max", "memory.current")
            else:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limit, used = (_text(folder / name) for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
                found.append(CgroupMemory(version, int(limit), int(used)))
        return min(found, key=lambda each: each.free, default=None)

    def cpu_quota(self) -> int | None:
        """Return the CPUs whose time the control groups grant, rounded up; None: no limit."""
        found = []
        for version, folder in self._cgroups("cpu"):
            if version == 2:
                quota, _, period = _text(folder / "cpu.max").partition(" ")
            else:
                quota = _text(folder / "cpu.cfs_quota_us")
                period = _text(folder / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit():
                found.append(max(1, math.ceil(int(quota) / int(period))))
        return min(found, default=None)

    def _cgroups(self, controller: str) -> Iterator[tuple[int, Path]]:
        """Yield the version and the folder of each control group that limits this process.

        Args:
            controller: The controller of version 1, such as "memory".
        """
        paths = {}
        for line in _text(self.root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                paths[2] = path
            elif controller in controllers.split(","):
                paths[1] = path
        top = self.root / "sys/fs/cgroup"
        for version, folder in ((2, top), (2, top / "unified"), (1, top / controller)):
            yield version, folder
            names = paths.get(version, "").split("/")
            if ".." in names:  # The group is above the container's root and cannot be read
                continue
            for name in filter(None, names):
                folder /= name
                yield version, folder


THIS_HOST = HostFiles()


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs on which the calling thread may run."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def allowed_cores() -> int:
    """Return the number of CPU cores that this process may use.

    It is limited by the CPU affinity and by the quota of the control groups.
    """
    cores = len(allowed_cpus())
    quota = THIS_HOST.cpu_quota()
    return cores if quota is None else min(cores, quota)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list in the kernel's format, such as 0-3,8."""
    found = set[int]()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def format_cpus(cpus: Collection[int]) -> str:
    """Return CPUs as a list in the kernel's format."""
    parts = []
    for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]  # consecutive
        parts.append("-".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))))
    return ",".join(parts)


def _text(path: Path) -> str:
    """Return the contents of a file without surrounding spaces, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
