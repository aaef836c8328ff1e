"""Read from the kernel: memory, loopback traffic, CPU use and CPU model.

PSS counts a shared page proportionally; USS is the memory that would be freed if this process
ended. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path
from types import TracebackType

Memory = dict[str, int]  # bytes by kind: pss, uss, rss
# CPU features that determine the speed of fp32 and bf16 products
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def parse_rollup(text: str) -> Memory:
    """Return PSS, USS and RSS from the text of smaps_rollup.

    PSS excludes pages that the kernel may reclaim at any time (LazyFree).
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
    """Return memory after glibc has released free memory, so that it reflects live objects."""
    ctypes.CDLL(None).malloc_trim(0)
    return memory_now()


class Peak:
    """The largest PSS and USS seen during a block, and the exact peak RSS.

    A thread samples every `interval` seconds. Sampling walks the page tables and slows down the
    process, so it must not run during a timed step.
    """

    def __init__(self, interval: float = 0.02) -> None:
        self.interval, self.highest = interval, memory_now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak RSS
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
    """Return the bytes sent over loopback from the text of /proc/net/dev."""
    line = next(line for line in text.splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def loopback_bytes() -> int:
    """Return the bytes that all processes of this machine have sent over loopback."""
    return parse_loopback(Path("/proc/net/dev").read_text())


def parse_busy(text: str) -> float:
    """Return the busy core-seconds since boot from the text of /proc/stat, including stolen
    time.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, text.split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    return parse_busy(Path("/proc/stat").read_text())


def machine() -> dict[str, object]:
    """Return the facts of the machine that readers need to compare figures."""
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
