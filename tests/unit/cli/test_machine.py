"""What a machine offers a launch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepseek_zero.base import host
from deepseek_zero.base.host import allowed_cores
from deepseek_zero.cli.nodes import NodeMachine, visible_gpus
from tests.fake_host import files_of


@pytest.mark.parametrize(("cores", "nproc"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_without_gpus_the_default_is_a_process_per_pair_of_cores(cores: int, nproc: int) -> None:
    assert NodeMachine(cores).default_nproc == nproc


def test_with_gpus_the_default_is_a_process_per_gpu() -> None:
    assert NodeMachine(64, ("0", "1", "2")).default_nproc == 3


@pytest.mark.parametrize(("cores", "nproc", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_ranks_share_the_cores(cores: int, nproc: int, threads: str) -> None:
    assert NodeMachine(cores).thread_environment(nproc, {}) == {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def test_threads_set_by_the_user_stay() -> None:
    assert NodeMachine(8).thread_environment(2, {"OMP_NUM_THREADS": "7"}) == {
        "MKL_NUM_THREADS": "4"
    }


def test_a_containers_quota_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = "sys/fs/cgroup/cpu.max"
    monkeypatch.setattr(host, "THIS_HOST", files_of(tmp_path, {quota: "50000 100000"}))
    assert allowed_cores() == 1
    files_of(tmp_path, {quota: "max 100000"})
    assert allowed_cores() == len(os.sched_getaffinity(0))
    (tmp_path / quota).unlink()
    assert allowed_cores() == len(os.sched_getaffinity(0))


def test_visible_gpus_are_the_entries_of_the_environment_variable() -> None:
    assert visible_gpus(4, {}) == ("0", "1", "2", "3")
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "3, 5"}) == ("3", "5")
    assert visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}) == ("GPU-aa",)
    assert visible_gpus(0, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ()
