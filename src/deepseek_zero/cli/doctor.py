"""The command `deepseek-zero doctor`: show what this machine has.

It starts no process group and writes only unnamed files. On a GPU it allocates nothing but CUDA's
context, which page-locking needs. cli/__init__.py imports it late because it imports torch.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepseek_zero.base import host, memory
from deepseek_zero.base.device import pci_address
from deepseek_zero.base.errors import OutOfMemoryError, StorageError, UsageError
from deepseek_zero.base.plugins import COMMANDS, contributions
from deepseek_zero.base.world import (
    ask_mpi,
    discover,
    meeting_place,
    nodes_of,
    suspect_lone_process,
)
from deepseek_zero.cli.agent import gpus_of_this_machine
from deepseek_zero.cli.nodes import THREAD_VARIABLES, NodeMachine
from deepseek_zero.kernels import cuda
from deepseek_zero.kernels.choice import available
from deepseek_zero.kernels.nvidia import nvrtc_version
from deepseek_zero.kernels.threads import bind_update_thread, threads_for, update_cpus
from deepseek_zero.tiers.disk import Disk
from deepseek_zero.tiers.host import MOST_THREADS, free_host_bytes

GIB = 2**30

MIN_SHM_GIB = 1.0
MIN_DISK_GIB = 5.0
MIN_MEMORY_GIB = 4.0
"""Below these limits a small training run is likely to fail; they are from experience."""

MIN_OPEN_FILES = 256

SHM = Path("/dev/shm")

LOCK_TEST_BYTES = 256 << 20  # page-locked for a measurement, if a quarter of the memory is more
PLACE_TEST_BYTES = 8 << 20  # touched to see on which NUMA node pages are placed

BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")
FP16_CPU_FLAGS = ("amx_fp16", "avx512_fp16", "fphp")


class Severity(Enum):
    """Severity of a finding; the value is the style in the table."""

    GOOD = "green"
    NOTE = "yellow"
    BAD = "red"


@dataclass(frozen=True)
class Finding:
    """A line of the table: the subject, the value, its meaning, and its severity."""

    name: str
    value: str
    meaning: str
    verdict: Severity = Severity.GOOD


Findings = Iterator[Finding]


def findings() -> list[Finding]:
    """Return all findings, in the order of the table."""
    machine = NodeMachine(host.allowed_cores(), gpus_of_this_machine(os.environ))
    return [
        Finding("python", platform.python_version(), "3.11 or newer is needed"),
        _torch(),
        *(Finding(*row) for module in contributions(COMMANDS) for row in module.findings()),
        _world(),
        *_cpu(machine),
        _update_kernels(),
        *_gpu_update_kernels(),
        _memory(),
        _cgroup_memory(),
        *_gpus(machine),
        *_nodes(machine),
        _page_locking(),
        *_formats(machine),
        *_backends(machine),
        *_spaces(),
        _open_files(),
        *_grants(),
        *_default_launch(machine),
    ]


def _torch() -> Finding:
    """Report the version of torch, and whether it can use a GPU."""
    built = "a CPU build: it cannot use a GPU"
    if torch.version.cuda:
        built = f"built for CUDA {torch.version.cuda}"
    return Finding("torch", torch.__version__, built)


def _world() -> Finding:
    """Report the rank and world of a script that is started here, and their source."""
    try:
        found = meeting_place(os.environ, ask_mpi(os.environ, discover(os.environ)))
    except UsageError as error:
        return Finding("world", "unclear", str(error), Severity.BAD)
    if found.size == 1:
        if warning := suspect_lone_process(os.environ):
            return Finding("world", "one process", str(warning), Severity.NOTE)
        return Finding("world", "one process", f"source: {found.source}")
    meaning = f"source: {found.source}"
    if None not in (found.local_rank, found.local_size):
        meaning += f"; local rank {found.local_rank} of {found.local_size}"
    if None not in (found.node, found.nodes):
        meaning += f"; host {found.node} of {found.nodes}"
    meaning += f"; ranks meet at {found.address}:{found.port}"
    return Finding("world", f"rank {found.rank} of {found.size}", meaning)


def _cpu(machine: NodeMachine) -> Findings:
    """Report the CPU cores that this process may use, and numbers of threads that are set."""
    present = os.cpu_count() or machine.cores
    meaning = "all of them"
    if present != machine.cores:
        meaning = f"of {present}; this process may not use the others"
    yield Finding("CPU cores", str(machine.cores), meaning)
    kept = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    if kept:
        yield Finding(
            "threads", ", ".join(kept), "set by you, so `run` does not change it", Severity.NOTE
        )


def _update_kernels() -> Finding:
    """Report the implementation of optimizer updates on the CPU."""
    try:
        chosen = available("auto")
    except UsageError as error:
        return Finding("updates on the CPU", "unclear", str(error), Severity.BAD)
    if chosen == "torch":
        meaning = "by PyTorch's operations, slower; the extra `fast` installs llvmlite"
        return Finding("updates on the CPU", "PyTorch", meaning, Severity.NOTE)
    return Finding(
        "updates on the CPU",
        f"LLVM, by llvmlite {version('llvmlite')}",
        "in one pass over memory, with the same bits",
    )


def _gpu_update_kernels() -> Findings:
    """Report the implementation of optimizer updates on the GPU."""
    if not torch.cuda.is_available():
        return
    reason = cuda.why_not(torch.device("cuda", 0))
    if reason is None:
        major, minor = nvrtc_version()
        yield Finding("updates on the GPU", f"NVRTC {major}.{minor}", "in one pass over memory")
    else:
        yield Finding("updates on the GPU", "PyTorch", f"slower: {reason}", Severity.NOTE)


def _memory() -> Finding:
    """Report the free memory of the host, within the limit of the control groups."""
    total = psutil.virtual_memory().total
    free = free_host_bytes()
    group = host.THIS_HOST.cgroup_memory()
    if group is not None:
        total = min(total, group.limit)
    verdict = Severity.GOOD if free >= MIN_MEMORY_GIB * GIB else Severity.NOTE
    # bf16 training with fp32 main weights and Adam: 2 + 4 + 8 bytes, and a 2-byte gradient, for
    # each parameter.
    millions = int(free / 16 / 1e6)
    meaning = f"states of about {millions:,} million parameters (16 bytes each), before activations"
    return Finding("memory", _free_of(free, total), meaning, verdict)


def _free_of(free: int, total: int) -> str:
    """Return two numbers of bytes as text, in GiB."""
    return f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"


def _cgroup_memory() -> Finding:
    """Report the memory that the control groups of this process leave."""
    name = "memory of the cgroup"
    group = host.THIS_HOST.cgroup_memory()
    if group is None:
        return Finding(name, "no limit", "neither by version 1 nor by version 2")
    return Finding(
        name,
        _free_of(group.free, group.limit),
        f"version {group.version}; page-locked memory and the page cache count",
    )


def _nodes(machine: NodeMachine) -> Findings:
    """Report the NUMA nodes, and where update threads run and place pages."""
    nodes = host.THIS_HOST.nodes()
    listed = [f"node {number}: CPUs {host.format_cpus(cpus)}" for number, cpus in nodes.items()]
    yield Finding("NUMA nodes", str(len(nodes) or "unknown"), "; ".join(listed) or "not in /sys")
    try:
        cpus = update_cpus()
    except UsageError as error:
        yield Finding("update threads", "unclear", str(error), Severity.BAD)
        return
    if cpus:
        meaning = "bound to the CPUs near the GPU"
    elif len(nodes) < 2:
        meaning = "not bound: the host has one NUMA node"
    elif not machine.gpus:
        meaning = "not bound: there is no GPU"
    else:
        meaning = "not bound: no CPU near the GPU is known, or this process may not use it"
    threads = threads_for(machine.default_nproc)
    where = host.format_cpus(cpus or host.allowed_cpus())
    yield Finding("update threads", f"{threads} per rank on CPUs {where}", meaning)
    yield Finding(
        "pages of states", _place_of_pages(), "where update threads place them, by a test buffer"
    )


def _place_of_pages() -> str:
    """Return the NUMA nodes of a test buffer that update threads have touched."""
    slab = memory.Slab([PLACE_TEST_BYTES])
    slab.touch(1, lambda nbytes: None, bind_update_thread)
    buffer = slab.take(PLACE_TEST_BYTES, torch.uint8)
    assert buffer is not None
    found = host.THIS_HOST.pages_by_node(buffer.data_ptr())
    parts = [f"node {node}: {nbytes / 2**20:.0f} MiB" for node, nbytes in found.items()]
    return ", ".join(parts) or "unknown"


def _page_locking() -> Finding:
    """Measure how long it takes to touch and page-lock host memory."""
    name = "page-locked memory"
    if not torch.cuda.is_available():
        return Finding(name, "none", "without a GPU, nothing is page-locked")
    nbytes = min(LOCK_TEST_BYTES, free_host_bytes() // 4) // memory.PAGE * memory.PAGE
    slab = memory.Slab([nbytes])
    threads = min(MOST_THREADS, threads_for(1))
    torch.cuda.synchronize()  # CUDA's start is not part of the measurement
    began = time.perf_counter()
    slab.touch(threads, lambda nbytes: None, bind_update_thread)
    touched = time.perf_counter()
    try:
        slab.lock(lambda nbytes: None)
    except OutOfMemoryError as error:
        return Finding(name, "refused", str(error), Severity.BAD)
    locked = time.perf_counter()
    gigabytes = nbytes / 1e9
    return Finding(
        name,
        f"{(locked - began) / gigabytes:.2f} s per GB",
        f"{(touched - began) / gigabytes:.2f} s to touch the pages, the rest to lock them; "
        f"measured on {nbytes >> 20} MiB",
    )


def _gpus(machine: NodeMachine) -> Findings:
    """Report the memory, compute capability and NUMA node of each GPU."""
    if not machine.gpus:
        yield Finding(
            "GPUs", "none", "training runs on the CPU; everything works, slower", Severity.NOTE
        )
    for index, name in enumerate(machine.gpus):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        node = host.THIS_HOST.node_of_gpu(pci_address(index))
        place = "NUMA node unknown" if node is None else f"NUMA node {node}"
        yield Finding(
            f"GPU {name}",
            properties.name,
            f"{memory}, compute capability {properties.major}.{properties.minor}, {place}",
        )


def _formats(machine: NodeMachine) -> Findings:
    """Report which 16-bit formats the GPUs, or else the CPU, compute in hardware."""
    flags = host.THIS_HOST.cpu_flags()
    on_gpu = bool(machine.gpus)
    # Compute capability 8.0 (Ampere) added bf16 units; older GPUs emulate bf16, slower than fp16.
    capabilities = map(torch.cuda.get_device_capability, range(len(machine.gpus)))
    bf16 = on_gpu and min(capabilities) >= (8, 0)
    yield _format("bf16", on_gpu, bf16, [flag for flag in BF16_CPU_FLAGS if flag in flags])
    yield _format("fp16", on_gpu, on_gpu, [flag for flag in FP16_CPU_FLAGS if flag in flags])


def _format(name: str, on_gpu: bool, gpu_has_it: bool, cpu_flags: list[str]) -> Finding:
    """Report whether the GPUs, or the CPU without them, compute in a format."""
    if on_gpu:
        if gpu_has_it:
            return Finding(name, "yes", "in the GPU's hardware")
        return Finding(name, "slow", "works on these GPUs without hardware support", Severity.NOTE)
    if cpu_flags:
        return Finding(name, "yes", f"in the CPU's hardware ({cpu_flags[0]})")
    return Finding(
        name, "slow", "works on this CPU by conversion: saves memory, not time", Severity.NOTE
    )


def _backends(machine: NodeMachine) -> Findings:
    """Report the backends of torch.distributed."""
    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    nccl_use = "connects ranks on GPUs" if machine.gpus else "only GPUs need it"
    for name, there, is_needed, use in (
        ("gloo", has_gloo, True, "connects ranks on CPUs"),
        ("nccl", has_nccl, bool(machine.gpus), nccl_use),
    ):
        severity = Severity.BAD if is_needed and not there else Severity.GOOD
        yield Finding(name, "yes" if there else "no", use, severity)


def _spaces() -> Findings:
    """Report the free space of shared memory and of disks."""
    shared = "data loader workers and ranks of one machine exchange data here"
    if SHM.is_dir():
        yield _space("shared memory", SHM, MIN_SHM_GIB, shared)
    else:
        yield Finding("shared memory", "no /dev/shm", shared, Severity.BAD)
    yield _space("disk here", Path.cwd(), MIN_DISK_GIB, "checkpoints are saved here by default")
    yield _space("disk for scratch", Path(tempfile.gettempdir()), MIN_DISK_GIB, "temporary files")


def _space(name: str, path: Path, least_gib: float, meaning: str) -> Finding:
    """Report the free space at a path; less than `least_gib` is bad."""
    usage = shutil.disk_usage(path)
    verdict = Severity.GOOD if usage.free >= least_gib * GIB else Severity.BAD
    if verdict is Severity.BAD:
        meaning += f"; less than {least_gib:g} GiB is tight"
    return Finding(name, _free_of(usage.free, usage.total), meaning, verdict)


def _open_files() -> Finding:
    """Check the limit on descriptors.

    Sockets and shared pages between ranks, disk tiers and data loader workers need them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "" if soft == hard else f", up to {_limit(hard)} with `ulimit -n`"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        meaning = "tight: ranks and data loader workers need more"
        return Finding("open files", f"{soft}{most}", meaning, Severity.NOTE)
    return Finding("open files", f"{_limit(soft)}{most}", "ranks and data loader workers need them")


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else str(number)


def _grants() -> Findings:
    """Report the capabilities of a run here, as far as one process can detect them."""
    found = memory.capabilities(keeps_freed=memory.keep_freed_memory())
    for directory in dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir()))):
        try:
            disk = Disk(directory)
        except StorageError as error:
            yield Finding(f"states on '{directory}'", "cannot be stored", str(error), Severity.NOTE)
            continue
        found += disk.capabilities()
        disk.close()
    for each in found:
        verdict = Severity.NOTE if each.lacks else Severity.GOOD
        yield Finding(each.name, each.way, each.lacks or "the fastest method", verdict)


def _default_launch(machine: NodeMachine) -> Findings:
    """Report what `deepseek-zero run` starts without options."""
    nproc = machine.default_nproc
    threads = max(1, machine.cores // nproc)
    device = "one per GPU" if machine.gpus else "one per pair of CPU cores, at least one"
    yield Finding(
        "`run` starts", f"{nproc} x {threads} threads", f"{device}; --nproc N sets another number"
    )
    try:
        nodes = nodes_of(os.environ)
    except UsageError as error:
        yield Finding("`run` joins", "nothing", str(error), Severity.BAD)
        return
    if nodes is not None and nodes.num_nodes > 1:
        where = f"rendezvous at {nodes.address}" if nodes.address else "--master-addr is needed"
        here = f"node {'?' if nodes.node_rank is None else nodes.node_rank} of {nodes.num_nodes}"
        yield Finding("`run` joins", here, f"source: {nodes.source}; {where}; options override it")


def show(*, as_json: bool = False) -> None:
    """Print the findings as a table or as JSON."""
    found = findings()
    console = Console(highlight=False, markup=False)  # names of folders may contain brackets
    if as_json:
        entries = [{**asdict(one), "verdict": one.verdict.name.lower()} for one in found]
        console.print(json.dumps(entries, indent=2), soft_wrap=True)
        return
    table = Table(title="deepseek-zero doctor", title_justify="left", box=None, pad_edge=False)
    for heading in ("what", "found", "what it means"):
        table.add_column(heading, overflow="fold")
    for one in found:
        table.add_row(one.name, Text(one.value, one.verdict.value), one.meaning)
    console.print(table)
