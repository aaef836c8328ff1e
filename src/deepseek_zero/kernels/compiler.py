"""Compile loops over flat CPU memory with numba, if it is installed, and run them on threads.

numba is optional (the extra `fast`). It is imported at the first update and not with the package,
because the import takes 0.3 s and each kernel takes up to 0.7 s to compile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from ..base import host
from ..base.device import default_device, pci_address
from ..base.errors import UsageError
from ..base.log import log_once

VARIABLE = "DEEPSEEK_ZERO_KERNELS"
GRAIN = 1 << 18  # For fewer elements per thread, a second thread costs more than it saves


def chosen(wanted: str) -> str:
    """Return the choice of the user: "auto", "numba" or "torch".

    The environment variable DEEPSEEK_ZERO_KERNELS overrides the configuration.

    Args:
        wanted: Value of the configuration key.

    Raises:
        UsageError: The environment variable has another value.
    """
    wanted = os.environ.get(VARIABLE) or wanted
    if wanted not in ("auto", "numba", "torch"):
        raise UsageError(
            f"{VARIABLE} is {wanted!r}.",
            "It chooses what computes the optimizer's updates.",
            "set it to auto, numba or torch, or leave it out.",
        )
    return wanted


def available(wanted: str) -> str:
    """Return what computes updates on a CPU: "auto", "numba" or "torch".

    Args:
        wanted: Value of the configuration key; see `chosen`.

    Raises:
        UsageError: numba was chosen and is not installed.
    """
    wanted = chosen(wanted)
    if wanted == "torch" or find_spec("numba") is not None:
        return wanted
    if wanted == "numba":
        raise UsageError(
            "updates are to be computed by numba, which is not installed.",
            'The configuration says "optimizer": {"kernels": "numba"}, or '
            f"{VARIABLE} says numba.",
            "install the extra `fast`: pip install numba; or leave the setting out.",
        )
    log_once(
        "numba is not installed, so PyTorch computes updates on a CPU, more slowly; the extra "
        "`fast` installs it."
    )
    return "torch"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that numba compiles at its first call.

    The compiled function releases the GIL. There is no cache on disk, because numba raises if it
    finds no writable folder.
    """
    njit = import_module("numba").njit
    found: Callable[..., Any] = njit(nogil=True, error_model="numpy")(function)
    return found


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
    return sum(_cpus_near_gpu(files, rank % gpus) == own for rank in range(ranks_here))


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


@cache
def converts_fp16() -> bool:
    """Return whether the processor that numba compiles for converts fp16 numbers.

    For other processors, LLVM emits calls of functions that do not exist here, and the process
    aborts.
    """
    binding = import_module("llvmlite.binding")
    target = import_module("numba.core.registry").cpu_target
    triple, name, features = target.target_context.codegen().magic_tuple()
    module = binding.parse_assembly(
        "define half @there_and_back(half %number) {\n"
        "  %wide = fpext half %number to float\n"
        "  %sum = fadd float %wide, %wide\n"
        "  %found = fptrunc float %sum to half\n"
        "  ret half %found\n"
        "}\n"
    )
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=name, features=features)
    text = machine.emit_assembly(module)
    return not any(function in text for function in ("hfsf2", "sfhf2", "_ieee"))
