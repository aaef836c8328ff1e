"""The threads that compute updates and sums on a CPU, and the CPUs to which they are bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise

import torch

from ..base import host
from ..base.device import default_device, pci_address

GRAIN = 1 << 18  # For fewer elements per thread, a second thread costs more than it saves


def threads_for(ranks_here: int) -> int:
    """Return how many threads a rank may use: cores divided by ranks on the host.

    The cores are those on which this process may run, and no more than the quota of its control
    groups. Bound threads are limited to the CPUs near their GPU, divided among its ranks.
    `OMP_NUM_THREADS` is ignored, because torchrun sets it to 1 even if cores are free.
    """
    cores = len(host.allowed_cpus())
    quota = _cpu_quota(host.THIS_HOST)
    if quota is not None:
        cores = min(cores, quota)
    threads = cores // max(1, ranks_here)
    cpus = update_cpus()
    if cpus:
        threads = min(threads, len(cpus) // _ranks_near_gpu(host.THIS_HOST, ranks_here))
    return max(1, threads)


def update_cpus() -> frozenset[int]:
    """Return the CPUs to which the update threads of this rank are bound.

    On a host with several NUMA nodes, these are the CPUs near the rank's GPU on which this process
    may run. The result is empty if the threads are not bound.
    """
    if not hasattr(os, "sched_setaffinity") or not _has_several_nodes(host.THIS_HOST):
        return frozenset()
    device = default_device()
    if device.type != "cuda":
        return frozenset()
    return _cpus_near_gpu(host.THIS_HOST, device.index or 0) & host.allowed_cpus()


def bind_update_thread() -> None:
    """Bind the calling thread to `update_cpus`. Call it in threads that this module starts only.

    A thread that migrates to another NUMA node reads memory of a remote node from then on.
    """
    cpus = update_cpus()
    if cpus:
        with suppress(OSError):  # the system no longer grants these CPUs
            os.sched_setaffinity(threading.get_native_id(), cpus)


@cache
def _cpu_quota(files: host.HostFiles) -> int | None:
    return files.cpu_quota()


@cache
def _has_several_nodes(files: host.HostFiles) -> bool:
    return len(files.nodes()) > 1


@cache
def _cpus_near_gpu(files: host.HostFiles, gpu: int) -> frozenset[int]:
    """Return the CPUs near a GPU; none if its NUMA node is not known."""
    node = files.node_of_gpu(pci_address(gpu))
    return frozenset() if node is None else files.cpus_near(node)


@cache
def _ranks_near_gpu(files: host.HostFiles, ranks_here: int) -> int:
    """Return how many ranks of this host have a GPU with the same CPUs as this rank's GPU.

    It is 1 if this process sees one GPU, because those of the other ranks are not known.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return 1
    own = _cpus_near_gpu(files, default_device().index or 0)
    sharers = sum(_cpus_near_gpu(files, rank % gpus) == own for rank in range(ranks_here))
    return max(1, sharers)  # 0 if the ranks do not use the first GPUs of the host


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process. A forked child creates its own."""
    return ThreadPoolExecutor(threads, "deepseek_zero-update", bind_update_thread)


def in_slices(numel: int, threads: int, run: Callable[[int, int], None]) -> None:
    """Call `run(start, stop)` for slices of the elements, on several threads.

    Slices begin at multiples of 64 elements. A small number of elements is one slice, which runs on
    the calling thread. There is one slice for each thread, because threads wait for the GIL
    between slices.

    Args:
        numel: Number of elements.
        threads: The largest number of threads.
        run: Processes the elements [start, stop).
    """
    parts = min(threads, max(1, numel // GRAIN))
    if parts == 1:
        run(0, numel)
        return
    step = -(-numel // parts // 64) * 64
    edges = [min(numel, step * part) for part in range(parts + 1)]
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(run, low, high) for low, high in pairwise(edges[1:])]
    try:
        run(edges[0], edges[1])
    finally:
        for other in others:
            other.result()
