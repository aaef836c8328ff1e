"""Arithmetic of named mesh axes for any rank and world size, without a process group."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.log import log_first
from deepseek_zero.base.mesh import AXES, Mesh, mesh_of


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 1, 3, 1, 2), (2, 2, 2, 2, 2), (1, 3, 2, 1, 1)]
)
def test_a_rank_is_the_number_of_its_coordinates_with_tp_fastest(sizes: tuple[int, ...]) -> None:
    _, replicate, shard, sp, tp = sizes
    mesh = Mesh(*sizes)
    places = list(itertools.product(*map(range, sizes)))
    assert mesh.world_size == len(places)
    for rank, (a, b, c, d, e) in enumerate(places):
        here = replace(mesh, rank=rank)
        assert rank == (((a * replicate + b) * shard + c) * sp + d) * tp + e
        assert tuple(here.coordinates.values()) == (a, b, c, d, e)
        assert here.rank_at() == rank == mesh.rank_at(**here.coordinates)
        assert here.data_index == b * shard + c
        assert here.shard_index == c * sp + d


def test_data_shard_and_reduce_size_are_three_numbers() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=5, sp=7, tp=11)
    assert (mesh.data_size, mesh.shard_size, mesh.reduce_size) == (15, 35, 105)
    assert mesh.world_size == 2 * 3 * 5 * 7 * 11


def test_groups_along_axes_cut_the_world_and_meet_in_one_rank() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=2).on_world(4, rank=2)
    assert mesh.ranks_along("dp_shard") == (2, 3)
    assert mesh.ranks_along("dp_replicate") == (0, 2)
    assert mesh.groups_along("dp_shard") == ((0, 1), (2, 3))
    assert mesh.groups_along("dp_replicate") == ((0, 2), (1, 3))
    big = Mesh(pp=2, dp_replicate=2, dp_shard=2, sp=2, tp=2)
    for axes in itertools.chain.from_iterable(itertools.combinations(AXES, n) for n in range(6)):
        groups = big.groups_along(*axes)
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(32))
        assert {len(group) for group in groups} == {2 ** len(axes)}


def test_ranks_that_no_other_axis_uses_shard_states() -> None:
    assert Mesh(dp_replicate=2).on_world(8).sizes == (1, 2, 4, 1, 1)
    assert Mesh().on_world(8).sizes == (1, 1, 8, 1, 1)
    with pytest.raises(UsageError, match="does not fit a world of 6"):
        Mesh(dp_replicate=4).on_world(6)
    with pytest.raises(UsageError, match="does not fit a world of 8"):
        Mesh(dp_replicate=2, dp_shard=2).on_world(8)


class FakeDeviceMesh:
    def __init__(self, names: tuple[str, ...], ranks: torch.Tensor) -> None:
        self.mesh_dim_names, self.mesh = names, ranks


@pytest.mark.parametrize(
    "value",
    [
        {"dp_replicate": 2, "dp_shard": 4},
        {"replicate": 2, "shard": 4},
        Mesh(dp_replicate=2, dp_shard=4),
        FakeDeviceMesh(("dp_replicate", "dp_shard"), torch.arange(8).view(2, 4)),
        SimpleNamespace(dp_replicate_size=2, dp_shard_size=4, tp_size=1, sp_size=1, cp_size=1),
    ],
    ids=["dict", "other names", "Mesh", "DeviceMesh", "ParallelismConfig"],
)
def test_a_mesh_is_read_from_every_spelling(value: Any) -> None:
    assert mesh_of(value) == Mesh(dp_replicate=2, dp_shard=4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"rows": 2}, "names the axis 'rows'"),
        ({"shard": 2, "dp": 2}, "states twice"),
        ({"dp_shard": 0}, "dp_shard is 0"),
        ({"dp_replicate": "two"}, "dp_replicate is 'two'"),
        ({"dp_replicate": True}, "dp_replicate is True"),
        (4, "mesh=4 is not a mesh"),
        (
            FakeDeviceMesh(("dp_shard", "dp_replicate"), torch.arange(8).view(2, 4)),
            "axes in the order",
        ),
        (
            FakeDeviceMesh(("dp_replicate", "dp_shard"), torch.arange(8).view(4, 2).T),
            "ranks in the order",
        ),
        (SimpleNamespace(dp_replicate_size=1, dp_shard_size=1, cp_size=2), "names the axis 'cp'"),
    ],
)
def test_invalid_meshes_are_named(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mesh_of(value)


def test_any_rank_of_a_thousand_is_planned_quickly() -> None:
    began = time.thread_time()  # CPU time, because the machine may be busy
    for rank in range(1024):
        mesh = Mesh(pp=4, dp_replicate=4, tp=8).on_world(1024, rank)
        assert mesh.shard_size == 8
        assert rank in mesh.ranks_along("dp_shard")
    assert time.thread_time() - began < 2.0


CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}


def test_a_pod_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_first.cache_clear()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with caplog.at_level("WARNING"):
        for _ in range(2):
            deepseek_zero.initialize(model=nn.Linear(4, 4), config=CONFIG)
    lines = [
        record.getMessage()
        for record in caplog.records
        if "JOB_COMPLETION_INDEX=1" in record.getMessage()
    ]
    assert len(lines) == 1 and "--node-rank $JOB_COMPLETION_INDEX" in lines[0]


def test_a_slurm_job_of_several_machines_and_tasks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(
        UsageError, match="SLURM_JOB_NUM_NODES=2 and SLURM_NTASKS=4, but this process has no rank"
    ):
        deepseek_zero.initialize(model=nn.Linear(4, 4), config=CONFIG)
