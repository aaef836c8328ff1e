"""What the kernel says of this process and this machine: memory, loopback traffic, who used the
cores, which CPU.

PSS counts a shared page once over all that map it; USS is what would be freed if this process
ended.  Linux only.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path
from types import TracebackType

Memory = dict[str, int]  # bytes by kind: pss, uss, rss
# What decides how fast fp32 and bf16 products are
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def parse_rollup(text: str) -> Memory:
    """PSS, USS and RSS of a smaps_rollup.

    PSS does not count pages that the system may take at any time (LazyFree).
    """
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    kinds = {
        "pss": kib["Pss"] - kib.get("LazyFree", 0),
        "uss": kib["Private_Clean"] + kib["Private_Dirty"],
        "rss": kib["Rss"],
    }
    return {kind: size * 1024 for kind, size in kinds.items()}


def memory_now() -> Memory:
    return parse_rollup(Path("/proc/self/smaps_rollup").read_text())


def settled_memory() -> Memory:
    """Memory after glibc has returned what is free, so that it follows what is alive."""
    ctypes.CDLL(None).malloc_trim(0)
    return memory_now()


class Peak:
    """Largest PSS and USS seen while the block runs, and the exact high-water mark of RSS.

    A thread looks every `interval` seconds.  Looking walks the page tables, which costs the process
    time: never inside a timed step.
    """

    def __init__(self, interval: float = 0.02) -> None:
        self.interval, self.highest = interval, memory_now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        self.highest["rss"] = int(found[1]) * 1024 if found else 0

    def _watch(self) -> None:
        while not self._done.wait(self.interval):
            self._look()

    def _look(self) -> None:
        now = memory_now()
        self.highest = {kind: max(size, self.highest[kind]) for kind, size in now.items()}


def parse_loopback(text: str) -> int:
    """Bytes sent over loopback, from /proc/net/dev."""
    line = next(line for line in text.splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def loopback_bytes() -> int:
    """Bytes that all processes of this machine have sent over loopback."""
    return parse_loopback(Path("/proc/net/dev").read_text())


def parse_busy(text: str) -> float:
    """Core-seconds not idle since boot, those the hypervisor took included, from /proc/stat."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, text.split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    return parse_busy(Path("/proc/stat").read_text())


def machine() -> dict[str, object]:
    """What a reader must know to compare these figures with others."""
    cpu = Path("/proc/cpuinfo").read_text()
    flags = re.search(r"^flags\s*:(.*)$", cpu, re.MULTILINE)
    model = re.search(r"^model name\s*:\s*(.*)$", cpu, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    present = flags[1].split() if flags else []
    return {
        "cpu": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else 0,
        "has": [flag for flag in FLAGS if flag in present],
        "has_not": [flag for flag in FLAGS if flag not in present],
    }
