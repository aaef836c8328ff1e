"""Arguments `mpu` and `mesh_param`: the mesh that they describe is compared with the engine's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import deepseek_zero
from deepseek_zero.api.mesh_arguments import mesh_param_statement, mpu_statement
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.engine.mesh_statements import MeshStatement, choose_mesh


def mpu_of(**told: int) -> Any:
    """Return an mpu whose getters `get_<name>()` return the given numbers."""
    return SimpleNamespace(
        **{f"get_{name}": lambda number=number: number for name, number in told.items()}
    )


def megatron(mesh: Mesh) -> Any:
    here = mesh.coordinates
    return mpu_of(
        tensor_model_parallel_world_size=mesh.tp,
        tensor_model_parallel_rank=here["tp"],
        pipeline_model_parallel_world_size=mesh.pp,
        pipeline_model_parallel_rank=here["pp"],
        data_parallel_world_size=mesh.data_size,
        data_parallel_rank=mesh.data_index,
    )


@pytest.mark.parametrize(
    ("mpu", "axes", "data"),
    [
        (mpu_of(model_parallel_world_size=4, model_parallel_rank=0), {"tp": 4}, None),
        (megatron(Mesh(pp=2, tp=2).on_world(8)), {"tp": 2, "pp": 2}, 2),
        (
            mpu_of(
                slice_parallel_world_size=2, model_parallel_world_size=4, pipe_parallel_world_size=2
            ),
            {"tp": 2, "pp": 2},
            None,
        ),
        (mpu_of(model_parallel_world_size=2, sequence_parallel_world_size=2), {"sp": 2}, None),
        (mpu_of(model_parallel_world_size=1, data_parallel_world_size=8), {"tp": 1}, 8),
    ],
)
def test_an_mpu_is_read(mpu: Any, axes: dict[str, int], data: int | None) -> None:
    found = mpu_statement(mpu)
    assert (dict(found.axes), found.data_size) == (axes, data)


def test_an_mpu_with_strings_as_sizes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mpu.get_model_parallel_world_size\(\) is 'two'"):
        mpu_statement(mpu_of(model_parallel_world_size="two"))  # type: ignore[arg-type]


def test_each_rank_of_an_mpu_is_compared_with_the_mesh() -> None:
    world, mesh = Mesh().on_world(8), Mesh(pp=2, tp=2).on_world(8)
    places = [{"tp": rank % 2, "pp": rank // 4, "data": rank // 2 % 2} for rank in range(8)]
    said = MeshStatement("mpu=", {"tp": 2, "pp": 2}, data_size=2, places=places)
    assert choose_mesh([said], world) == mesh
    places[5]["tp"] = 0
    with pytest.raises(
        UsageError, match=r"mpu= has rank 5 at tp=0, but the mesh \(.*\) has it at tp=1"
    ):
        choose_mesh([said], world)


def test_a_world_of_one_takes_an_mpu() -> None:
    mpu = megatron(Mesh().on_world(1))
    engine = deepseek_zero.initialize(model=nn.Linear(2, 2), config={}, mpu=mpu, mesh_param=(1, 1))[
        0
    ]
    assert (engine.mpu, engine.mp_world_size, engine.sequence_parallel_size) == (mpu, 1, 1)
    assert engine.data_parallel_group is None and engine.autotp_size() == 0
    with pytest.raises(UsageError, match="mpu= has 2 data-parallel ranks, but the mesh"):
        deepseek_zero.initialize(
            model=nn.Linear(2, 2), config={}, mpu=mpu_of(data_parallel_world_size=2)
        )


def test_mesh_param_is_a_pair() -> None:
    assert mesh_param_statement([4, 2]) == MeshStatement("mesh_param=", {"sp": 2}, data_size=4)
    for wrong in ((4,), "42", (0, 2), (True, 2)):
        with pytest.raises(UsageError, match="mesh_param"):
            mesh_param_statement(wrong)
