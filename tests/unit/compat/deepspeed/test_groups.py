"""Test the process groups of `deepspeed.utils.groups`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepseek_zero import comm
from deepseek_zero.base.errors import NotBuiltError, UsageError
from deepseek_zero.base.mesh import Mesh
from deepseek_zero.compat.deepspeed import (
    groups,
)


def test_groups_and_collectives_of_a_world_of_one() -> None:
    assert groups.get_data_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
    assert (
        groups._get_data_parallel_group_ranks() == [0]
        and groups._get_sequence_parallel_group() is None
    )
    with pytest.raises(NotBuiltError, match="ep_size=2"):
        groups.initialize(ep_size=2)
    value, out = torch.arange(3.0), torch.zeros(3)
    comm.allgather_fn(out, value)
    comm.all_reduce_coalesced([value])
    comm.inference_all_reduce(value)
    assert torch.equal(out, value) and comm.has_all_gather_into_tensor()
    comm.configure(enabled=True)
    try:
        comm.all_reduce(torch.ones(256), log_name="mine")
        comm.barrier(prof=True)
        assert (
            comm.get_logged_comm_ops() == ["mine", "barrier"]
            and comm.get_comm_operation_count() == 2
        )
        summary = comm.log_summary(return_dict=True)
        assert summary is not None and summary["summary"]["mine"][1024]["count"] == 1
        comm.reset_log()
        assert not comm.has_comm_data()
    finally:
        comm.configure(enabled=False)


class OneEngine:
    """An engine with the only attribute that `groups` reads."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh


def test_groups_use_the_mesh_of_the_current_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups._Process, "stated", None)
    world = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=lambda: 16, get_rank=lambda: 13
    )
    monkeypatch.setattr(groups, "dist", world)
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (16, 13)
    assert groups.get_model_parallel_world_size() == groups._get_sequence_parallel_world_size() == 1
    assert groups.get_tensor_model_parallel_src_rank() == 13
    engine: Any = OneEngine(Mesh(pp=2, sp=2, tp=2).on_world(16, 13))
    groups.use_mesh_of(engine)
    del engine  # the groups remain in use after the engine was deleted
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
    another = object()
    monkeypatch.setattr(groups, "get_world_group", lambda: another)
    assert groups.get_data_parallel_world_size() == 16, "another default group"
    with pytest.raises(UsageError, match="tensor_model_parallel_size=0"):
        groups._init_tp_mesh_device(0)
