"""Test the topologies and grids of `deepspeed.pipe`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepseek_zero.api.mesh_arguments import mpu_statement
from deepseek_zero.base.errors import UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.compat.deepspeed.pipe import PipelineModule
from deepseek_zero.compat.deepspeed.pipe_topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepseek_zero.engine.mesh_statements import MeshStatement, choose_mesh


def test_a_topology_and_its_grid_have_the_stages_and_coordinates_of_ranks() -> None:
    def saying(topology: ProcessTopology) -> MeshStatement:
        return PipelineModule.mesh_statement(SimpleNamespace(topology=lambda: topology))  # type: ignore[arg-type]

    world, mesh = Mesh().on_world(8), Mesh(pp=2, tp=2).on_world(8)
    ours = saying(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))
    assert choose_mesh([ours], world) == mesh
    stages = saying(PipeDataParallelTopology(num_pp=2, num_dp=4))
    assert choose_mesh([stages, MeshStatement("mesh=", {"tp": 2})], world) == mesh
    with pytest.raises(UsageError, match=r"PipelineModule has rank 1 at tp=0, but the mesh"):
        choose_mesh([saying(ProcessTopology(["pipe", "model", "data"], [2, 2, 2]))], world)
    alone = mpu_statement(PipelineParallelGrid(PipeModelDataParallelTopology(1, 1, 1)))
    assert (dict(alone.axes), alone.data_size) == ({"tp": 1, "pp": 1}, 1)
