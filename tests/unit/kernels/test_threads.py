"""Test the number of threads of an update and the CPUs on which they run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepseek_zero.base import host
from deepseek_zero.base.memory import PAGE, Slab
from deepseek_zero.kernels import threads
from deepseek_zero.kernels.threads import GRAIN, bind_update_thread, in_slices, threads_for
from tests import fake_host
from tests.fake_host import files_of, two_nodes
from tests.needs import need


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_update_threads_do_not_follow_omp_num_threads(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 although other cores are idle (Megatron-LM#188)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    expected = max(1, 16 // ranks)
    assert threads_for(ranks) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_for(ranks) == expected


def test_ranks_share_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would suspend threads beyond the CPU quota during an update."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    files = files_of(tmp_path, {"sys/fs/cgroup/cpu.max": "800000 100000"})
    monkeypatch.setattr(host, "THIS_HOST", files)
    assert [threads_for(ranks) for ranks in (1, 2, 16)] == [8, 4, 1]


def test_bound_threads_are_no_more_than_their_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    fake_host.install(monkeypatch, two_nodes(tmp_path, ("0-7", "8-15")))
    assert [threads_for(ranks) for ranks in (1, 2, 4)] == [8, 8, 4]


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        ((1, 1, 0, 0), 2, 4),  # both ranks use GPUs of node 1
        ((1, 0, 1, 0), 2, 8),
        ((1, 1, 0, 0), 4, 4),
        ((1, 1, 0, 0), 8, 2),  # two ranks share each GPU
        ((1,), 2, 8),  # the launcher makes one GPU visible to each rank
    ],
)
def test_ranks_share_the_cpus_near_their_gpus(
    nodes: tuple[int, ...],
    ranks: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    for gpu, node in enumerate(nodes):
        files_of(tmp_path, {f"sys/bus/pci/devices/{gpu}/numa_node": str(node)})
    fake_host.install(monkeypatch, two_nodes(tmp_path, ("0-7", "8-15")))
    monkeypatch.setattr(threads, "pci_address", str)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(nodes))
    assert threads_for(ranks) == expected


def test_a_lone_rank_may_have_any_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may choose the GPU by LOCAL_RANK without starting ranks for the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    for gpu in range(4):
        files_of(tmp_path, {f"sys/bus/pci/devices/{gpu}/numa_node": str(gpu // 2)})
    fake_host.install(monkeypatch, two_nodes(tmp_path, ("0-7", "8-15")))
    monkeypatch.setattr(threads, "pci_address", str)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(threads, "default_device", lambda: torch.device("cuda", 3))
    assert threads_for(1) == 8


@pytest.fixture
def own_pool() -> Iterator[None]:
    """Start a new thread pool for this test and for those after it."""
    threads._pool.cache_clear()
    yield
    threads._pool.cache_clear()


def affinities_of_threads(threads: int) -> tuple[set[int], list[set[int]]]:
    """Return the CPUs of the calling thread and of each worker during an update."""
    meeting = threading.Barrier(threads)  # so that no worker runs two slices
    found: dict[int, set[int]] = {}

    def run(low: int, high: int) -> None:
        found[threading.get_native_id()] = os.sched_getaffinity(0)
        meeting.wait(timeout=60)

    in_slices(threads * GRAIN, threads, run)
    own = found.pop(threading.get_native_id())
    return own, list(found.values())


@pytest.mark.usefixtures("own_pool")
def test_update_threads_stay_on_the_node_of_their_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that migrate would read memory of the other node (torchtitan#3489)."""
    allowed = sorted(os.sched_getaffinity(0))
    need(len(allowed) > 1, "two CPUs")
    far, near = allowed[0], allowed[-1]
    fake_host.install(monkeypatch, two_nodes(tmp_path, (str(far), str(near))))
    own, workers = affinities_of_threads(3)
    assert own == set(allowed) == os.sched_getaffinity(0), "the calling thread is not bound"
    assert workers == [{near}, {near}]
    touched: list[set[int]] = []

    def begin() -> None:
        bind_update_thread()
        touched.append(os.sched_getaffinity(0))

    Slab([PAGE]).touch(1, lambda nbytes: None, begin)
    assert touched == [{near}], "pages are placed on the node of the thread that touches them"


@pytest.mark.usefixtures("own_pool")
@pytest.mark.parametrize("case", ["one node", "no GPU", "node not known", "CPUs not allowed"])
def test_update_threads_are_not_bound_otherwise(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    near = "1000" if case == "CPUs not allowed" else str(allowed[-1])
    files = two_nodes(tmp_path, (str(allowed[0]), near))
    if case == "one node":
        (tmp_path / fake_host.NODES / "node0/cpulist").write_text("\n")
    if case == "node not known":
        files_of(tmp_path, {f"sys/bus/pci/devices/{fake_host.GPU}/numa_node": "-1"})
    fake_host.install(monkeypatch, files, gpu=case != "no GPU")
    own, workers = affinities_of_threads(2)
    assert [own, *workers] == [set(allowed)] * 2
