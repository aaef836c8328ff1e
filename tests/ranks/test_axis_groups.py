"""Process groups of a mesh for programs that call torch.distributed, and an inconsistent mpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import deepseek_zero
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.compat.deepspeed import groups


@pytest.mark.ranks(4)
def test_groups_of_a_mesh_are_created_once_and_sum_over_their_ranks() -> None:
    rank = dist.get_rank()
    mesh = Mesh(pp=2, tp=2).on_world(4, rank)
    groups.make_groups(mesh)
    made = {axis: groups.group_of(axis, over=mesh) for axis in ("tp", "pp", "sp")}
    for axis, group in made.items():
        assert group is groups.group_of(axis, over=mesh)
        assert tuple(dist.get_process_group_ranks(group)) == mesh.ranks_along(axis)
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=group)
        assert value.item() == sum(mesh.ranks_along(axis))
    assert groups.group_of("pp", "tp", over=mesh) is dist.group.WORLD
    assert groups.get_data_parallel_group() is dist.group.WORLD


@pytest.mark.ranks(2)
def test_every_rank_gets_an_error_with_the_differing_rank_of_an_mpu() -> None:
    rank = dist.get_rank()
    told = {"get_data_parallel_world_size": lambda: 2, "get_data_parallel_rank": lambda: 0}
    with pytest.raises(
        UsageError, match=r"mpu= has rank 1 at data=0, but the mesh .* has it at data=1"
    ):
        deepseek_zero.initialize(
            model=torch.nn.Linear(2, 2), config={}, mpu=SimpleNamespace(**told)
        )
    told["get_data_parallel_world_size"] = lambda: 2 + rank
    with pytest.raises(UsageError, match="mpu of rank 1 has data=3, but that of rank 0 has data=2"):
        deepseek_zero.initialize(
            model=torch.nn.Linear(2, 2), config={}, mpu=SimpleNamespace(**told)
        )
    told |= {"get_data_parallel_world_size": lambda: 2, "get_data_parallel_rank": lambda: rank}
    engine = deepseek_zero.initialize(
        model=torch.nn.Linear(2, 2), config={}, mpu=SimpleNamespace(**told)
    )[0]
    assert engine.data_parallel_group is dist.group.WORLD
    assert dist.get_process_group_ranks(engine.get_sequence_parallel_group()) == [rank]
