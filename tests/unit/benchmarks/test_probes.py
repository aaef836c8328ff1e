"""Probes parse the kernel's files correctly and record the peak of memory."""

from __future__ import annotations

import time

import torch

from benchmarks.probes import Peak, machine, memory_now, parse_busy, parse_loopback, parse_rollup
from deepseek_zero.base.memory import private_pages

ROLLUP = """56047ca4e000-7ffd083f3000 ---p 00000000 00:00 0                          [rollup]
Rss:                1764 kB
Pss:                 571 kB
Pss_Dirty:           112 kB
Private_Clean:       108 kB
Private_Dirty:       112 kB
"""
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|\
bytes    packets errs drop fifo colls carrier
  eth0: 5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0
    lo: 100       2    0    0    0     0          0         0  \
354794       3    0    0    0     0       0          0
"""


def test_memory_is_read_from_the_rollup() -> None:
    assert parse_rollup(ROLLUP) == {"pss": 571 * 1024, "uss": 220 * 1024, "rss": 1764 * 1024}


def test_bytes_sent_over_loopback_are_read_from_the_device_table() -> None:
    assert parse_loopback(NET) == 354794


def test_busy_seconds_count_all_but_idle_and_waiting() -> None:
    assert parse_busy("cpu  100 20 30 5000 600 7 8 9 0 0\ncpu0 1") > 0
    assert parse_busy("cpu  0 0 0 5000 600 0 0 0 0 0\n") == 0


def test_a_peak_that_has_passed_is_still_measured() -> None:
    size = 64 * 2**20
    before = memory_now()["uss"]
    with Peak(interval=0.005) as peak:
        # The C library may have kept freed pages for reuse.
        block = private_pages(size, torch.uint8).fill_(1)
        deadline = time.monotonic() + 20.0
        while peak.highest["uss"] < before + 0.9 * size and time.monotonic() < deadline:
            time.sleep(0.01)  # the probe samples in its own thread
        del block
    assert peak.highest["uss"] >= before + 0.9 * size
    assert peak.highest["rss"] >= peak.highest["uss"]


def test_the_machine_is_described() -> None:
    assert {"cpu", "cores", "memory_gib", "has", "has_not"} == set(machine())
