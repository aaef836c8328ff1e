"""Axes in DeepSpeed's words: an mpu is read and compared, `tp_model_init` recorded, groups told of
an engine's mesh.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepseek_zero
from deepseek_zero.api.mesh_arguments import mesh_param_statement, mpu_statement
from deepseek_zero.base.errors import ConfigError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.compat.deepspeed import groups
from deepseek_zero.compat.deepspeed.accelerate_ranks import accelerate_statements
from deepseek_zero.compat.deepspeed.before_initialize import (
    tensor_parallel_statement,
    tp_model_init,
)
from deepseek_zero.compat.deepspeed.pipe import PipelineModule
from deepseek_zero.compat.deepspeed.pipe_topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepseek_zero.config.load import load
from deepseek_zero.engine.mesh_statements import MeshStatement, choose_mesh

# -- mpu


def mpu_of(**told: int) -> Any:
    """An mpu with getters get_<name>() that return these numbers."""
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


def test_an_mpu_that_counts_in_words_is_refused() -> None:
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


def test_a_topology_and_its_grid_state_stages_and_who_is_where() -> None:
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


def test_mesh_param_is_a_pair() -> None:
    assert mesh_param_statement([4, 2]) == MeshStatement("mesh_param=", {"sp": 2}, data_size=4)
    for wrong in ((4,), "42", (0, 2), (True, 2)):
        with pytest.raises(UsageError, match="mesh_param"):
            mesh_param_statement(wrong)


def test_accelerates_parallelism_is_heard_but_for_its_data_axes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    assert accelerate_statements() == ()
    config = SimpleNamespace(dp_replicate_size=8, dp_shard_size=1, tp_size=2, sp_size=1, cp_size=1)
    state = SimpleNamespace(
        AcceleratorState=SimpleNamespace(_shared_state={"parallelism_config": config})
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert accelerate_statements() == (MeshStatement("accelerate's ParallelismConfig", {"tp": 2}),)


# -- tp_model_init


def test_tp_model_init_records_and_initialize_compares() -> None:
    model = nn.Linear(2, 2)
    assert tp_model_init(model, 2, torch.bfloat16, config={"x": 1}) is model
    assert tensor_parallel_statement(nn.Linear(2, 2), load({}), has_mpu=False) is None

    def statement(config: dict[str, Any], has_mpu: bool = False) -> MeshStatement:
        found = tensor_parallel_statement(model, load(config), has_mpu)
        assert found is not None
        return found

    assert statement({"bf16": {"enabled": True}}).axes == {"tp": 2}
    assert statement({"tensor_parallel": {"autotp_size": 2}}, has_mpu=True).axes == {"tp": 2}
    with pytest.raises(
        ValueError,
        match=r"Conflicting tensor_parallel.autotp_size in config \(4\) and tp_model_init \(2\)\.",
    ):
        statement({"tensor_parallel": {"autotp_size": 4}})
    with pytest.raises(ConfigError, match="Conflicting dtype"):
        statement({"fp16": {"enabled": True}})
    with pytest.raises(ValueError, match=r"Conflicting tensor_parallel\.autotp_size"):
        deepseek_zero.initialize(model=model, config={"tensor_parallel": {"autotp_size": 4}})


# -- groups


class OneEngine:
    """All that `groups` asks of an engine."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh


def test_groups_are_told_of_the_engine_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups._Process, "engine", None)
    world = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=lambda: 16, get_rank=lambda: 13
    )
    monkeypatch.setattr(groups, "dist", world)
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (16, 13)
    assert groups.get_model_parallel_world_size() == groups._get_sequence_parallel_world_size() == 1
    assert groups.get_tensor_model_parallel_src_rank() == 13
    engine: Any = OneEngine(Mesh(pp=2, sp=2, tp=2).on_world(16, 13))
    groups.tell_of(engine)
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (2, 1)
    assert (
        groups.get_tensor_model_parallel_world_size(),
        groups.get_tensor_model_parallel_rank(),
    ) == (2, 1)
    assert (groups.get_sequence_parallel_world_size(), groups.get_sequence_parallel_rank()) == (
        2,
        0,
    )
    assert (
        groups.get_pipeline_model_parallel_world_size(),
        groups.get_pipeline_model_parallel_rank(),
    ) == (2, 1)
    assert (
        groups._get_sequence_data_parallel_world_size(),
        groups._get_sequence_data_parallel_rank(),
    ) == (4, 2)
    assert groups._get_data_parallel_group_ranks() == [9, 13]
    assert groups.get_tensor_model_parallel_src_rank() == 12
    del engine
    assert groups.get_data_parallel_world_size() == 16
